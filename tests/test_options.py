"""Options that transformers ignores, against the plain float64 network of `tests/plain.py`."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hymoe.kernels.packed import Packed
from hymoe.kernels.ssd.op import ssd_scan
from hymoe.model.attention import Attention
from hymoe.model.names import tensor_specs
from hymoe.model.net import HybridLM
from tests.close import assert_close_rel, relative_error
from tests.plain import plain_hidden, plain_loss, plain_weights
from tests.tiny import tiny_config, tiny_lm

LENGTHS = (9, 1, 20)
INFINITY = float("inf")
LATENT = {"moe_latent_size": 16, "mlp_bias": True, "n_group": 4, "topk_group": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "every-kind": {},
    "attention-bias": {"attention_bias": True, "layers_block_type": ["attention"] * 2},
    "every-bias": {"attention_bias": True, "use_bias": True, "mlp_bias": True},
    "latent-groups": {**LATENT, "norm_topk_prob": False},
    "tied": {"tie_word_embeddings": True},
    "no-lower-limit": {"time_step_limit": None},
    "upper-limit": {"time_step_limit": [0.0, 0.6]},
    "narrow-limit": {"time_step_limit": [0.5, 0.6]},
    "wide-heads": {"head_dim": 24, "mamba_head_dim": 20, "attention_bias": True},
}


def row(lengths: tuple[int, ...] = LENGTHS) -> tuple[Tensor, Tensor]:
    tokens = sum(lengths)
    input_ids, labels = torch.randint(
        0, 97, (2, tokens), generator=torch.Generator().manual_seed(1)
    )
    return input_ids, labels.masked_fill(torch.arange(tokens) % 3 == 0, -100)


def gradients(lm: HybridLM) -> dict[str, Tensor]:
    input_ids, labels = row()
    lm.loss(input_ids, labels, Packed.from_lengths(LENGTHS))[0].backward()
    return {name: p.grad for name, p in lm.named_parameters()}


@pytest.mark.parametrize("name", CONFIGS)
def test_float64_equals_the_plain_network(name: str) -> None:
    """Loss, hidden states and every gradient, to float64's own rounding."""
    lm = tiny_lm(seed=3, **CONFIGS[name]).double()
    weights = plain_weights(lm)
    input_ids, labels = row()
    packed = Packed.from_lengths(LENGTHS)
    hidden = plain_hidden(lm.config, weights, input_ids, LENGTHS)
    assert_close_rel(lm(input_ids, packed), hidden, 1e-11, "hidden states")
    loss = plain_loss(lm.config, weights, input_ids, labels, LENGTHS)
    assert_close_rel(lm.loss(input_ids, labels, packed)[0], loss, 1e-11, "loss")
    loss.backward()
    assert_gradients(gradients(lm), weights, 1e-10)


@pytest.mark.parametrize("name", CONFIGS)
def test_float32_equals_the_plain_network(name: str) -> None:
    lm = tiny_lm(seed=4, **CONFIGS[name])
    weights = plain_weights(lm)
    input_ids, labels = row()
    plain_loss(lm.config, weights, input_ids, labels, LENGTHS).backward()
    assert_gradients(gradients(lm), weights, 1e-5)


def assert_gradients(found: dict[str, Tensor], weights: dict[str, Tensor], bound: float) -> None:
    """One shift of all keys changes nothing: what k_proj.bias gets is rounding, of the scale of q_proj.bias."""
    for name, gradient in found.items():
        expected = weights[name].grad
        if name.endswith("k_proj.bias"):
            scale = weights[name.replace("k_proj", "q_proj")].grad.norm()
            assert expected.norm() < 1e-12 * scale
            assert gradient.norm() < bound * scale, name
        else:
            assert_close_rel(gradient, expected, bound, name)


def test_attention_has_its_biases_where_asked_for() -> None:
    names = {name for name, _ in tiny_lm(**CONFIGS["attention-bias"]).named_parameters()}
    for projection in ("q_proj", "k_proj", "v_proj", "o_proj"):
        assert f"layers.1.mixer.{projection}.bias" in names
    assert not [n for n, _ in tiny_lm().named_parameters() if "_proj.bias" in n]


def inputs_of_layers(lm: HybridLM) -> tuple[list[Tensor], list[Tensor]]:
    """What enters each block and each mixer."""
    blocks, mixers = [], []
    hooks = []
    for layer in lm.layers:
        hooks.append(layer.register_forward_pre_hook(lambda _, args: blocks.extend(args[0])))
        hooks.append(layer.mixer.register_forward_pre_hook(lambda _, args: mixers.append(args[0])))
    lm(row()[0], Packed.from_lengths(LENGTHS))
    for hook in hooks:
        hook.remove()
    return blocks, mixers


@pytest.mark.parametrize("in_float32", [False, True], ids=["bfloat16", "float32"])
def test_the_residual_stream_of_a_bfloat16_model(in_float32: bool) -> None:
    lm = tiny_lm(dtype=torch.bfloat16, residual_in_fp32=in_float32)
    blocks, mixers = inputs_of_layers(lm)
    assert {x.dtype for x in blocks} == {torch.float32 if in_float32 else torch.bfloat16}
    assert {x.dtype for x in mixers} == {torch.bfloat16}
    assert lm(row()[0], Packed.from_lengths(LENGTHS)).dtype == torch.bfloat16
    # It is not bfloat16 numbers in a wider dtype either: the sums keep the bits that a bfloat16 has no room for.
    rounded = [torch.equal(x.bfloat16().to(x.dtype), x) for x in blocks[1:]]
    assert rounded == [not in_float32] * 3


def test_a_float32_residual_keeps_small_updates() -> None:
    """Layers that add to a large stream: in bfloat16 most of it is lost, in float32 none."""
    errors = {}
    for in_float32 in (False, True):
        lm = tiny_lm(
            dtype=torch.bfloat16, residual_in_fp32=in_float32, layers_block_type=["mlp"] * 12
        )
        with torch.no_grad():
            lm.embeddings.weight.mul_(300)
        expected = plain_hidden(lm.config, plain_weights(lm), row()[0], LENGTHS)
        start = lm.embeddings.weight[row()[0]].double()
        with torch.no_grad():
            last = inputs_of_layers(lm)[0][-1].double() - start
            exact = _stream_before_last(lm, row()[0])
        assert expected.isfinite().all()
        errors[in_float32] = relative_error(last, exact - start)
        gradients(lm)
        assert all(p.grad.isfinite().all() for p in lm.parameters())
    assert errors[True] < 0.02 < 0.1 < errors[False]


def _stream_before_last(lm: HybridLM, input_ids: Tensor) -> Tensor:
    """The residual stream that enters the last block, in float64; MLP layers only."""
    x = lm.embeddings.weight[input_ids].double()
    for layer in lm.layers[:-1]:
        norm = torch.sqrt(x.square().mean(-1, keepdim=True) + lm.config.norm_eps)
        up = (layer.norm.weight.double() * x / norm) @ layer.mixer.up_proj.weight.double().T
        x = x + up.relu().square() @ layer.mixer.down_proj.weight.double().T
    return x


def test_tied_embeddings_are_one_parameter_with_both_gradients() -> None:
    tied = tiny_lm(seed=3, tie_word_embeddings=True)
    apart = tiny_lm(seed=3)
    apart.load_state_dict({**tied.state_dict(), "head.weight": tied.embeddings.weight})
    assert tied.head.weight is tied.embeddings.weight
    assert "head.weight" not in dict(tied.named_parameters())
    assert not [n for n in tensor_specs(tied.config) if "lm_head" in n or "head.weight" in n]
    assert "lm_head.weight" in tensor_specs(apart.config)
    found, expected = gradients(tied), gradients(apart)
    both = expected.pop("embeddings.weight") + expected.pop("head.weight")
    assert_close_rel(found.pop("embeddings.weight"), both, 1e-6)
    for name, gradient in expected.items():
        assert_close_rel(found[name], gradient, 1e-6, name)


def steps_of(limit: Any, raw: float) -> float:
    """The time step a Mamba layer takes for a raw step: one token, state 1 x 1, x = b = c = 1, no skip."""
    one = torch.ones(1, 1, 1)
    config = tiny_config(time_step_limit=limit, time_step_min=0.001)
    zero = torch.zeros(1)
    return ssd_scan(
        *(one, torch.full((1, 1), raw / 2), zero, one, one, zero, torch.full((1,), raw / 2)),
        config.time_step_limit,
        Packed.from_lengths((1,)),
    ).item()


@pytest.mark.parametrize("limit", [None, [0.0, INFINITY], [0.0, "inf"], [None, None]], ids=str)
def test_time_step_min_is_no_limit(limit: Any) -> None:
    """transformers#35154: raw -12 is softplus(-12); 0.001, the setting for initialisation, is the fault."""
    assert steps_of(limit, -12.0) == pytest.approx(6.144e-6, rel=1e-3)
    assert steps_of(limit, 20.0) == pytest.approx(20.0, rel=1e-6)


def test_time_step_limit_clamps_at_both_ends() -> None:
    assert steps_of([0.001, 0.5], -12.0) == pytest.approx(0.001, rel=1e-6)
    assert steps_of([0.001, 0.5], 20.0) == pytest.approx(0.5, rel=1e-6)


@pytest.mark.parametrize(
    ("limit", "dt_bias"), [([0.0, INFINITY], -12.0), ([0.01, INFINITY], -12.0), ([0.0, 0.2], 3.0)]
)
def test_a_layer_follows_its_limit(limit: list[float], dt_bias: float) -> None:
    """The whole layer against the plain one, and against another limit, so that it shows."""
    lm = tiny_lm(time_step_limit=limit, layers_block_type=["mamba"]).double()
    other = tiny_lm(time_step_limit=[0.001, 0.3], layers_block_type=["mamba"]).double()
    for model in (lm, other):
        with torch.no_grad():
            model.layers[0].mixer.dt_bias.fill_(dt_bias)
            model.layers[0].mixer.D.zero_()
    input_ids = row()[0]
    found = lm(input_ids, Packed.from_lengths(LENGTHS))
    expected = plain_hidden(lm.config, plain_weights(lm), input_ids, LENGTHS)
    assert_close_rel(found, expected, 1e-11)
    assert relative_error(other(input_ids, Packed.from_lengths(LENGTHS)), expected) > 1e-4


ROPE = {"rope_theta": 10000, "partial_rotary_factor": 1.0, "head_dim": 24}


def attention_layer(**changes: Any) -> Attention:
    return tiny_lm(layers_block_type=["attention"], **ROPE, **changes).layers[0].mixer


def test_head_size_is_the_configs() -> None:
    """imp#515: 24, not 32 / 4."""
    layer = attention_layer()
    assert layer.q_proj.weight.shape == (4 * 24, 32)
    assert layer.k_proj.weight.shape == layer.v_proj.weight.shape == (2 * 24, 32)
    assert layer.o_proj.weight.shape == (32, 4 * 24)


def test_attention_knows_no_distance() -> None:
    """imp#515: with equal keys a row weighs all values so far alike; rotated keys would not be equal."""
    layer = attention_layer(attention_bias=True)
    with torch.no_grad():
        layer.k_proj.weight.zero_()
    x = torch.randn(7, 32, generator=torch.Generator().manual_seed(2))
    found = layer(x, Packed.from_lengths((7,)))
    means = layer.v_proj(x).cumsum(0) / torch.arange(1, 8)[:, None]
    expected = layer.o_proj(means.unflatten(1, (2, 24)).repeat_interleave(2, dim=1).flatten(1))
    assert_close_rel(found, expected, 1e-6)


def test_attention_knows_no_order() -> None:
    """The last token's output is the same for every order of the tokens before it."""
    layer = attention_layer()
    x = torch.randn(9, 32, generator=torch.Generator().manual_seed(2))
    packed = Packed.from_lengths((9,))
    shuffled = torch.cat([x[:8].flip(0), x[8:]])
    assert_close_rel(layer(shuffled, packed)[-1], layer(x, packed)[-1], 1e-6)
    assert relative_error(layer(shuffled, packed)[4], layer(x, packed)[4]) > 1e-3


def test_equal_inputs_give_equal_outputs_along_the_row() -> None:
    layer = attention_layer()
    x = torch.randn(1, 32, generator=torch.Generator().manual_seed(2)).expand(4, -1)
    found = layer(x, Packed.from_lengths((4,)))
    assert_close_rel(found, found[:1].expand(4, -1), 1e-6)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_decay_rates_of_a_bfloat16_model_are_float32(stored: torch.dtype) -> None:
    """miles#975: A_log as stored, its exponential in float32.

    n steps after its only input, y = dt exp(-rate n dt): the bfloat16 of y still has the rate to one part in 1e4.
    """
    lm = tiny_lm(dtype=torch.bfloat16, layers_block_type=["mamba"])
    layer = lm.layers[0].mixer
    values = torch.log(torch.tensor([59.0, 61.0, 63.0, 64.0])).to(stored)
    with torch.no_grad():
        layer.A_log.copy_(values)
    assert layer.A_log.dtype == torch.float32
    rates = values.double().exp()
    expected = [59, 61, 63, 64] if stored == torch.float32 else [58.12, 61.87, 63.83, 63.83]
    assert rates.tolist() == pytest.approx(expected, rel=2e-4)
    tokens, step = 11, 0.125
    x = torch.zeros(tokens, 4, 1, dtype=torch.bfloat16)
    x[0] = 1
    one = torch.ones(tokens, 1, 1, dtype=torch.bfloat16)
    raw = torch.zeros(tokens, 4, dtype=torch.bfloat16)
    bias = torch.full((4,), math.log(math.expm1(step)))
    no_skip = torch.zeros(4)
    packed = Packed.from_lengths((tokens,))
    y = ssd_scan(x, raw, layer.A_log, one, one, no_skip, bias, (0.0, INFINITY), packed)
    found = -torch.log(y[-1, :, 0].double() / step) / ((tokens - 1) * step)
    assert_close_rel(found, rates, 1e-4)


def test_the_count_is_the_rows_or_asked_of_the_labels() -> None:
    lm = tiny_lm()
    input_ids, labels = row()
    supervised = int((labels != -100).sum())
    known, count = lm.loss(input_ids, labels, Packed.from_lengths(LENGTHS, supervised=supervised))
    assert isinstance(count, int)
    assert count == supervised
    cu_seqlens = Packed.from_lengths(LENGTHS).cu_seqlens
    for boundaries in (cu_seqlens, Packed.from_lengths(LENGTHS)):
        asked, count = lm.loss(input_ids, labels, boundaries)
        assert isinstance(count, Tensor)
        assert count.item() == supervised
        assert torch.equal(asked, known)


def test_a_row_without_supervision_trains_nothing() -> None:
    lm = tiny_lm()
    nothing = torch.full((30,), -100)
    for packed in (Packed.from_lengths(LENGTHS), Packed.from_lengths(LENGTHS, supervised=0)):
        lm.zero_grad()
        loss, count = lm.loss(row()[0], nothing, packed)
        loss.backward()
        assert (loss.item(), int(count)) == (0.0, 0)
        assert not any(p.grad.any() or p.grad.isnan().any() for p in lm.parameters())


def test_boundaries_that_do_not_fit_are_refused() -> None:
    lm = tiny_lm()
    input_ids, labels = row()
    short = torch.tensor([0, 9, 29], dtype=torch.int32)
    for boundaries in (short, Packed.from_lengths((9, 20)), Packed.from_lengths((31,))):
        with pytest.raises(ValueError, match=r"input_ids \(30,\): the documents have (29|31) tok"):
            lm(input_ids, boundaries)
        with pytest.raises(ValueError, match=r"input_ids \(30,\): the documents have (29|31) tok"):
            lm.loss(input_ids, labels, boundaries)
    with pytest.raises(ValueError, match=r"cu_seqlens \[9, 30\].*expected"):
        lm(input_ids, torch.tensor([9, 30], dtype=torch.int32))
    with pytest.raises(ValueError, match=r"input_ids \(1, 30\)"):
        lm(input_ids[None], Packed.from_lengths(LENGTHS))
    with pytest.raises(ValueError, match=r"labels: expected shape \(30\), found \(29,\)"):
        lm.loss(input_ids, labels[:-1], Packed.from_lengths(LENGTHS))
