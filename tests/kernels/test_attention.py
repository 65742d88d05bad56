"""Attention over packed documents against the whole masked matrix."""

import pytest
import torch
from torch import Tensor

from hymoe.kernels import attention
from hymoe.kernels.attention import varlen_attention, varlen_attention_ref
from hymoe.kernels.packed import Packed
from tests.kernel_check import (
    DTYPE_IDS,
    DTYPES,
    RAGGED,
    assert_documents_alone,
    check,
    normal,
    run,
)

WIDTH = 8
# One key alone has weight 1 whatever its score: in a document of one token the gradients of q and k vanish, and what a
# kernel leaves there is the rounding of products of the size of v's gradient.
BESIDE = {"q": "v", "k": "v"}


def inputs_of(tokens: int, heads: int, groups: int, width: int = WIDTH) -> dict[str, Tensor]:
    return normal(1, q=(tokens, heads, width), k=(tokens, groups, width), v=(tokens, groups, width))


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("lengths", RAGGED.values(), ids=RAGGED)
def test_ragged_documents(lengths: tuple[int, ...], dtype: torch.dtype) -> None:
    packed = Packed.from_lengths(lengths)
    check(
        lambda q, k, v: varlen_attention(q, k, v, packed),
        lambda q, k, v: varlen_attention_ref(q, k, v, packed),
        inputs_of(sum(lengths), 4, 2),
        dtype,
        beside=BESIDE if max(lengths) == 1 else None,
    )


@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (4, 4), (6, 1), (16, 2)])
def test_key_heads_serve_their_query_heads(heads: int, groups: int) -> None:
    packed = Packed.from_lengths((7, 12))
    check(
        lambda q, k, v: varlen_attention(q, k, v, packed),
        lambda q, k, v: varlen_attention_ref(q, k, v, packed),
        inputs_of(19, heads, groups),
        torch.float64,
    )


def test_strided_inputs() -> None:
    """q, k and v as slices of one projection."""
    packed = Packed.from_lengths((7, 12, 1))

    def from_one(function):
        def run(qkv: Tensor) -> Tensor:
            q, k, v = qkv.split([4 * WIDTH, 2 * WIDTH, 2 * WIDTH], dim=-1)
            return function(*(t.unflatten(-1, (-1, WIDTH)) for t in (q, k, v)), packed)

        return run

    inputs = normal(2, qkv=(20, 8 * WIDTH))
    check(from_one(varlen_attention), from_one(varlen_attention_ref), inputs, torch.float32)


def test_large_scores_do_not_overflow() -> None:
    packed = Packed.from_lengths((9, 4))
    inputs = inputs_of(13, 2, 1)
    inputs["q"] *= 100
    check(
        lambda q, k, v: varlen_attention(q, k, v, packed),
        lambda q, k, v: varlen_attention_ref(q, k, v, packed),
        inputs,
        torch.float32,
    )


def test_no_positions() -> None:
    """imp#515: equal keys weigh the same at any distance, so a row is the mean of the values so far."""
    tokens = 6
    k = torch.randn(1, 2, WIDTH, generator=torch.Generator().manual_seed(0)).expand(tokens, -1, -1)
    inputs = inputs_of(tokens, 4, 2)
    q, v = inputs["q"].float(), inputs["v"].float()
    found = varlen_attention(q, k, v, Packed.from_lengths((tokens,)))
    means = v.cumsum(0) / torch.arange(1, tokens + 1)[:, None, None]
    torch.testing.assert_close(found, means.repeat_interleave(2, dim=1))


@pytest.mark.parametrize("lengths", [(4, 5), (1, 1, 1), (20, 1, 17, 2), (8, 8, 7)], ids=str)
def test_documents_do_not_meet(lengths: tuple[int, ...]) -> None:
    rows = {name: x.float() for name, x in inputs_of(sum(lengths), 4, 2).items()}
    assert_documents_alone(
        lambda packed, r: varlen_attention(r["q"], r["k"], r["v"], packed),
        Packed.from_lengths,
        lengths,
        rows,
    )


def test_shapes_that_do_not_fit_are_refused() -> None:
    packed = Packed.from_lengths((3,))
    q, k = torch.ones(3, 4, 8), torch.ones(3, 2, 8)
    with pytest.raises(ValueError, match=r"varlen_attention q: expected shape \(3, \*, \*\)"):
        varlen_attention(torch.ones(4, 4, 8), k, k, packed)
    with pytest.raises(ValueError, match=r"varlen_attention k: expected shape \(3, \*, 8\)"):
        varlen_attention(q, torch.ones(3, 2, 6), k, packed)
    with pytest.raises(ValueError, match=r"varlen_attention v: expected shape \(3, 2, 8\)"):
        varlen_attention(q, k, torch.ones(3, 4, 8), packed)
    with pytest.raises(ValueError, match="4 query heads do not divide by 3 key heads"):
        varlen_attention(q, torch.ones(3, 3, 8), torch.ones(3, 3, 8), packed)


def test_an_unknown_choice_is_refused() -> None:
    q = torch.ones(3, 2, 8)
    with pytest.raises(ValueError, match="kernels = 'flash'"):
        varlen_attention(q, q, q, Packed.from_lengths((3,)), "flash")


@pytest.fixture
def flash_on_a_cpu(monkeypatch: pytest.MonkeyPatch):
    """The branch of a GPU, whatever the tensors."""
    monkeypatch.setattr(attention, "_takes_flash", lambda q: True)
    attention._grouped_heads.cache_clear()
    yield
    attention._grouped_heads.cache_clear()


@pytest.mark.parametrize("grouped", [True, False], ids=["torch-2.12", "torch-2.11"])
def test_what_flash_attention_is_asked_for(
    grouped: bool, flash_on_a_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arguments describe causal attention within each document: a stand-in that obeys them gives the reference."""
    asked = []

    def stand_in(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size, **options):
        assert all(t.stride(-1) == 1 for t in (q, k, v))
        assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
        assert torch.equal(cu_seq_q, cu_seq_k)
        asked.append((max_q, max_k, window_size, options))
        repeat = q.shape[1] // k.shape[1]
        whole = (t.transpose(0, 1) for t in (q, *(x.repeat_interleave(repeat, 1) for x in (k, v))))
        parts = zip(*(t.split(cu_seq_q.diff().tolist(), dim=1) for t in whole), strict=True)
        out = [torch.nn.functional.scaled_dot_product_attention(*p, is_causal=True) for p in parts]
        return torch.cat(out, dim=1).transpose(0, 1)

    def of_torch_2_11(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size):
        return stand_in(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, window_size=window_size)

    def of_torch_2_12(*args, enable_gqa=False, **options):
        return stand_in(*args, enable_gqa=enable_gqa, **options)

    stood_in = of_torch_2_12 if grouped else of_torch_2_11
    monkeypatch.setattr(attention.varlen, "varlen_attn", stood_in)
    packed = Packed.from_lengths((7, 1, 12))
    inputs = {
        name: x.transpose(1, 2)
        .contiguous()
        .transpose(1, 2)  # its last dimension is not the closest
        for name, x in inputs_of(20, 4, 2).items()
    }
    check(
        lambda q, k, v: varlen_attention(q, k, v, packed),
        lambda q, k, v: varlen_attention_ref(q, k, v, packed),
        inputs,
        torch.float32,
    )
    assert set(asked[0][:3]) == {12, (-1, 0)}
    assert asked[0][3] == ({"enable_gqa": True} if grouped else {})


def test_flash_attention_of_this_torch_takes_the_arguments(flash_on_a_cpu: None) -> None:
    """Its own signature and shapes, on tensors without values."""
    q, k, v = (
        torch.ones(20, heads, 16, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for heads in (4, 2, 2)
    )
    out = varlen_attention(q, k, v, Packed.from_lengths((7, 13), "meta"))
    assert out.shape == q.shape
    gradients = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert [g.shape for g in gradients] == [q.shape, k.shape, v.shape]


class _Probe(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, seen: list[bool]) -> Tensor:
        ctx.seen = seen
        return x * 2

    @staticmethod
    def backward(ctx, dy: Tensor):
        ctx.seen.append(torch.are_deterministic_algorithms_enabled())
        return dy * 2, None


@pytest.mark.parametrize("before", [False, True])
def test_the_backward_pass_alone_is_switched_to_a_fixed_order(before: bool) -> None:
    torch.use_deterministic_algorithms(before)
    try:
        x, around, inside = torch.ones(3, requires_grad=True), [], []
        y = _Probe.apply(
            attention._in_fixed_order(_Probe.apply(_Probe.apply(x, around), inside)), around
        )
        for _ in range(2):  # a graph that is kept can be walked again
            y.sum().backward(retain_graph=True)
        assert inside == [True, True]
        assert around == [before] * 4
        assert torch.are_deterministic_algorithms_enabled() == before
        assert attention._in_fixed_order(x.detach()).grad_fn is None
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("lengths", [*RAGGED.values(), (300, 1, 129)], ids=[*RAGGED, "long"])
def test_on_a_gpu(lengths: tuple[int, ...], dtype: torch.dtype) -> None:
    packed = Packed.from_lengths(lengths, "cuda")
    host = Packed.from_lengths(lengths)

    def on_device(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert attention._takes_flash(q.cuda()) == (dtype != torch.float32)
        return varlen_attention(q.cuda(), k.cuda(), v.cuda(), packed).cpu()

    check(
        on_device,
        lambda q, k, v: varlen_attention_ref(q, k, v, host),
        inputs_of(sum(lengths), 8, 2, 128),
        dtype,
        beside=BESIDE if max(lengths) == 1 else None,
        # What plain torch computes in 16 bits: the reference works in float32 inside.
        plain=lambda q, k, v: varlen_attention(q, k, v, host),
    )


@pytest.mark.gpu
def test_two_runs_on_a_gpu_give_the_same_bits() -> None:
    packed = Packed.from_lengths((1500, 2, 2500), "cuda")
    inputs = {n: x.bfloat16().cuda() for n, x in inputs_of(4002, 8, 2, 128).items()}
    function = lambda q, k, v: varlen_attention(q, k, v, packed).cpu()  # noqa: E731
    first, second = run(function, inputs), run(function, inputs)
    for name, one in first.items():
        assert torch.equal(one, second[name]), name
