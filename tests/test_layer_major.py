"""Several rows that pass each block together: the numbers of one row after another, gradients rounded once."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hymoe.engine import parallel
from hymoe.engine.data.loader import StepBatch
from hymoe.engine.recipe import Train
from hymoe.engine.train import take_step
from hymoe.kernels.embedding import embedding
from hymoe.kernels.packed import Packed
from hymoe.model import rows as rows_module
from hymoe.model.names import is_small
from hymoe.model.net import Block, HybridLM
from tests.close import assert_close_rel, relative_error
from tests.exchange_worker import micro_batch, rows_of
from tests.plan_worker import build, job_of, weights
from tests.tiny import tiny_lm

ROWS = ((9, 14), (5,), (3, 1, 20), (12,), (7, 7))
KEEPS = ("all", "acts", "inputs")


def gradients(lm: HybridLM) -> dict[str, Tensor]:
    """Taken away from the parameters."""
    found = {name: p.grad for name, p in lm.named_parameters()}
    lm.zero_grad()
    return found


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("kind", ["mamba", "moe", "full_attention", "mlp"])
def test_a_bfloat16_gradient_is_the_float32_sum_rounded_once(kind: str, keep: str) -> None:
    """To the bit, the last row first; small tensors are float32 and their own sum."""
    lm = tiny_lm(4, dtype=torch.bfloat16, layers_block_type=[kind])
    lm.set_keep(keep)
    layer, rng = lm.layers[0], torch.Generator().manual_seed(2)
    packed = tuple(Packed.from_lengths(lengths) for lengths in ROWS)
    xs, douts = (
        [torch.randn(p.num_tokens, 32, generator=rng).bfloat16() for p in packed] for _ in range(2)
    )
    sums: dict[str, Tensor] = {}
    dxs = []
    for x, row, dout in reversed(list(zip(xs, packed, douts, strict=True))):
        leaf = x.clone().requires_grad_()
        layer((leaf,), (row,), torch.bfloat16)[0].backward(dout)
        dxs.insert(0, leaf.grad)
        for name, parameter in layer.named_parameters():
            sums[name] = sums.get(name, 0) + parameter.grad.float()
        layer.zero_grad()

    leaves = [x.clone().requires_grad_() for x in xs]
    torch.autograd.backward(layer(tuple(leaves), packed, torch.bfloat16), douts)
    for leaf, dx in zip(leaves, dxs, strict=True):
        assert torch.equal(leaf.grad, dx)
    rounded = 0
    for name, parameter in layer.named_parameters():
        if is_small(f"layers.0.{name}"):
            assert_close_rel(parameter.grad, sums[name], 1e-6, name)
        else:
            assert torch.equal(parameter.grad, sums[name].bfloat16()), name
            rounded += 1
    assert rounded >= 2


def test_one_rows_gradients_are_added_before_the_next_row_runs_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a block would hold the gradients, and what they are made of, of all rows at once."""
    events = []
    add, run = rows_module._Sum.add, Block._run

    def added(self: rows_module._Sum, dweight: Tensor) -> Tensor | None:
        events.append("add")
        return add(self, dweight)

    def ran(self: Block, *args: object) -> Tensor:
        events.append("run")
        return run(self, *args)

    monkeypatch.setattr(rows_module._Sum, "add", added)
    monkeypatch.setattr(Block, "_run", ran)
    lm = tiny_lm(4, dtype=torch.bfloat16, layers_block_type=["moe", "moe"])
    lm.set_keep("inputs")
    loss, _ = lm.loss(*rows_of([micro_batch(n) for n in range(3)]))
    events.clear()
    loss.backward()
    assert (
        events == ["run", "add", "add", "add", "add"] * 6
    )  # 2 blocks x 3 rows; up and down, routed and shared


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize(
    "changes",
    [{}, {"tie_word_embeddings": True}, {"moe_latent_size": 16, "residual_in_fp32": True}],
    ids=["plain", "tied", "latent"],
)
def test_rows_together_are_rows_one_by_one(changes: dict, keep: str) -> None:
    """Loss and every gradient in float32; a row without a supervised token is among them."""
    lm = tiny_lm(4, **changes)
    batches = [micro_batch(n) for n in range(4)]
    loss, sums = 0.0, dict.fromkeys(dict(lm.named_parameters()), 0)
    for micro in batches:
        one, _ = lm.loss(micro.input_ids, micro.labels, micro.packed)
        one.backward()
        loss += one.item()
        for name, grad in gradients(lm).items():
            sums[name] = sums[name] + grad.double()
    lm.set_keep(keep)
    together, count = lm.loss(*rows_of(batches))
    together.backward()
    assert count == sum(micro.packed.supervised for micro in batches)
    assert together.item() == pytest.approx(loss, rel=1e-6)
    for name, grad in gradients(lm).items():
        assert_close_rel(grad, sums[name], 1e-6, name)


def test_boundaries_may_be_tensors() -> None:
    lm = tiny_lm(4)
    ids, labels, packed = rows_of([micro_batch(n) for n in range(3)])
    expected, known = lm.loss(ids, labels, packed)
    found, count = lm.loss(ids, labels, [row.cu_seqlens for row in packed])
    assert torch.equal(found, expected)
    assert count == known
    with pytest.raises(ValueError, match=r"input_ids \(24,\): the documents have 7 tokens"):
        lm(ids, [packed[1], packed[0], packed[2]])


def test_a_common_words_gradient_is_summed_in_float32() -> None:
    """In BF16 ones add up to 256 and no further, and torch's own stops there or near."""
    weight = torch.zeros(5, 8, dtype=torch.bfloat16, requires_grad=True)
    rng = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 5, (4000,), generator=rng)
    dout = torch.rand(4000, 8, generator=rng).bfloat16()
    expected = torch.zeros(5, 8, dtype=torch.float64).index_add_(0, ids, dout.double())
    (plain,) = torch.autograd.grad(torch.nn.functional.embedding(ids, weight), weight, dout)
    out = embedding(ids, weight)
    (found,) = torch.autograd.grad(out, weight, dout)
    assert torch.equal(out, weight[ids])
    assert_close_rel(found, expected, 2**-8)
    assert relative_error(plain, expected) > 0.1


@pytest.mark.parametrize("together", [1, 2, 3])
def test_a_step_in_several_passes(together: int) -> None:
    """Five micro-steps in passes of one, two or three, the last one shorter, against all together."""
    plan = parallel.start(torch.device("cpu"), 1)
    batches = tuple(micro_batch(n) for n in range(5))
    supervised = sum(micro.packed.supervised for micro in batches)
    found = {}
    for some in (0, together):
        lm, _ = build(plan)
        job = job_of(plan, lm, [StepBatch(batches, supervised, 100, 1.0)])
        job.recipe = replace(job.recipe, train=Train(micro_steps_together=some))
        passes = []
        lm.register_forward_pre_hook(lambda _, args, seen=passes: seen.append(len(args[0])))
        taken = take_step(job, 1)
        found[some] = (taken, weights(lm), passes)
    assert found[0][2] == [5]
    assert found[together][2] == [together] * (5 // together) + [5 % together] * (5 % together > 0)
    for key in ("grad_norm", "is_applied"):
        one, other = (getattr(found[some][0].report, key) for some in (0, together))
        assert float(one) == pytest.approx(float(other), rel=1e-6)
    assert_close_rel(found[together][0].sums, found[0][0].sums, 1e-6)
    for name, value in found[together][1].items():
        assert_close_rel(
            value, found[0][1][name], 1e-4, name
        )  # Adam's first step: see test_plan.py
