"""Causal attention with grouped key/value heads over packed documents, without positions.

Math: within a document, o[i] = sum_{j<=i} softmax_j(q[i] . k[j] / sqrt(P)) v[j].
Which implementation: on a GPU in bfloat16 or float16, torch's `varlen_attn` (flash attention), which takes the row as
it is. Elsewhere, and for heads that it does not take, torch's `scaled_dot_product_attention`, exact in every dtype: a
document that is padded behind its end needs no mask of its own, since causality already keeps every real query from
the padding, so documents of similar length (within a factor of two) go through it as one batch.
On a GPU their fused kernels add up the queries' gradient in any order unless the process asks for a fixed one. It does
so while they run: the bits of a training step do not vary.
"""

import functools
import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import varlen

from hymoe.kernels.launch import arithmetic_dtype, check_shape, choose
from hymoe.kernels.packed import Packed

FLASH_DTYPES = (torch.bfloat16, torch.float16)
FLASH_WIDTHS = range(8, 257, 8)  # of a head


def varlen_attention_ref(q: Tensor, k: Tensor, v: Tensor, packed: Packed) -> Tensor:
    """The specification of `varlen_attention`: the whole (T, T) matrix with its mask, in float32."""
    wide = arithmetic_dtype(q)
    repeat = q.shape[1] // k.shape[1]
    keys, values = (t.to(wide).repeat_interleave(repeat, dim=1) for t in (k, v))  # (T, H, P)
    scores = torch.einsum("ihp,jhp->hij", q.to(wide), keys) * q.shape[-1] ** -0.5
    document = packed.seq_idx
    allowed = (document[:, None] == document[None, :]).tril()
    weights = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
    return torch.einsum("hij,jhp->ihp", weights, values).to(q.dtype)


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, packed: Packed, kernels: str = "auto"
) -> Tensor:
    """Causal attention within each document.

    Args:
        q: (T, H, P) queries.
        k: (T, G, P) keys; each serves H/G query heads.
        v: (T, G, P) values.
        packed: boundaries of the documents in the T tokens.
        kernels: as of every operation, see `launch.choose`; all of its choices mean torch here.

    Returns:
        o: (T, H, P) in q's dtype.

    Raises:
        ValueError: shapes that do not fit, or an unknown choice.
    """
    tokens, heads, width = q.shape
    check_shape("varlen_attention q", q, (packed.num_tokens, None, None))
    check_shape("varlen_attention k", k, (tokens, None, width))
    check_shape("varlen_attention v", v, tuple(k.shape))
    if heads % k.shape[1]:
        raise ValueError(
            f"varlen_attention: {heads} query heads do not divide by {k.shape[1]} key heads"
        )
    choose("varlen_attention", kernels, q.device.type, q.dtype)
    if _takes_flash(q):
        return _flash(q, k, v, packed)
    if len(packed.lengths) == 1:
        return _causal(q[None], k[None], v[None])[0]
    found = []
    for bucket in packed.buckets():
        batch = (_gather(t, bucket.tokens) for t in (q, k, v))  # (s, l, H or G, P)
        found.append(_causal(*batch).flatten(0, 1).index_select(0, bucket.slots))
    return torch.cat(found).index_select(0, packed.from_buckets)


def _takes_flash(q: Tensor) -> bool:
    """Whether `varlen_attn` has a kernel for these heads."""
    return q.is_cuda and q.dtype in FLASH_DTYPES and q.shape[-1] in FLASH_WIDTHS


def _flash(q: Tensor, k: Tensor, v: Tensor, packed: Packed) -> Tensor:
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    bounds = (packed.cu_seqlens, packed.cu_seqlens, packed.max_len, packed.max_len)
    # Causal: no key to the right of the query.
    out = varlen.varlen_attn(q, k, v, *bounds, window_size=(-1, 0), **_grouped_heads())
    return _in_fixed_order(out)


@functools.cache
def _grouped_heads() -> dict[str, bool]:
    """What allows fewer key than query heads: torch 2.11 does so unasked and has no such option."""
    known = inspect.signature(varlen.varlen_attn).parameters
    return {"enable_gqa": True} if "enable_gqa" in known else {}


def _in_fixed_order(out: Tensor) -> Tensor:
    """`out`, whose own backward pass is to be deterministic; the switch for it is the whole process's."""
    node = out.grad_fn
    if node is None:
        return out
    before: list[tuple[bool, bool]] = []

    def switch(*_: Any) -> None:
        before.append(
            (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            )
        )
        torch.use_deterministic_algorithms(True)

    def restore(*_: Any) -> None:
        enabled, warn_only = before.pop()
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)

    node.register_prehook(switch)
    node.register_hook(restore)
    return out


def _gather(x: Tensor, tokens: Tensor) -> Tensor:
    """Rows of x by index: (s, l, ...)."""
    return x.index_select(0, tokens.flatten()).unflatten(0, tuple(tokens.shape))


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(s, l, H, P) queries over (s, l, G, P) keys and values -> (s, l, H, P)."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    if q.is_cuda and out.grad_fn is not None and "ScaledDotProduct" in out.grad_fn.name():
        out = _in_fixed_order(
            out
        )  # a fused kernel; the plain products that it may take instead are in order
    return out.transpose(1, 2)
