"""Triton kernels of the router: float32 products on BF16 matrix units, choice of experts, weights.

Products: a float32 value is exactly the sum of three bfloat16 values, and a product of two bfloat16 values is exact in
float32. Logits of a BF16 x are therefore three products on the matrix units, nothing of x copied or rounded; where both
sides are float32 there are six, and the three left out are below 2^-24. Matrix units truncate as they add (Ootomo and
Yokota 2022), so each block of the contraction starts at zero and is added to the sum outside of them. TF32 is never
used, whatever torch's own switch says. An infinite input gives NaN: its lower parts are infinity - infinity.

Choice: keys that order like (value, lower index first) in 64 bits, so that a maximum is also the tie break. Their
order is torch.sort's: NaN above everything. NaN logits are thus chosen first, lowest index first, and make the token's
weights NaN; its ids are K different experts all the same.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hymoe.kernels.launch import dot, launch, narrow, target
from hymoe.kernels.tiles import tile

PARTS = 3  # bfloat16 values in a float32: 3 * 8 bits
ELEMENTS = 2048  # of a program's tile of scores: 16 in each of 128 threads
_LAST = tl.constexpr(-(2**63))  # key of what cannot be chosen


@triton.jit
def _store_parts(parts_ptr, at, part_stride, x, mask):
    """Float32 x as three bfloat16 tensors whose sum it is, one behind another."""
    for i in tl.static_range(3):
        part = narrow(x, tl.bfloat16)
        tl.store(parts_ptr + i * tl.cast(part_stride, tl.int64) + at, part, mask=mask)
        x = x - part.to(tl.float32)


@triton.jit
def _split_kernel(
    x_ptr,  # (rows, columns)
    parts_ptr,  # (3, rows, columns) bf16
    columns,
    row_stride,
    column_stride,
    part_stride,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    x = tl.load(x_ptr + row * row_stride + column * column_stride, mask=mask, other=0.0)
    _store_parts(parts_ptr, row * columns + column, part_stride, x.to(tl.float32), mask)


@triton.jit
def _product_kernel(
    a_ptr,  # (A_PARTS, M, K) bf16
    b_ptr,  # (B_PARTS, N, K) bf16
    out_ptr,  # (shares of K, M, N)
    M,
    N,
    K,
    share,  # of K that a program takes
    a_part,
    b_part,
    stride_am,
    stride_ak,
    stride_bn,
    stride_bk,
    A_PARTS: tl.constexpr,
    B_PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tiles_n = tl.cdiv(N, BLOCK_N)
    m = (tl.program_id(0) // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    n = (tl.program_id(0) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    a_part, b_part = tl.cast(a_part, tl.int64), tl.cast(b_part, tl.int64)
    start = tl.program_id(1) * share
    stop = tl.minimum(start + share, K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    k = tl.arange(0, BLOCK_K).to(tl.int64)
    a_tile = m[:, None] * stride_am + k[None, :] * stride_ak
    b_tile = n[None, :] * stride_bn + k[:, None] * stride_bk
    for k0 in range(start, stop, BLOCK_K):
        a = a_ptr + tl.cast(k0, tl.int64) * stride_ak
        b = b_ptr + tl.cast(k0, tl.int64) * stride_bk
        a_mask = (m[:, None] < M) & (k[None, :] < stop - k0)
        b_mask = (n[None, :] < N) & (k[:, None] < stop - k0)
        a0 = tl.load(a + a_tile, mask=a_mask, other=0.0)
        b0 = tl.load(b + b_tile, mask=b_mask, other=0.0)
        part = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)  # smallest products first
        if B_PARTS == 3:
            b1 = tl.load(b + b_part + b_tile, mask=b_mask, other=0.0)
            part = dot(a0, tl.load(b + 2 * b_part + b_tile, mask=b_mask, other=0.0), part)
        if A_PARTS == 3:
            a1 = tl.load(a + a_part + a_tile, mask=a_mask, other=0.0)
            part = dot(tl.load(a + 2 * a_part + a_tile, mask=a_mask, other=0.0), b0, part)
            if B_PARTS == 3:
                part = dot(a1, b1, part)
            part = dot(a1, b0, part)
        if B_PARTS == 3:
            part = dot(a0, b1, part)
        acc += dot(a0, b0, part)
    at = tl.program_id(1).to(tl.int64) * M * N + m[:, None] * N + n[None, :]
    inside = (m[:, None] < M) & (n[None, :] < N)
    tl.store(out_ptr + at, narrow(acc, out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _keys(x, index, BLOCK: tl.constexpr):
    """64 bits that order like (x, then lower index); equal only where both are."""
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    bits = tl.where(x == x, bits, 0x7FFFFFFF)  # one NaN, the largest
    return (bits.to(tl.int64) << 32) | (BLOCK - 1 - index).to(tl.int64)


@triton.jit
def _value(key):
    """The x of a key."""
    bits = (key >> 32).to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _keep_groups(
    biased, inside, KEEP: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Biased scores (ROWS, BLOCK_G * BLOCK_S), minus infinity in all groups but the KEEP best."""
    values = tl.reshape(biased, (ROWS, BLOCK_G, BLOCK_S))
    within = tl.arange(0, BLOCK_S)[None, None, :]
    keys = tl.where(
        tl.reshape(inside, (ROWS, BLOCK_G, BLOCK_S)), _keys(values, within, BLOCK_S), _LAST
    )
    best = tl.max(keys, axis=2)  # (ROWS, BLOCK_G)
    second = tl.max(tl.where(keys == best[:, :, None], _LAST, keys), axis=2)
    group = tl.arange(0, BLOCK_G)[None, :]
    strength = _keys(_value(best) + _value(second), group, BLOCK_G)
    strength = tl.where(group < GROUPS, strength, _LAST)
    kept = group < 0  # (1, BLOCK_G)
    for _ in tl.static_range(KEEP):
        chosen = strength == tl.max(strength, axis=1)[:, None]
        kept = kept | chosen
        strength = tl.where(chosen, _LAST, strength)
    values = tl.where(kept[:, :, None], values, float("-inf"))
    return tl.reshape(values, (ROWS, BLOCK_G * BLOCK_S))


@triton.jit
def _choose_kernel(
    logits_ptr,  # (T, E) float32
    bias_ptr,  # (E,) float32
    ids_ptr,  # (T, K) int64: written, read where KEPT
    weights_ptr,  # (T, K) float32
    scores_ptr,  # (T, K) float32, unbiased
    rows,
    scaling,
    KEPT: tl.constexpr,
    NORM: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUPS: tl.constexpr,
    KEEP_GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    k = tl.arange(0, BLOCK_K)[None, :]
    at = row * TOP_K + k
    mask = (row < rows) & (k < TOP_K)
    if KEPT:
        ids = tl.load(ids_ptr + at, mask=mask, other=0).to(tl.int32)
    else:
        column = tl.arange(0, BLOCK_G * BLOCK_S)[None, :]  # groups stand BLOCK_S apart
        expert = column // BLOCK_S * SIZE + column % BLOCK_S
        valid = (column // BLOCK_S < GROUPS) & (column % BLOCK_S < SIZE)
        inside = valid & (row < rows)
        logits = tl.load(logits_ptr + row * (GROUPS * SIZE) + expert, mask=inside, other=0.0)
        biased = tl.sigmoid(logits) + tl.load(bias_ptr + expert, mask=valid, other=0.0)
        if KEEP_GROUPS < GROUPS:
            biased = _keep_groups(biased, inside, KEEP_GROUPS, GROUPS, ROWS, BLOCK_G, BLOCK_S)
        keys = tl.where(inside, _keys(biased, column, BLOCK_G * BLOCK_S), _LAST)
        ids = tl.zeros((ROWS, BLOCK_K), dtype=tl.int32)
        for j in range(TOP_K):
            best = tl.max(keys, axis=1)[:, None]
            keys = tl.where(keys == best, _LAST, keys)
            winner = (BLOCK_G * BLOCK_S - 1) - (best & 0xFFFFFFFF).to(tl.int32)
            ids = tl.where(k == j, winner // BLOCK_S * SIZE + winner % BLOCK_S, ids)
        tl.store(ids_ptr + at, ids.to(tl.int64), mask=mask)
    # The score itself: what is left of biased - bias is not it.
    chosen = tl.load(logits_ptr + row * (GROUPS * SIZE) + ids, mask=mask, other=0.0)
    scores = tl.where(mask, tl.sigmoid(chosen), 0.0)
    weights = scores
    if NORM:
        weights = tl.div_rn(scores, (tl.sum(scores, axis=1) + 1e-20)[:, None])
    tl.store(scores_ptr + at, scores, mask=mask)
    tl.store(weights_ptr + at, weights * scaling, mask=mask)


@triton.jit
def _dlogits_kernel(
    dweights_ptr,  # (T, K) float32
    scores_ptr,  # (T, K) float32
    ids_ptr,  # (T, K) int64
    parts_ptr,  # (3, T, E) bf16
    rows,
    experts,
    part_stride,
    scaling,
    NORM: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    k = tl.arange(0, BLOCK_K)[None, :]
    at = row * TOP_K + k
    mask = (row < rows) & (k < TOP_K)
    score = tl.load(scores_ptr + at, mask=mask, other=0.0)
    dscore = tl.load(dweights_ptr + at, mask=mask, other=0.0) * scaling
    if NORM:
        total = (tl.sum(score, axis=1) + 1e-20)[:, None]
        dscore = (dscore - tl.sum(dscore * score, axis=1)[:, None] / total) / total
    dlogit = dscore * score * (1 - score)
    ids = tl.load(ids_ptr + at, mask=mask, other=0).to(tl.int32)
    expert = tl.arange(0, BLOCK_E)[None, :]
    dense = tl.zeros((ROWS, BLOCK_E), dtype=tl.float32)
    for j in range(TOP_K):
        chosen = tl.sum(tl.where(k == j, ids, 0), axis=1)[:, None]
        value = tl.sum(tl.where(k == j, dlogit, 0.0), axis=1)[:, None]
        dense += tl.where(expert == chosen, value, 0.0)
    inside = (row < rows) & (expert < experts)
    _store_parts(parts_ptr, row * experts + expert, part_stride, dense, inside)


def _parts(x: Tensor) -> Tensor:
    """(rows, columns) -> (1, rows, columns) of the same memory where x is BF16, else (3, rows, columns) BF16."""
    if x.dtype == torch.bfloat16:
        return x[None]
    parts = torch.empty(PARTS, *x.shape, dtype=torch.bfloat16, device=x.device)
    grid = (x.shape[0], triton.cdiv(x.shape[1], ELEMENTS))
    launch(
        _split_kernel,
        grid,
        *(x, parts, x.shape[1], x.stride(0), x.stride(1), parts.stride(0)),
        BLOCK=min(ELEMENTS, triton.next_power_of_2(x.shape[1])),
    )
    return parts


def _product(a: Tensor, b: Tensor, dtype: torch.dtype, shared: bool = False) -> Tensor:
    """Float32 product of operands in parts, rounded once.

    Args:
        a: (1 or 3, M, K) BF16, any strides.
        b: (1 or 3, N, K) BF16, any strides.
        dtype: of the result.
        shared: the contraction is shared out, so that a small result keeps the chip busy.

    Returns:
        out: (shares, M, N); shares is 1 unless `shared`.
    """
    M, K, N = a.shape[1], a.shape[2], b.shape[1]
    chip = target(a.device)
    # The parts' bytes: 2 of each, over the two sides; what a tile counts, exactly so where it is square.
    t = tile("router", chip, itemsize=a.shape[0] + b.shape[0])
    tiles = triton.cdiv(M, t.m) * triton.cdiv(N, t.n)
    share = triton.cdiv(K, max(1, chip.num_sms // max(1, tiles))) if shared else K
    share = max(1, triton.cdiv(share, t.k)) * t.k
    shares = max(1, triton.cdiv(K, share))
    out = torch.empty(shares, M, N, dtype=dtype, device=a.device)
    launch(
        _product_kernel,
        (tiles, shares),
        *(a, b, out, M, N, K, share, a.stride(0), b.stride(0)),
        *(a.stride(1), a.stride(2), b.stride(1), b.stride(2)),
        A_PARTS=a.shape[0],
        B_PARTS=b.shape[0],
        BLOCK_M=t.m,
        BLOCK_N=t.n,
        BLOCK_K=t.k,
        num_warps=t.warps,
        num_stages=t.stages,
    )
    return out


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, bias: Tensor, kept: Tensor | None,
        top_k: int, n_group: int, topk_group: int, norm: bool, scaling: float,
    ):  # fmt: skip
        rows, experts = x.shape[0], weight.shape[0]
        logits = _product(_parts(x), _parts(weight), torch.float32)[0]
        if kept is None:
            ids = torch.empty(rows, top_k, dtype=torch.int64, device=x.device)
        else:
            ids, top_k = kept.contiguous(), kept.shape[1]
        groups = n_group if topk_group < n_group else 1
        block_g, block_s = map(triton.next_power_of_2, (groups, experts // groups))
        tile_rows = max(1, ELEMENTS // (block_g * block_s))
        weights, scores = (
            torch.empty(ids.shape, dtype=torch.float32, device=x.device) for _ in range(2)
        )
        launch(
            _choose_kernel,
            (triton.cdiv(rows, tile_rows),),
            *(logits, bias.float().contiguous(), ids, weights, scores, rows, float(scaling)),
            KEPT=kept is not None,
            NORM=norm,
            TOP_K=top_k,
            GROUPS=groups,
            KEEP_GROUPS=min(topk_group, groups),
            SIZE=experts // groups,
            ROWS=tile_rows,
            BLOCK_G=block_g,
            BLOCK_S=block_s,
            BLOCK_K=triton.next_power_of_2(top_k),
            num_warps=4,
        )
        ctx.save_for_backward(x, weight, ids, scores)
        ctx.norm, ctx.scaling = norm, float(scaling)
        ctx.mark_non_differentiable(ids)
        return ids, weights

    @staticmethod
    def backward(ctx, _, dweights: Tensor):
        x, weight, ids, scores = ctx.saved_tensors
        (rows, top_k), experts = ids.shape, weight.shape[0]
        block_e = triton.next_power_of_2(experts)
        tile_rows = max(1, ELEMENTS // block_e)
        parts = torch.empty(PARTS, rows, experts, dtype=torch.bfloat16, device=x.device)
        launch(
            _dlogits_kernel,
            (triton.cdiv(rows, tile_rows),),
            *(dweights.contiguous(), scores, ids, parts, rows, experts, parts.stride(0)),
            ctx.scaling,
            NORM=ctx.norm,
            TOP_K=top_k,
            ROWS=tile_rows,
            BLOCK_E=block_e,
            BLOCK_K=triton.next_power_of_2(top_k),
            num_warps=4,
        )
        dx = dweight = None
        if ctx.needs_input_grad[0]:
            dx = _product(parts, _parts(weight).mT, x.dtype)[0]
        if ctx.needs_input_grad[1]:
            partial = _product(parts.mT, _parts(x).mT, torch.float32, shared=True)
            dweight = partial.sum(0).to(weight.dtype)
        return dx, dweight, None, None, None, None, None, None, None


def route(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    kept: Tensor | None,
    *,
    top_k: int,
    n_group: int,
    topk_group: int,
    norm_topk_prob: bool,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    """See `route.route`: ids (T, K) int64, those of `kept` where there are any, and weights (T, K) float32."""
    choice = (top_k, n_group, topk_group, norm_topk_prob, scaling)
    return _Route.apply(x, weight, bias, kept, *choice)
