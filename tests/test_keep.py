"""What the backward pass makes again for each `train.keep`, counted; and that nobody reads what it leaves out."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hymoe.kernels.experts import expert_mlp
from hymoe.kernels.launch import KNOWN_TARGETS, recording
from hymoe.kernels.packed import Packed
from hymoe.kernels.route import Routing
from hymoe.model.net import Block
from tests.tiny import tiny_lm

PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm)
KINDS = {"M": "mamba", "E": "moe", "*": "full_attention", "-": "mlp"}
LENGTHS = (9, 1, 14, 6)
EXPERTS = 8  # of the tiny model


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func.overloadpacket in PRODUCTS
        return func(*args, **(kwargs or {}))


def block(kind: str, keep: str, kernels: str = "torch", **changes: object) -> Block:
    lm = tiny_lm(3, layers_block_type=[KINDS[kind]], **changes)
    lm.set_keep(keep)
    if kind == "E":
        lm.layers[0].mixer.experts.kernels = kernels
    return lm.layers[0]


def once(layer: Block) -> tuple[int, int, dict[str, Tensor]]:
    """Products of the forward and of the backward pass, and all gradients."""
    rng = torch.Generator().manual_seed(1)
    x, dout = torch.randn(2, sum(LENGTHS), 32, generator=rng)
    x.requires_grad_()
    with Products() as forward:
        (out,) = layer((x,), (Packed.from_lengths(LENGTHS),), torch.float32)
    with Products() as backward:
        out.backward(dout)
    grads = {name: p.grad for name, p in layer.named_parameters()}
    return forward.number, backward.number, grads | {"x": x.grad}


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_last_product_is_not_made_again(kind: str) -> None:
    """Experts: neither their down products nor the shared expert's; with `acts` nothing of a MoE block."""
    forward, kept, expected = once(block(kind, "all"))
    found = {keep: once(block(kind, keep)) for keep in ("inputs", "acts")}
    last = 1 + EXPERTS * (kind == "E")
    assert found["inputs"][0] == forward > last
    assert found["inputs"][1] == kept + forward - last
    assert found["acts"][1] == (kept if kind == "E" else kept + forward - last)
    for _, _, grads in found.values():
        assert all(torch.equal(grad, expected[name]) for name, grad in grads.items())


def test_sums_that_a_projection_reads_are_made_again() -> None:
    """All but that projection's own product."""
    forward, kept, expected = once(block("E", "all", moe_latent_size=16))
    _, backward, grads = once(block("E", "inputs", moe_latent_size=16))
    assert backward == kept + forward - 1
    assert all(torch.equal(grad, expected[name]) for name, grad in grads.items())


@contextmanager
def nan_memory() -> Iterator[None]:
    """Fresh memory is NaN: torch's switch for determinism fills it."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize("latent", [None, 16], ids=["wide", "latent"])
def test_what_is_left_out_is_read_by_nobody(kernels: str, latent: int | None) -> None:
    _, _, expected = once(block("E", "all", kernels, moe_latent_size=latent))
    with nan_memory():
        _, _, grads = once(block("E", "inputs", kernels, moe_latent_size=latent))
    assert all(torch.equal(grad, expected[name]) for name, grad in grads.items())


def test_what_is_left_out_is_fresh_memory() -> None:
    """So the test above could fail."""
    rng = torch.Generator().manual_seed(1)
    x, up, down = (torch.randn(size, generator=rng) for size in ((3, 8), (2, 4, 8), (2, 8, 4)))
    ids = torch.tensor([[0], [1], [1]])
    routing = Routing(ids, torch.arange(3), torch.arange(3)[:, None], torch.tensor([0, 1, 3]))
    with nan_memory():
        for kernels in ("torch", "triton"):
            out = expert_mlp(x, torch.ones(3, 1), up, down, routing, kernels, is_read=False)
            assert out.shape == x.shape
            assert out.isnan().all()


def test_a_gpu_launches_one_product_where_nobody_reads() -> None:
    """Two launches each of up and down, one of combine; the tensors have the real model's shape and no memory."""
    tokens, top_k, experts = 384, 6, 128
    shapes = ((experts, 1856, 2688), (experts, 2688, 1856))
    meta = {"device": "meta", "dtype": torch.bfloat16}
    x = torch.empty(tokens, 2688, **meta)
    up, down = (torch.empty(shape, **meta) for shape in shapes)
    weights = torch.empty(tokens, top_k, device="meta")
    numbers = {"device": "meta", "dtype": torch.int64}
    routing = Routing(
        torch.empty(tokens, top_k, **numbers), torch.empty(tokens * top_k, **numbers),
        torch.empty(tokens, top_k, **numbers), torch.empty(experts + 1, **numbers),
    )  # fmt: skip
    launches = {}
    for is_read in (True, False):
        with recording(KNOWN_TARGETS[90]) as seen:
            expert_mlp(x, weights, up, down, routing, "triton", is_read)
        launches[is_read] = [one.kernel.__name__ for one in seen]
    assert len(launches[True]) == 5
    assert launches[False] == launches[True][:2]


def test_an_unknown_word_is_refused() -> None:
    with pytest.raises(ValueError, match="'none'; expected one of inputs, acts, all"):
        tiny_lm().set_keep("none")
