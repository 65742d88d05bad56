"""Time steps and decays of the Mamba-2 scan, and their gradients: the small kernels around the products.

Math, token t of a chunk, one head: v = softplus(dt + dt_bias), step = clamp(v, low, high), rate = step * a with
a = -exp(a_log), s[t] = sum of the chunk's rates up to t. Backward, from the gradients that the products' kernels leave
for each token (`Parts`): drate[t] = sum_{i>=t} (reads[i] - writes[i] + enters[i]) + sum_{j<t} leaves[j] + through,
all sums within the chunk; dstep += a * drate; ddt = dstep * sigmoid(dt + dt_bias) where low <= v <= high, else 0.
da_log = sum_t drate * rate, ddt_bias = sum_t ddt, dskip = sum_t skips[t].

Dtypes: float32; the sums along a chunk in float64, because differences of s cancel. s is kept in units of log 2, for
exp2, and as two float32, s = high + low: a difference of two s is then as exact as float32 can hold it, without
float64 in the products' kernels.
Shapes: everything of a token and a head lies as (H, T), so that a kernel reads one head's tokens side by side.
Memory: three float32 for each token and head, 12.6 MB of T = 16384, H = 64; computed again in the backward pass.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from hymoe.kernels.launch import launch, narrow
from hymoe.kernels.packed import Chunks

LOG2E = tl.constexpr(1.4426950408889634)
BLOCK_H = 8  # heads a program: 16 bytes of a row of dt, and few enough for float64 in registers


@dataclass(frozen=True)
class Raw:
    """What time steps and decays are made of.

    Attributes:
        dt: (T, H), rows may lie apart.
        a_log: (H,).
        bias: (H,).
        limit: lowest and highest time step.
    """

    dt: Tensor
    a_log: Tensor
    bias: Tensor
    limit: tuple[float, float]


@dataclass(frozen=True)
class Decays:
    """Float32 (H, T) each: the time steps, and s / log(2) as the sum of two."""

    step: Tensor
    high: Tensor
    low: Tensor


@dataclass(frozen=True)
class Parts:
    """What each token gives to the gradients of its time step and rate.

    Attributes:
        steps: (H, T) float32, gradient of the time step where it scales x.
        skips: (H, T) float32, dy . x, of the skip.
        enters: (H, T) float32, of s[t], through what token t reads of the state that enters the chunk.
        leaves: (H, T) float32, of s[last] - s[t], through what token t adds to the state that leaves the chunk.
        reads: (H, T) float64, of s[t], through what token t reads of the chunk's earlier ones.
        writes: (tiles of a chunk, H, T) float64, of -s[t], through what the chunk's later tokens read of token t, by
            the tile of `block` tokens that they lie in; tiles before t's own are not written.
    """

    steps: Tensor
    skips: Tensor
    enters: Tensor
    leaves: Tensor
    reads: Tensor
    writes: Tensor
    block: int

    @classmethod
    def empty(cls, like: Tensor, tiles: int, block: int) -> "Parts":
        """Not yet written; `like` is (H, T)."""
        one = torch.empty(4, *like.shape, dtype=torch.float32, device=like.device)
        two = torch.empty(1 + tiles, *like.shape, dtype=torch.float64, device=like.device)
        return cls(*one.unbind(), two[0], two[1:], block)


@triton.jit
def _softplus(x):
    """log(1 + exp(x)) to float32's precision also where it is tiny; a NaN stays one."""
    y = tl.exp(-tl.abs(x))
    z = y / (2 + y)  # log(1 + y) = 2 * atanh(z), z <= 1/3: seven terms of its series
    q = z * z
    series = 1 + q * (1 / 3 + q * (1 / 5 + q * (1 / 7 + q * (1 / 9 + q * (1 / 11 + q / 13)))))
    return tl.where(x > 0, x, 0.0) + 2 * z * series


@triton.jit
def _clamp(v, low, high):
    """Unlike tl.clamp this keeps a NaN."""
    return tl.where(v < low, low, tl.where(v > high, high, v))


@triton.jit
def _decay_kernel(
    dt_ptr,
    a_log_ptr,
    bias_ptr,
    table_ptr,
    step_ptr,
    high_ptr,
    low_ptr,
    tokens,
    dt_stride,
    lowest,
    highest,
    HEADS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """One chunk, BLOCK_H heads."""
    chunk = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    t = tl.arange(0, BLOCK_Q)
    row = tl.load(table_ptr + 4 * chunk).to(tl.int64) + t
    mask = (h[:, None] < HEADS) & (t[None, :] < tl.load(table_ptr + 4 * chunk + 1))  # (H, Q)
    dt = tl.load(dt_ptr + row[None, :] * dt_stride + h[:, None], mask=mask, other=0.0)
    bias = tl.load(bias_ptr + h, mask=h < HEADS, other=0.0).to(tl.float32)
    a = -tl.exp(tl.load(a_log_ptr + h, mask=h < HEADS, other=0.0).to(tl.float32))
    step = _clamp(_softplus(dt.to(tl.float32) + bias[:, None]), lowest, highest)
    rate = tl.where(mask, step * a[:, None], 0.0)
    s = tl.cumsum(rate.to(tl.float64) * LOG2E, axis=1)
    high = s.to(tl.float32)
    out = h[:, None].to(tl.int64) * tokens + row[None, :]
    tl.store(step_ptr + out, step, mask=mask)
    tl.store(high_ptr + out, high, mask=mask)
    tl.store(low_ptr + out, (s - high.to(tl.float64)).to(tl.float32), mask=mask)


@triton.jit
def _decay_backward_kernel(
    dt_ptr,
    a_log_ptr,
    bias_ptr,
    table_ptr,
    steps_ptr,
    skips_ptr,
    enters_ptr,
    leaves_ptr,
    reads_ptr,
    writes_ptr,
    through_ptr,
    ddt_ptr,
    sums_ptr,
    tokens,
    dt_stride,
    lowest,
    highest,
    HEADS: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """One chunk, BLOCK_H heads; sums along the chunk go to (C, 3, H): a_log, dt_bias, skip."""
    chunk = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    t = tl.arange(0, BLOCK_Q)
    row = tl.load(table_ptr + 4 * chunk).to(tl.int64) + t
    enter = tl.load(table_ptr + 4 * chunk + 2).to(tl.int64)
    length = tl.load(table_ptr + 4 * chunk + 1)
    mask = (h[:, None] < HEADS) & (t[None, :] < length)  # (H, Q)
    dt = tl.load(dt_ptr + row[None, :] * dt_stride + h[:, None], mask=mask, other=0.0)
    bias = tl.load(bias_ptr + h, mask=h < HEADS, other=0.0).to(tl.float32)
    a = -tl.exp(tl.load(a_log_ptr + h, mask=h < HEADS, other=0.0).to(tl.float32))[:, None]
    raw = dt.to(tl.float32) + bias[:, None]
    v = _softplus(raw)
    rate = _clamp(v, lowest, highest) * a

    at = h[:, None].to(tl.int64) * tokens + row[None, :]
    reads = tl.load(reads_ptr + at, mask=mask, other=0.0)
    enters = tl.load(enters_ptr + at, mask=mask, other=0.0).to(tl.float64)
    leaves = tl.load(leaves_ptr + at, mask=mask, other=0.0).to(tl.float64)
    ds = reads + enters - leaves
    for tile in tl.static_range(BLOCK_Q // BLOCK_M):
        written = t < tl.where(tile * BLOCK_M < length, (tile + 1) * BLOCK_M, 0)
        at_tile = (tile * HEADS + h[:, None]).to(tl.int64) * tokens + row[None, :]
        ds -= tl.load(writes_ptr + at_tile, mask=mask & written[None, :], other=0.0)
    drate = tl.sum(ds + leaves, axis=1)[:, None] - tl.cumsum(ds, axis=1) + ds
    entered = h < tl.where(enter >= 0, HEADS, 0)
    for tile in tl.static_range(TILES):
        at_slot = (enter * TILES + tile) * HEADS + h
        through = tl.load(through_ptr + at_slot, mask=entered, other=0.0)
        drate += through.to(tl.float64)[:, None]

    dv = tl.load(steps_ptr + at, mask=mask, other=0.0) + drate * a
    ddt = tl.where(mask & (v >= lowest) & (v <= highest), dv * tl.sigmoid(raw), 0.0)
    out = row[None, :] * HEADS + h[:, None]
    tl.store(ddt_ptr + out, narrow(ddt.to(tl.float32), ddt_ptr.dtype.element_ty), mask=mask)
    sums = sums_ptr + 3 * chunk * HEADS + h
    skips = tl.load(skips_ptr + at, mask=mask, other=0.0).to(tl.float64)
    tl.store(sums, tl.sum(tl.where(mask, drate * rate, 0.0), axis=1), mask=h < HEADS)
    tl.store(sums + HEADS, tl.sum(ddt, axis=1), mask=h < HEADS)
    tl.store(sums + 2 * HEADS, tl.sum(skips, axis=1), mask=h < HEADS)


def _grid(raw: Raw, chunks: Chunks) -> tuple[int, int]:
    return chunks.count, triton.cdiv(raw.dt.shape[1], BLOCK_H)


def block_of(size: int) -> int:
    """Length of a block that holds `size`; a matrix product wants 16."""
    return max(16, triton.next_power_of_2(size))


def decays(raw: Raw, chunks: Chunks) -> Decays:
    """Time steps and their sums along each chunk."""
    tokens, heads = raw.dt.shape
    planes = torch.empty(3, heads, tokens, dtype=torch.float32, device=raw.dt.device)
    step, high, low = planes.unbind()
    launch(
        _decay_kernel,
        _grid(raw, chunks),
        *(raw.dt, raw.a_log, raw.bias, chunks.table, step, high, low),
        *(tokens, raw.dt.stride(0), *raw.limit),
        HEADS=heads,
        BLOCK_Q=block_of(chunks.size),
        BLOCK_H=BLOCK_H,
        num_warps=4,
    )
    return Decays(step, high, low)


def decays_backward(
    raw: Raw, chunks: Chunks, parts: Parts, through: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of dt, a_log, dt_bias and skip.

    Args:
        raw: as of `decays`.
        chunks: as of `decays`.
        parts: what the products' kernels left of each token.
        through: (slots, tiles, H) float32, gradients of s at the end of the chunk that a slot's state enters.

    Returns:
        ddt: (T, H) in dt's dtype.
        da_log, dbias, dskip: (H,) float32.
    """
    tokens, heads = raw.dt.shape
    ddt = torch.empty(tokens, heads, dtype=raw.dt.dtype, device=raw.dt.device)
    sums = torch.empty(chunks.count, 3, heads, dtype=torch.float64, device=raw.dt.device)
    launch(
        _decay_backward_kernel,
        _grid(raw, chunks),
        *(raw.dt, raw.a_log, raw.bias, chunks.table),
        *(parts.steps, parts.skips, parts.enters, parts.leaves, parts.reads, parts.writes),
        *(through, ddt, sums),
        *(tokens, raw.dt.stride(0), *raw.limit),
        HEADS=heads,
        TILES=through.shape[1],
        BLOCK_M=parts.block,
        BLOCK_Q=block_of(chunks.size),
        BLOCK_H=BLOCK_H,
        num_warps=4,
    )
    return ddt, *sums.sum(0).float().unbind()
