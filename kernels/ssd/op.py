"""The Mamba-2 scan over packed documents, chunk by chunk with matrix products.

Math (letters of `model/config.py`; `ref.py` has the recurrence): with s[i] the running sum of dt*a within a chunk,
1. inside a chunk: y[i] += sum_{j<=i} (c[i] . b[j]) exp(s[i] - s[j]) dt[j] x[j]; c . b once a group, not once a head;
2. what a chunk adds to the state: sum_j exp(s[Q-1] - s[j]) b[j] outer dt[j] x[j];
3. from chunk to chunk of a document: enter[k] = exp(s_{k-1}[Q-1]) enter[k-1] + added[k-1], enter of the first being 0;
4. what a chunk reads of it: y[i] += exp(s[i]) c[i] . enter.
Chunks begin anew with each document (`Packed.chunks`), so nothing can cross a boundary, and a document's result does
not depend on where it lies in the row.

Shapes inside: (C, G, Q, ...) with the H/G heads of a group beside each other in the last dimensions.
Dtypes: arithmetic in float32; y in x's dtype. Source: Dao and Gu 2024, section 6.
"""

import torch
from torch import Tensor
from torch.nn import functional

from hymoe.kernels.launch import arithmetic_dtype, check_shape
from hymoe.kernels.packed import Packed


class _PassStates(torch.autograd.Function):
    """Step 3: the state that enters each chunk, from what each adds and how much each lets through."""

    @staticmethod
    def forward(ctx, added: Tensor, through: Tensor, waves: tuple[Tensor, ...]) -> Tensor:
        # added (C, G, N, H/G, P), through (C, G, 1, H/G, 1) -> enter like added
        enter = torch.zeros_like(added)
        for now in waves:
            before = now - 1
            enter[now] = torch.addcmul(added[before], through[before], enter[before])
        ctx.save_for_backward(through, enter)
        ctx.waves = waves
        return enter

    @staticmethod
    def backward(ctx, denter: Tensor):
        through, enter = ctx.saved_tensors
        denter = denter.clone()
        dadded = torch.zeros_like(denter)
        dthrough = torch.zeros_like(through)
        for now in reversed(ctx.waves):
            before = now - 1
            flow = denter[now]
            dadded[before] = flow
            dthrough[before] = (flow * enter[before]).sum((2, 4), keepdim=True)
            denter[before] += flow * through[before]
        return dadded, dthrough, None


def ssd_scan(
    x: Tensor,
    dt: Tensor,
    a_log: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
    packed: Packed,
    chunk_size: int = 128,
) -> Tensor:
    """Selective state-space scan along each document.

    Args:
        x: (T, H, P) inputs of the heads.
        dt: (T, H) raw time steps, before bias and softplus.
        a_log: (H,) log of the decay rate.
        b: (T, G, N) input projections; a group serves H/G heads.
        c: (T, G, N) output projections.
        skip: (H,) weight of x in the output (`D` of the checkpoint).
        dt_bias: (H,) added to dt.
        dt_limit: lowest and highest time step after softplus.
        packed: boundaries of the documents in the T tokens.
        chunk_size: Q at most; a row of short documents uses shorter chunks, which changes rounding only.

    Returns:
        y: (T, H, P) in x's dtype.

    Raises:
        ValueError: shapes that do not fit.
    """
    tokens, heads, width = x.shape
    groups, states = b.shape[1:]
    check_shape("ssd_scan x", x, (packed.num_tokens, None, None))
    check_shape("ssd_scan dt", dt, (tokens, heads))
    check_shape("ssd_scan b", b, (tokens, None, None))
    check_shape("ssd_scan c", c, tuple(b.shape))
    for name, vector in (("a_log", a_log), ("skip", skip), ("dt_bias", dt_bias)):
        check_shape(f"ssd_scan {name}", vector, (heads,))
    if heads % groups:
        raise ValueError(f"ssd_scan: {heads} heads do not divide by {groups} groups")

    wide = arithmetic_dtype(x)
    size = min(chunk_size, max(16, 1 << (packed.max_len - 1).bit_length()))
    table = packed.chunks(size)
    x_wide = x.to(wide)
    step = functional.softplus(dt.to(wide) + dt_bias.to(wide)).clamp(*dt_limit)  # (T, H)
    rate = step * -torch.exp(a_log.to(wide))
    split = (groups, heads // groups)
    # One row of zeros behind the last token fills the chunks that a document ends in.
    xdt = _into_chunks(x_wide * step[..., None], table.tokens).unflatten(
        2, split
    )  # (C, Q, G, H/G, P)
    s = _into_chunks(rate, table.tokens).cumsum(1).unflatten(2, split)  # (C, Q, G, H/G)
    b_chunks, c_chunks = (
        _into_chunks(t.to(wide), table.tokens).transpose(1, 2) for t in (b, c)
    )  # (C, G, Q, N)

    inside = _inside_chunks(xdt, s, b_chunks, c_chunks)  # (C, G, H/G, Q, P)
    last = s[:, -1:]  # (C, 1, G, H/G)
    kept = (xdt * torch.exp(last - s)[..., None]).transpose(1, 2)  # (C, G, Q, H/G, P)
    added = (b_chunks.transpose(2, 3) @ kept.flatten(3)).unflatten(
        3, (heads // groups, width)
    )  # (C, G, N, H/G, P)
    through = torch.exp(last).transpose(1, 2)[..., None]  # (C, G, 1, H/G, 1)
    enter = _PassStates.apply(added, through, table.waves)
    read = (c_chunks @ enter.flatten(3)).unflatten(3, (heads // groups, width))  # (C, G, Q, H/G, P)
    outside = read * torch.exp(s).transpose(1, 2)[..., None]

    y = (inside.transpose(2, 3) + outside).transpose(1, 2)  # (C, Q, G, H/G, P)
    y = y.reshape(-1, heads, width).index_select(0, table.slots)  # (T, H, P)
    return (y + skip.to(wide)[:, None] * x_wide).to(x.dtype)


def _into_chunks(x: Tensor, tokens: Tensor) -> Tensor:
    """(T, ...) -> (C, Q, ...), zeros where a chunk has no token."""
    padded = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
    return padded.index_select(0, tokens.flatten()).unflatten(0, tuple(tokens.shape))


def _inside_chunks(xdt: Tensor, s: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Step 1: (C, Q, G, H/G, P) inputs -> (C, G, H/G, Q, P)."""
    scores = c @ b.transpose(2, 3)  # (C, G, Q, Q): once a group
    cum = s.permute(0, 2, 3, 1)  # (C, G, H/G, Q)
    size = cum.shape[-1]
    future = torch.ones(size, size, dtype=torch.bool, device=s.device).triu(1)
    # exp of a masked difference, not a masked exp: the difference grows without bound above the diagonal.
    decay = torch.exp((cum[..., :, None] - cum[..., None, :]).masked_fill_(future, float("-inf")))
    return (scores[:, :, None] * decay) @ xdt.permute(0, 2, 3, 1, 4)
