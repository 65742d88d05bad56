"""Attention over packed documents against the whole masked matrix."""

import pytest
import torch
from torch import Tensor

from hymoe.kernels.attention import varlen_attention, varlen_attention_ref
from hymoe.kernels.packed import Packed
from tests.kernel_check import (
    DTYPE_IDS,
    DTYPES,
    RAGGED,
    assert_documents_alone,
    check,
    normal,
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
