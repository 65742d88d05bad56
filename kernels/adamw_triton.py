"""`adamw_step` on a GPU: one Triton launch over many tensors, with the bits of `adamw_step_ref`.

**Launch.** A table of int64 rows, one a tensor, holds addresses, size, offset and key; a second table names each
program's row. A program owns CHUNK elements of one tensor and walks them in blocks. Tensors of one group (dtypes of
parameter and gradient, aligned or not) share a launch. The first table is written anew at each step, because gradients
and FSDP2's storages may move, and sent from pinned memory without a wait; the second depends on sizes alone and stays
on the device.

**Alignment.** A tensor is aligned where 16 divides its addresses, 4 its offset and 8 its size: each thread then moves
16 bytes at a time, and a block's elements are whole groups of four, as the random words are made. Other tensors run on
the same code without these promises; their first chunk starts up to three elements early, at a group's start.

**Bits.** No multiply-add is fused (`enable_fp_fusion`), division and root are the correctly rounded ones, numbers too
small for a normal exponent keep their bits.

**Memory.** In place; the tables are 80 bytes a tensor and 4 a chunk. Nothing waits for the host: scalars are read on
the device, and where the step is not applied every program ends before its first element.
"""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from hymoe.kernels.launch import launch, narrow, target
from hymoe.kernels.rounding import MULTIPLIERS, NUM_ROUNDS, WEYL

if TYPE_CHECKING:
    from hymoe.kernels.adamw import Scalars

# A row of the table.
COLUMNS = tl.constexpr(10)
PARAM, GRAD, EXP_AVG, EXP_AVG_SQ, REMAINDER = (tl.constexpr(i) for i in range(5))  # addresses
SIZE = tl.constexpr(5)  # elements
OFFSET = tl.constexpr(6)  # of the first element in the whole tensor
KEY = tl.constexpr(7)
DECAY = tl.constexpr(8)  # which of the decays; 0 is none
FIRST = tl.constexpr(9)  # program of the first chunk

ROUNDS = tl.constexpr(NUM_ROUNDS)
MULTIPLIER_0, MULTIPLIER_1 = map(tl.constexpr, MULTIPLIERS)
WEYL_0, WEYL_1 = map(tl.constexpr, WEYL)
LARGEST_BF16 = tl.constexpr(torch.finfo(torch.bfloat16).max)

# Elements of a block, blocks of a chunk, warps: 8 elements a thread, loads of 16 bytes, chunks that amortise the table.
BLOCK, BLOCKS, WARPS = 1024, 16, 4
INTERPRETED_BLOCK, INTERPRETED_BLOCKS = 64, 2  # small, so that tiny tests have many ragged ones


@triton.jit
def _philox(group, key, step, seed_low, seed_high):
    """(n,) int64 groups of four elements -> their four words, (n,) uint32 each, as `rounding.philox4x32`."""
    c0, c1 = group.to(tl.uint32), (group >> 32).to(tl.uint32)
    c2, c3 = tl.zeros_like(c0) + key.to(tl.uint32), tl.zeros_like(c0) + step.to(tl.uint32)
    k0, k1 = seed_low.to(tl.uint32), seed_high.to(tl.uint32)
    for _ in tl.static_range(ROUNDS):
        # One instruction for both halves of a product; `tl.umulhi` beside a product makes two.
        p0, p1 = c0.to(tl.uint64) * MULTIPLIER_0, c2.to(tl.uint64) * MULTIPLIER_1
        c0, c1 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0, p1.to(tl.uint32)
        c2, c3 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1, p0.to(tl.uint32)
        k0, k1 = k0 + WEYL_0, k1 + WEYL_1
    return c0, c1, c2, c3


@triton.jit
def _random_words(first_group, key, step, seed_low, seed_high, BLOCK: tl.constexpr):
    """(BLOCK,) uint32: the words of elements 4 * first_group, ..., as `rounding.random_words`."""
    # Two groups a thread, neighbours: so lie the eight elements that it loads, and no word changes threads.
    even = first_group + 2 * tl.arange(0, BLOCK // 8)
    a0, a1, a2, a3 = _philox(even, key, step, seed_low, seed_high)
    b0, b1, b2, b3 = _philox(even + 1, key, step, seed_low, seed_high)
    evens = tl.join(tl.join(a0, b0), tl.join(a2, b2))  # (n, group, word / 2)
    odds = tl.join(tl.join(a1, b1), tl.join(a3, b3))
    return tl.reshape(tl.join(evens, odds), (BLOCK,))


@triton.jit
def _wide_bits(x):
    """Bfloat16 -> the bits of the same float32; Triton's interpreter converts subnormals wrongly."""
    return x.to(tl.int16, bitcast=True).to(tl.int32) << 16


@triton.jit
def _wide(x):
    """Bfloat16 or float32 -> float32."""
    return _wide_bits(x).to(tl.float32, bitcast=True) if x.dtype == tl.bfloat16 else x


@triton.jit
def _as_bf16(raw):
    """The high half of float32 bits."""
    return (raw >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _round_with_bits(x, bits):
    """As `rounding.round_with_bits` for results of arithmetic, whose NaNs are quiet."""
    raw = x.to(tl.int32, bitcast=True)
    # From the largest bfloat16 on, nothing is added.
    return _as_bf16(tl.where(tl.abs(x) < LARGEST_BF16, raw + bits.to(tl.int32), raw))


@triton.jit(do_not_specialize=["seed_low", "seed_high"])
def _adamw_kernel(
    table_ptr,  # (tensors, COLUMNS) int64
    rows_ptr,  # (programs,) int32
    decays_ptr,  # (decays,) float32
    applied_ptr,  # () each, from here
    count_ptr,
    factor_ptr,
    step_size_ptr,
    eps_ptr,
    beta1,
    rest1,  # 1 - beta1
    beta2,
    rest2,
    seed_low,
    seed_high,
    PARAM_BF16: tl.constexpr,
    GRAD_BF16: tl.constexpr,
    ROUNDING: tl.constexpr,
    STOCHASTIC_V: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    P_TYPE: tl.constexpr = tl.bfloat16 if PARAM_BF16 else tl.float32
    G_TYPE: tl.constexpr = tl.bfloat16 if GRAD_BF16 else tl.float32
    EXACT: tl.constexpr = PARAM_BF16 and ROUNDING == "exact"
    STOCHASTIC_P: tl.constexpr = PARAM_BF16 and ROUNDING == "stochastic"

    program = tl.program_id(0)
    row_ptr = table_ptr + tl.load(rows_ptr + program).to(tl.int64) * COLUMNS
    offset = tl.load(row_ptr + OFFSET)
    # Chunks start where the whole tensor's groups of four do.
    start = (program - tl.load(row_ptr + FIRST)) * CHUNK - (0 if ALIGNED else offset & 3)
    count = tl.minimum(tl.load(row_ptr + SIZE) - start, CHUNK).to(tl.int32)
    count = tl.where(tl.load(applied_ptr), count, 0)
    p_ptr = tl.load(row_ptr + PARAM).to(tl.pointer_type(P_TYPE)) + start
    g_ptr = tl.load(row_ptr + GRAD).to(tl.pointer_type(G_TYPE)) + start
    m_ptr = tl.load(row_ptr + EXP_AVG).to(tl.pointer_type(P_TYPE)) + start
    v_ptr = tl.load(row_ptr + EXP_AVG_SQ).to(tl.pointer_type(P_TYPE)) + start
    r_ptr = tl.load(row_ptr + REMAINDER).to(tl.pointer_type(tl.int16)) + start
    if ALIGNED:
        count = tl.multiple_of(count, 8)
        p_ptr = tl.multiple_of(p_ptr, 16)
        g_ptr = tl.multiple_of(g_ptr, 16)
        m_ptr = tl.multiple_of(m_ptr, 16)
        v_ptr = tl.multiple_of(v_ptr, 16)
        r_ptr = tl.multiple_of(r_ptr, 16)
    key = tl.load(row_ptr + KEY)
    decay_index = tl.load(row_ptr + DECAY)
    decay = tl.load(decays_ptr + decay_index)
    step = tl.load(count_ptr)
    factor = tl.load(factor_ptr)
    step_size = tl.load(step_size_ptr)
    eps = tl.load(eps_ptr)

    for first in range(0, count, BLOCK):
        element = first + tl.arange(0, BLOCK)
        mask = element < count
        if not ALIGNED:
            mask &= start + element >= 0
        p = tl.load(p_ptr + element, mask=mask)
        g = _wide(tl.load(g_ptr + element, mask=mask)) * factor
        m = _wide(tl.load(m_ptr + element, mask=mask))
        v = _wide(tl.load(v_ptr + element, mask=mask))
        if EXACT:
            r = tl.load(r_ptr + element, mask=mask).to(tl.int32)
            w = (_wide_bits(p) + r).to(tl.float32, bitcast=True)
        else:
            w = _wide(p)

        m = m * beta1 + g * rest1
        v = v * beta2 + (g * g) * rest2
        u = tl.div_rn(m, tl.sqrt_rn(v) + eps) * step_size
        w = w - tl.where(decay_index != 0, u + w * decay, u)

        if STOCHASTIC_P or STOCHASTIC_V:
            first_group = (offset + start + first) >> 2
            words = _random_words(first_group, key, step, seed_low, seed_high, BLOCK)
        if EXACT:
            raw = w.to(tl.int32, bitcast=True)
            raw = tl.where(w == w, raw, raw & -65536)  # a NaN is quiet and has no low half
            tl.store(r_ptr + element, raw.to(tl.int16), mask=mask)
            tl.store(p_ptr + element, _as_bf16(raw + 0x8000), mask=mask)
        elif STOCHASTIC_P:
            tl.store(p_ptr + element, _round_with_bits(w, words & 0xFFFF), mask=mask)
        else:
            tl.store(p_ptr + element, narrow(w, P_TYPE), mask=mask)
        tl.store(m_ptr + element, narrow(m, P_TYPE), mask=mask)
        if STOCHASTIC_V:
            tl.store(v_ptr + element, _round_with_bits(v, words >> 16), mask=mask)
        else:
            tl.store(v_ptr + element, narrow(v, P_TYPE), mask=mask)


def triton_step(
    tensors: Sequence[Sequence[Tensor | None]],
    keys: Sequence[int],
    offsets: Sequence[int],
    weight_decays: Sequence[float],
    scalars: "Scalars",
    seed: int,
    rounding: str,
) -> None:
    """`adamw_step` for checked arguments, without the count's increment.

    Args:
        tensors: parameters, gradients, first moments, second moments, remainders.
        keys: as `adamw_step`.
        offsets: likewise.
        weight_decays: likewise.
        scalars: of this step.
        seed: as `adamw_step`.
        rounding: likewise.
    """
    decays = sorted({0.0, *weight_decays}, key=abs)  # 0 comes first
    block, chunk = block_and_chunk(scalars.count.device)
    groups: dict[tuple[bool, bool, bool], tuple[list[list[int]], list[int]]] = {}
    for *one, key, offset, decay in zip(*tensors, keys, offsets, weight_decays, strict=True):
        size = one[0].numel()
        if size == 0:
            continue
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in one]
        is_aligned = not (size % 8 or offset % 4 or any(address % 16 for address in addresses))
        is_p_bf16, is_g_bf16 = (tensor.dtype == torch.bfloat16 for tensor in one[:2])
        table, chunks = groups.setdefault((is_p_bf16, is_g_bf16, is_aligned), ([], []))
        table.append([*addresses, size, offset, key, decays.index(decay), sum(chunks)])
        chunks.append(-(-(size + offset % 4) // chunk))

    decays = torch.stack([scalars.decay(decay) for decay in decays])
    for (is_p_bf16, is_g_bf16, is_aligned), (table, chunks) in groups.items():
        launch_table(
            table,
            tuple(chunks),
            decays,
            scalars,
            seed,
            PARAM_BF16=is_p_bf16,
            GRAD_BF16=is_g_bf16,
            ROUNDING=rounding if is_p_bf16 else "nearest",
            STOCHASTIC_V=is_p_bf16 and scalars.is_v_stochastic,
            ALIGNED=is_aligned,
            BLOCK=block,
            CHUNK=chunk,
        )


def block_and_chunk(device: torch.device) -> tuple[int, int]:
    """Elements that a program of this device takes at once, and in all."""
    if target(device).arch == 0:
        return INTERPRETED_BLOCK, INTERPRETED_BLOCK * INTERPRETED_BLOCKS
    return BLOCK, BLOCK * BLOCKS


def launch_table(
    table: Sequence[Sequence[int]],
    chunks: tuple[int, ...],
    decays: Tensor,
    scalars: "Scalars",
    seed: int,
    **constexprs: bool | str | int,
) -> None:
    """The launch over the tensors of a group.

    Args:
        table: a row a tensor.
        chunks: programs of each.
        decays: (decays,) float32; the first is not used.
        scalars: of this step.
        seed: as `adamw_step`.
        constexprs: of the kernel.
    """
    device = decays.device
    low, high = ((half ^ 1 << 31) - (1 << 31) for half in (seed & 0xFFFFFFFF, seed >> 32))
    s = scalars
    launch(
        _adamw_kernel,
        (sum(chunks),),
        *(_send(torch.tensor(table, dtype=torch.int64), device), _rows(chunks, device), decays),
        *(s.applied, s.count, s.factor, s.step_size, s.eps),
        *(float(s.beta1), 1.0 - s.beta1, float(s.beta2), 1.0 - s.beta2, low, high),
        num_warps=WARPS,
        enable_fp_fusion=False,
        **constexprs,
    )


def _send(host: Tensor, device: torch.device) -> Tensor:
    """To the device without a wait: from pinned memory, which torch keeps until the copy is done."""
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)


@functools.lru_cache(maxsize=32)  # groups and kinds of steps in a run are few
def _rows(chunks: tuple[int, ...], device: torch.device) -> Tensor:
    """(programs,) int32: the table's row of each program."""
    rows = torch.arange(len(chunks), dtype=torch.int32)
    return _send(rows.repeat_interleave(torch.tensor(chunks)), device)
