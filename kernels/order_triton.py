"""Triton kernels of the expert order: a stable counting sort without atomics, and the table of tiles.

Three kernels. In each tile of rows, for every e, the number of ids below e. For every e, the sum of these over the
tiles is the first row of expert e, and a prefix sum of the differences from e to e + 1 is where each tile's rows of e
begin. The rest is a row's rank among the rows of its tile.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hymoe.kernels.launch import launch, target

ROWS = 256  # of a tile of the sort: ranks cost rows^2 compares, the tables 8 E / rows bytes a row
COLUMNS = tl.constexpr(16)  # ids or experts that a tile is compared with at a time
SCAN = 1024  # tiles of the sort that are scanned at a time
PAIRS = 8192  # (tile, expert) pairs of a program that writes the table of tiles


@triton.jit
def _below_kernel(
    ids_ptr,  # (R,) int64
    below_ptr,  # (E+1, tiles) int32: ids of the tile that are below e
    rows,
    experts,
    tiles,
    BLOCK: tl.constexpr,
):
    number = tl.program_id(0).to(tl.int64)
    row = number * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + row, mask=row < rows, other=experts).to(tl.int32)
    for first in range(0, experts + 1, COLUMNS):
        expert = first + tl.arange(0, COLUMNS)
        below = tl.sum((ids[:, None] < expert[None, :]).to(tl.int32), axis=0)
        tl.store(below_ptr + expert.to(tl.int64) * tiles + number, below, mask=expert <= experts)


@triton.jit
def _starts_kernel(
    below_ptr,  # (E+1, tiles) int32
    starts_ptr,  # (E, tiles) int32: where the tile's first row of the expert goes
    offsets_ptr,  # (E+1,) int64
    experts,
    tiles,
    BLOCK: tl.constexpr,
):
    expert = tl.program_id(0).to(tl.int64)
    below = below_ptr + expert * tiles
    number = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.int32)
    for first in range(0, tiles, BLOCK):
        total += tl.load(below + first + number, mask=first + number < tiles, other=0)
    start = tl.sum(total)
    tl.store(offsets_ptr + expert, start.to(tl.int64))
    if expert < experts:
        for first in range(0, tiles, BLOCK):
            mask = first + number < tiles
            count = tl.load(below + tiles + first + number, mask=mask, other=0)
            count -= tl.load(below + first + number, mask=mask, other=0)
            before = start + tl.cumsum(count, 0) - count
            tl.store(starts_ptr + expert * tiles + first + number, before, mask=mask)
            start += tl.sum(count)


@triton.jit
def _scatter_kernel(
    ids_ptr,  # (R,) int64
    starts_ptr,  # (E, tiles) int32
    order_ptr,  # (R,) int64
    inverse_ptr,  # (R,) int64
    rows,
    experts,
    tiles,
    BLOCK: tl.constexpr,
):
    number = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    row = number * BLOCK + place
    mask = row < rows
    ids = tl.load(ids_ptr + row, mask=mask, other=0).to(tl.int32)
    rank = tl.zeros((BLOCK,), dtype=tl.int32)
    for first in range(0, BLOCK, COLUMNS):
        other = first + tl.arange(0, COLUMNS)
        earlier = number * BLOCK + other
        theirs = tl.load(ids_ptr + earlier, mask=earlier < rows, other=-1).to(tl.int32)
        same = (theirs[None, :] == ids[:, None]) & (other[None, :] < place[:, None])
        rank += tl.sum(same.to(tl.int32), axis=1)
    to = (tl.load(starts_ptr + ids.to(tl.int64) * tiles + number, mask=mask, other=0) + rank).to(
        tl.int64
    )
    tl.store(inverse_ptr + row, to, mask=mask)
    tl.store(order_ptr + to, row, mask=mask)


def sort_by_expert(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Order (R,), inverse (T, K) and offsets (E+1,) of `route.Routing` for ids (T, K), all int64."""
    flat = ids.flatten()
    rows, device, chip = flat.numel(), ids.device, target(ids.device)
    block = ROWS if chip.arch else 16  # many tiles in tiny tests
    tiles = triton.cdiv(rows, block)
    below = torch.empty(num_experts + 1, tiles, dtype=torch.int32, device=device)
    starts = torch.empty(num_experts, tiles, dtype=torch.int32, device=device)
    offsets = torch.empty(num_experts + 1, dtype=torch.int64, device=device)
    order, inverse = torch.empty_like(flat), torch.empty_like(flat)
    launch(_below_kernel, (tiles,), flat, below, rows, num_experts, tiles, BLOCK=block)
    launch(
        _starts_kernel,
        (num_experts + 1,),
        *(below, starts, offsets, num_experts, tiles),
        BLOCK=SCAN if chip.arch else 4,
    )
    launch(
        _scatter_kernel,
        (tiles,),
        *(flat, starts, order, inverse, rows, num_experts, tiles),
        BLOCK=block,
    )
    return order, inverse.view_as(ids), offsets


@triton.jit
def _table_kernel(
    offsets_ptr,  # (E+1,) int64
    table_ptr,  # (N, 2) int32
    number_of_tiles,  # N
    experts,
    block,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    expert = tl.arange(0, BLOCK_E)
    first = tl.load(offsets_ptr + expert, mask=expert < experts, other=0)
    last = tl.load(offsets_ptr + expert + 1, mask=expert < experts, other=0)
    ends = tl.cumsum(((last - first + block - 1) // block).to(tl.int32), 0)  # (BLOCK_E,) in tiles
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    passed = (ends[None, :] <= n[:, None]) & (expert[None, :] < experts)
    owner = tl.sum(passed.to(tl.int32), axis=1)  # (BLOCK_N,), E behind the last tile
    before = tl.max(tl.where(passed, ends[None, :], 0), axis=1)
    row = tl.load(offsets_ptr + owner, mask=owner < experts, other=0) + (n - before) * block
    behind = owner == experts
    at = table_ptr + 2 * n.to(tl.int64)
    tl.store(at, tl.where(behind, -1, owner), mask=n < number_of_tiles)
    tl.store(at + 1, tl.where(behind, 0, row).to(tl.int32), mask=n < number_of_tiles)


def tile_table(offsets: Tensor, rows: int, block: int) -> Tensor:
    """See `route.tile_table`."""
    experts = offsets.numel() - 1
    tiles = triton.cdiv(rows, block) + experts
    table = torch.empty(tiles, 2, dtype=torch.int32, device=offsets.device)
    block_e = triton.next_power_of_2(experts)
    pairs = PAIRS if target(offsets.device).arch else 512  # several programs in tiny tests
    block_n = max(1, pairs // block_e)
    launch(
        _table_kernel,
        (triton.cdiv(tiles, block_n),),
        *(offsets, table, tiles, experts, block),
        BLOCK_N=block_n,
        BLOCK_E=block_e,
    )
    return table
