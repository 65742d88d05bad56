"""Causal attention with grouped key/value heads over packed documents, without positions.

Math: within a document, o[i] = sum_{j<=i} softmax_j(q[i] . k[j] / sqrt(P)) v[j].
A document that is padded behind its end needs no mask of its own: causality already keeps every real query from the
padding. So documents of similar length (within a factor of two) go through torch's attention as one batch.
"""

import torch
from torch import Tensor
from torch.nn import functional

from hymoe.kernels.launch import arithmetic_dtype, check_shape
from hymoe.kernels.packed import Packed


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


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, packed: Packed) -> Tensor:
    """Causal attention within each document.

    Args:
        q: (T, H, P) queries.
        k: (T, G, P) keys; each serves H/G query heads.
        v: (T, G, P) values.
        packed: boundaries of the documents in the T tokens.

    Returns:
        o: (T, H, P) in q's dtype.

    Raises:
        ValueError: shapes that do not fit.
    """
    tokens, heads, width = q.shape
    check_shape("varlen_attention q", q, (packed.num_tokens, None, None))
    check_shape("varlen_attention k", k, (tokens, None, width))
    check_shape("varlen_attention v", v, tuple(k.shape))
    if heads % k.shape[1]:
        raise ValueError(
            f"varlen_attention: {heads} query heads do not divide by {k.shape[1]} key heads"
        )
    if len(packed.lengths) == 1:
        return _causal(q[None], k[None], v[None])[0]
    found = []
    for bucket in packed.buckets():
        batch = (_gather(t, bucket.tokens) for t in (q, k, v))  # (s, l, H or G, P)
        found.append(_causal(*batch).flatten(0, 1).index_select(0, bucket.slots))
    return torch.cat(found).index_select(0, packed.from_buckets)


def _gather(x: Tensor, tokens: Tensor) -> Tensor:
    """Rows of x by index: (s, l, ...)."""
    return x.index_select(0, tokens.flatten()).unflatten(0, tuple(tokens.shape))


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(s, l, H, P) queries over (s, l, G, P) keys and values -> (s, l, H, P)."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    return out.transpose(1, 2)
