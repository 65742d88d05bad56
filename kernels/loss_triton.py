"""Triton kernels of the linear cross-entropy; `loss.py` says what they compute and runs them chunk by chunk.

Three kernels and one product of cuBLAS a chunk of n rows:
1. `_logits_kernel`: z = hidden @ weight^T, tile by tile. While a tile is a float32 accumulator, each row of a quarter
   of it (a span of words) gives peak = max z, rest = sum exp(z - peak) without the target, and the target's own z.
   What is stored, once, is exp(z - peak), between 0 and 1: in BF16 its relative error is 2^-9 whatever the logits,
   where a stored BF16 logit of 20 would make p wrong by 4 %. A loss without gradients stores no tile.
2. `_rows_kernel`: sums over the spans of a row give the loss. p is exp(z - peak) times a factor of its span; where the
   target is, p - 1 = -(sum of the others) / (sum of all): no cancellation however sure the model is. In place.
3. dhidden = dz @ weight, in `loss.py`.
4. `_dweight_kernel`: dweight (+)= dz^T @ hidden in float32: read, added to and written, no (V, D) tensor beside it.

Offsets are 64-bit: one chunk of the real model has 2^29 elements, the whole of its logits 2^31. The order of all sums
is fixed, nothing is atomic: same bits every time.
Order of tiles: the chunk's hidden rows (22 MB at 4,096 rows of 2,688) stay in the L2 cache while the large operand,
the weight or dz, is read once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hymoe.kernels.launch import dot, launch, narrow, target
from hymoe.kernels.tiles import Tile, tile

ALIGN = 64  # elements: the buffer's rows start at whole cache lines whatever the vocabulary, so copies are 16 bytes
SPLIT = 4  # of a tile's columns, see `_quarter`
ROW_ELEMENTS = 4096  # that a program of `_rows_kernel` has at a time: 16 for each of 256 threads


@triton.jit(do_not_specialize=["rows"])
def _logits_kernel(
    hidden_ptr,  # (n, D)
    weight_ptr,  # (V, D)
    label_ptr,  # (n,) int64
    exp_ptr,  # (n, V) or None
    peak_ptr,  # (n, spans of V) float32
    rest_ptr,  # (n, spans of V) float32
    picked_ptr,  # (n,) float32
    rows,
    words,
    width,
    weight_stride,
    exp_stride,
    STORE: tl.constexpr,
    EVEN_K: tl.constexpr,
    EIGHTS: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    if EIGHTS:
        width = _in_eights(width)
        weight_stride = _in_eights(weight_stride)
    row_tiles = tl.cdiv(rows, BLOCK_M)
    word_tiles = tl.cdiv(words, BLOCK_N)
    for index in range(tl.program_id(0), row_tiles * word_tiles, tl.num_programs(0)):
        word_tile = index // row_tiles
        m = (index % row_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
        n = word_tile * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        # Past the end the last row is read again: no mask in the loop, and nothing of it is stored.
        m_inside = tl.minimum(m, rows - 1).to(tl.int64)
        n_inside = tl.minimum(n, words - 1).to(tl.int64)
        a_ptrs = hidden_ptr + m_inside[:, None] * width + k[None, :]
        b_ptrs = weight_ptr + n_inside[None, :] * weight_stride + k[:, None]
        z = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for start in range(0, width, BLOCK_K):
            if EVEN_K:
                a = tl.load(a_ptrs)
                b = tl.load(b_ptrs)
            else:
                a = tl.load(a_ptrs, mask=(k < width - start)[None, :], other=0.0)
                b = tl.load(b_ptrs, mask=(k < width - start)[:, None], other=0.0)
            z = dot(a, b, z)
            a_ptrs += BLOCK_K
            b_ptrs += BLOCK_K
        m_mask = m < rows
        label = tl.load(label_ptr + m, mask=m_mask, other=0).to(tl.int32)
        for quarter in tl.static_range(4):
            first = word_tile * BLOCK_N + quarter * SPAN
            if first < words:
                c = first + tl.arange(0, SPAN)
                part = _quarter(z, quarter)
                is_target = c[None, :] == label[:, None]
                picked = tl.sum(tl.where(is_target, part, 0.0), axis=1)
                has_target = (label >= first) & (label < first + SPAN)
                tl.store(picked_ptr + m, picked, mask=m_mask & has_target)
                part = tl.where((c < words)[None, :], part, float("-inf"))
                peak = tl.max(part, axis=1)
                part = tl.exp(part - peak[:, None])
                rest = tl.sum(tl.where(is_target, 0.0, part), axis=1)
                partial = m.to(tl.int64) * tl.cdiv(words, SPAN) + first // SPAN
                tl.store(peak_ptr + partial, peak, mask=m_mask)
                tl.store(rest_ptr + partial, rest, mask=m_mask)
                if STORE:
                    out = exp_ptr + m.to(tl.int64)[:, None] * exp_stride + c[None, :]
                    mask = m_mask[:, None] & (c < exp_stride)[None, :]
                    tl.store(out, narrow(part, exp_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _in_eights(x):
    """X, which the launcher knows to be a multiple of 8; of itself the compiler sees multiples of 16 alone."""
    return x // 8 * 8


@triton.jit
def _quarter(x, index: tl.constexpr):
    """A quarter of a tile's columns; the end of a product works on one after the other, for want of registers."""
    left, right = _halves(x)
    if index < 2:
        a, b = _halves(left)
    else:
        a, b = _halves(right)
    return b if index % 2 else a


@triton.jit
def _halves(x):
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def _rows_kernel(
    exp_ptr,  # (n, V), dz when done; or None
    label_ptr,  # (n,) int64
    peak_ptr,  # (n, spans of V) float32
    rest_ptr,  # (n, spans of V) float32
    picked_ptr,  # (n,) float32
    factor_ptr,  # (n,) float32 or None
    loss_ptr,  # (n,) float32
    spans,
    exp_stride,
    STORE: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    SPANS: tl.constexpr,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, SPANS)
    peaks = tl.load(peak_ptr + row * spans + s, mask=s < spans, other=float("-inf"))
    rests = tl.load(rest_ptr + row * spans + s, mask=s < spans, other=0.0)
    peak = tl.max(peaks, axis=0)
    rest = tl.sum(rests * tl.exp(peaks - peak), axis=0)
    picked = tl.load(picked_ptr + row)
    total = rest + tl.exp(picked - peak)
    tl.store(loss_ptr + row, (peak - picked) + tl.log(total))
    if STORE:
        scale = 1.0 / total
        if HAS_FACTOR:
            scale = scale * tl.load(factor_ptr + row)
        label = tl.load(label_ptr + row).to(tl.int32)
        for start in range(0, spans, GROUP):
            g = start + tl.arange(0, GROUP)
            span_peak = tl.load(peak_ptr + row * spans + g, mask=g < spans, other=float("-inf"))
            n = g[:, None] * SPAN + tl.arange(0, SPAN)[None, :]  # (GROUP, SPAN)
            pointers, inside = exp_ptr + row * exp_stride + n, n < exp_stride
            p = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
            dz = p * (tl.exp(span_peak - peak) * scale)[:, None]
            dz = tl.where(n == label, -rest * scale, dz)
            tl.store(pointers, narrow(dz, exp_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _dweight_kernel(
    dz_ptr,  # (n, V)
    hidden_ptr,  # (n, D)
    dweight_ptr,  # (V, D) float32
    rows,
    words,
    width,
    dz_stride,
    FIRST: tl.constexpr,
    EIGHTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    if EIGHTS:
        width = _in_eights(width)
    SPAN: tl.constexpr = BLOCK_N // 4
    width_tiles = tl.cdiv(width, BLOCK_N)
    for index in range(tl.program_id(0), tl.cdiv(words, BLOCK_M) * width_tiles, tl.num_programs(0)):
        m = (index // width_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)  # words
        n = (index % width_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)  # rows
        a_ptrs = dz_ptr + k.to(tl.int64)[None, :] * dz_stride + m[:, None]
        b_ptrs = hidden_ptr + k.to(tl.int64)[:, None] * width + n[None, :]
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for start in range(0, rows, BLOCK_K):
            # Both sides: the buffer's rows past the end hold another chunk's numbers, and 0 * NaN is NaN.
            inside = k < rows - start
            a = tl.load(a_ptrs, mask=(m < dz_stride)[:, None] & inside[None, :], other=0.0)
            b = tl.load(b_ptrs, mask=inside[:, None] & (n < width)[None, :], other=0.0)
            acc = dot(a, b, acc)
            a_ptrs += tl.cast(dz_stride, tl.int64) * BLOCK_K
            b_ptrs += tl.cast(width, tl.int64) * BLOCK_K
        for quarter in tl.static_range(4):
            first = (index % width_tiles) * BLOCK_N + quarter * SPAN
            n = first + tl.arange(0, SPAN)
            out = dweight_ptr + m.to(tl.int64)[:, None] * width + n[None, :]
            mask = (m < words)[:, None] & (n < width)[None, :]
            part = _quarter(acc, quarter)
            if not FIRST:
                part += tl.load(out, mask=mask, other=0.0)
            tl.store(out, part, mask=mask)


def row_losses(
    hidden: Tensor, weight: Tensor, label: Tensor, dz: Tensor | None, factor: Tensor | None
) -> Tensor:
    """Losses of rows, and the gradient of factor * loss by the logits.

    Args:
        hidden: (n, D), contiguous.
        weight: (V, D) in hidden's dtype.
        label: (n,) int64, all of them words.
        dz: (n, V) in hidden's dtype, overwritten; its rows lie a multiple of ALIGN elements apart, and what lies
            between them is overwritten too. None where only losses are wanted.
        factor: (n,) float32, or None for 1.

    Returns:
        losses: (n,) float32.
    """
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    (rows, width), words = hidden.shape, weight.shape[0]
    best, grid = _tile("loss.logits", hidden, rows, words)
    span = best.n // SPLIT
    spans = triton.cdiv(words, span)
    peak, rest = (hidden.new_empty(rows, spans, dtype=torch.float32) for _ in range(2))
    picked, losses = (hidden.new_empty(rows, dtype=torch.float32) for _ in range(2))
    store, stride = dz is not None, 0 if dz is None else dz.stride(0)
    launch(
        _logits_kernel,
        grid,
        *(hidden, weight, label, dz, peak, rest, picked),
        *(rows, words, width, weight.stride(0), stride),
        STORE=store,
        EVEN_K=width % best.k == 0,
        EIGHTS=_is_in_eights(width, weight.stride(0)),
        SPAN=span,
        **_options(best),
    )
    launch(
        _rows_kernel,
        (rows,),
        *(dz, label, peak, rest, picked, factor, losses, spans, stride),
        STORE=store,
        HAS_FACTOR=factor is not None,
        SPANS=triton.next_power_of_2(spans),
        GROUP=max(1, ROW_ELEMENTS // span),
        SPAN=span,
        num_warps=8,
    )
    return losses


def add_outer(dweight: Tensor, dz: Tensor, hidden: Tensor, first: bool) -> None:
    """Adds dz^T @ hidden to dweight, or writes it there.

    Args:
        dweight: (V, D) float32, contiguous.
        dz: (n, V), its rows a multiple of ALIGN elements apart.
        hidden: (n, D) in dz's dtype, contiguous.
        first: whether dweight holds nothing yet.
    """
    words, width = dweight.shape
    best, grid = _tile("loss.dweight", hidden, words, width)
    launch(
        _dweight_kernel,
        grid,
        *(dz, hidden, dweight, hidden.shape[0], words, width, dz.stride(0)),
        FIRST=first,
        EIGHTS=_is_in_eights(width),
        **_options(best),
    )


def _tile(product: str, x: Tensor, m: int, n: int) -> tuple[Tile, tuple[int]]:
    """The product's tile on x's device, and programs that fill it: a tile of 4 warps leaves room for a second block."""
    chip = target(x.device)
    best = tile(product if x.element_size() < 4 else "loss.float32", chip, x.element_size())
    blocks = max(1, 8 // best.warps)
    return best, (min(triton.cdiv(m, best.m) * triton.cdiv(n, best.n), blocks * chip.num_sms),)


def _is_in_eights(*sizes: int) -> bool:
    return any(size % 16 for size in sizes) and not any(size % 8 for size in sizes)


def _options(best: Tile) -> dict[str, int]:
    blocks = {"BLOCK_M": best.m, "BLOCK_N": best.n, "BLOCK_K": best.k}
    return {**blocks, "num_warps": best.warps, "num_stages": best.stages}
