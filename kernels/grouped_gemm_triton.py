"""Products over ragged rows, in Triton: each expert's rows times its matrix, and the gradients of the matrices.

`_rows_kernel`: y[r] = epilogue(weight[e] @ x[r]), r a row of expert e; x[r] may be the row of r's token, gathered by
the copy itself. `_wgrad_kernel`: out[e] = sum over the rows of e of outer(a[r], b[r]), a or b gathered.

Dtypes: operands and results in one dtype, accumulators and epilogues float32; float32 operands are not rounded (ieee).
`_wgrad_kernel` writes or accumulates bfloat16 or float32.
Order: expert by expert, an expert's row tiles fastest: the 132 tiles at work on an H200 share 2 or 3 experts, whose
matrices stay in L2. A fixed number of programs walk the tiles. Nothing is atomic, all sums have one order, the host
asks nothing: the number of rows is static, and that of tiles is counted from the offsets on the device.
Pipelines run on from one tile into the next: while an epilogue stores, copies for the next tile are in flight. For rows
Triton's `flatten` does it. In `_wgrad_kernel` every expert has another number of steps (12 at 768 rows: filling and
draining a pipeline for each tile would cost a fourth), so one loop goes over all steps of a program, written so that
no copy waits for a later stage (see there).
Ragged edges: a row past an expert's end repeats its last row and is not stored: rows of a product do not mix. In
`_wgrad_kernel` rows are summed over, so both operands are 0 there, whatever memory holds; copies fill with zeros at no
cost, which is why the last step is not peeled off. Columns past the end wrap around and are not stored.
Sizes: any; multiples of 8 copy 16 bytes at a time. Offsets of rows, tokens and experts are 64-bit.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from hymoe.kernels.launch import Target, dot, launch, narrow, target
from hymoe.kernels.route import Routing, tile_table
from hymoe.kernels.tiles import Tile, tile

# Columns of the `backward` epilogue at a time: with more, accumulators, act and two results do not fit the registers.
EPILOGUE_COLUMNS = 32


@triton.jit
def _row_tile(index, table_ptr, offsets_ptr, NUM_N: tl.constexpr, BLOCK_M: tl.constexpr):
    """Tile number -> expert, first row, end of the expert's rows, tile of columns; rows vary fastest in an expert."""
    slot = index // NUM_N
    expert = tl.load(table_ptr + 2 * slot)
    first = tl.load(table_ptr + 2 * slot + 1)
    begin = tl.load(offsets_ptr + expert).to(tl.int32)
    end = tl.load(offsets_ptr + expert + 1).to(tl.int32)
    num_m = tl.cdiv(end - begin, BLOCK_M)
    within = index - (slot - (first - begin) // BLOCK_M) * NUM_N
    return expert, begin + within % num_m * BLOCK_M, end, within // num_m


@triton.jit
def _expert_rows(offsets_ptr, e, NUM_E: tl.constexpr):
    first = tl.load(offsets_ptr + e, mask=e < NUM_E, other=0)
    end = tl.load(offsets_ptr + e + 1, mask=e < NUM_E, other=0)
    return (end - first).to(tl.int32)


@triton.jit
def _finish(
    acc,  # (BLOCK_M, columns) float32
    live,
    w,
    y_ptr,
    act_ptr,
    scaled_ptr,
    parts_ptr,
    first,
    num_rows,
    first_n,
    N: tl.constexpr,
    EPILOGUE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Epilogue of `_rows_kernel`, COLUMNS at a time: halves of halves, because registers cannot be sliced."""
    if acc.shape[1] > COLUMNS:
        HALF: tl.constexpr = acc.shape[1] // 2
        halves = tl.permute(tl.reshape(acc, (acc.shape[0], 2, HALF)), (0, 2, 1))
        left, right = tl.split(halves)
        _finish(
            left, live, w, y_ptr, act_ptr, scaled_ptr, parts_ptr, first, num_rows, first_n,
            N, EPILOGUE, COLUMNS,
        )  # fmt: skip
        _finish(
            right, live, w, y_ptr, act_ptr, scaled_ptr, parts_ptr, first, num_rows, first_n + HALF,
            N, EPILOGUE, COLUMNS,
        )  # fmt: skip
    else:
        row = tl.arange(0, acc.shape[0])
        column = first_n + tl.arange(0, acc.shape[1])
        mask = live[:, None] & (column[None, :] < N)
        base = first.to(tl.int64) * N
        at = row[:, None] * N + column[None, :]
        if EPILOGUE == "relu2":
            acc = tl.where(acc < 0, 0.0, acc)  # NaN stays NaN
            acc = acc * acc
        if EPILOGUE == "scale":
            acc = acc * w[:, None]
        if EPILOGUE == "backward":
            act = tl.load(act_ptr + base + at, mask=mask, other=0.0).to(tl.float32)
            part = tl.sum(acc * act, axis=1)
            parts = parts_ptr + (first_n // COLUMNS).to(tl.int64) * num_rows + first
            tl.store(parts + row, part, mask=live & (first_n + 0 * row < N))
            if scaled_ptr is not None:
                scaled = narrow(act * w[:, None], scaled_ptr.dtype.element_ty)
                tl.store(scaled_ptr + base + at, scaled, mask=mask)
            acc = acc * (tl.sqrt(act) * (2 * w)[:, None])
        tl.store(y_ptr + base + at, narrow(acc, y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _rows_kernel(
    x_ptr,  # (T, K) where GATHER, else (R, K)
    weight_ptr,  # (E, N, K), or (E, K, N) where TRANSPOSED
    y_ptr,  # (R, N)
    order_ptr,  # (R,) int64
    w_ptr,  # (T, TOP_K) float32
    act_ptr,  # (R, N)
    scaled_ptr,  # (R, N)
    parts_ptr,  # (ceil(N/COLUMNS), R) float32
    table_ptr,  # (tiles, 2) int32
    offsets_ptr,  # (E+1,) int64
    num_rows,
    weight_stride,
    x_stride: tl.constexpr,  # strides that are constants: 8 divides them, which of an argument nobody would know
    N: tl.constexpr,
    K: tl.constexpr,
    NUM_E: tl.constexpr,
    TOP_K: tl.constexpr,
    GATHER: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    EPILOGUE: tl.constexpr,
    PADDED_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    NUM_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    counts = _expert_rows(offsets_ptr, tl.arange(0, PADDED_E), NUM_E)
    num_tiles = tl.sum((counts + BLOCK_M - 1) // BLOCK_M, axis=0) * NUM_N
    for index in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=True):
        expert, first, end, n_tile = _row_tile(index, table_ptr, offsets_ptr, NUM_N, BLOCK_M)
        row = tl.minimum(first + tl.arange(0, BLOCK_M), end - 1)
        if GATHER:
            row = tl.load(order_ptr + row).to(tl.int32) // TOP_K
        matrix = weight_ptr + expert.to(tl.int64) * weight_stride
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for step in tl.range(0, (K + BLOCK_K - 1) // BLOCK_K):
            k = step * BLOCK_K + tl.arange(0, BLOCK_K)
            # Addresses from row and n_tile in every step: vectors of them, carried through the flattened loop, would
            # lose that 16 bytes divide them, and with it the asynchronous copies.
            x_rows = x_ptr + row.to(tl.int64) * x_stride
            n = (n_tile * BLOCK_N + tl.arange(0, BLOCK_N)) % N
            at = n[None, :] + k[:, None] * N if TRANSPOSED else n[None, :] * K + k[:, None]
            if K % BLOCK_K == 0:
                x = tl.load(x_rows[:, None] + k[None, :])
                weight = tl.load(matrix + at)
            else:
                x = tl.load(x_rows[:, None] + k[None, :], mask=k[None, :] < K, other=0.0)
                weight = tl.load(matrix + at, mask=k[:, None] < K, other=0.0)
            acc = dot(x, weight, acc)
        r = first + tl.arange(0, BLOCK_M)
        live = r < end
        w = 0.0
        if EPILOGUE == "scale" or EPILOGUE == "backward":
            choice = tl.load(order_ptr + r, mask=live, other=0)
            w = tl.load(w_ptr + choice, mask=live, other=0.0)
        _finish(
            acc, live, w, y_ptr, act_ptr, scaled_ptr, parts_ptr, first, num_rows, n_tile * BLOCK_N,
            N, EPILOGUE, COLUMNS,
        )  # fmt: skip


@triton.jit
def _wgrad_kernel(
    a_ptr,  # (T, M) where GATHER_A, else (R, M)
    b_ptr,  # (R, N) where GATHER_A, else (T, N)
    out_ptr,  # (E, M, N)
    order_ptr,  # (R,) int64
    offsets_ptr,  # (E+1,) int64
    out_stride,
    a_stride: tl.constexpr,
    b_stride: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    NUM_E: tl.constexpr,
    TOP_K: tl.constexpr,
    GATHER_A: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    PADDED_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    NUM_M: tl.constexpr = (M + BLOCK_M - 1) // BLOCK_M
    TILES: tl.constexpr = NUM_M * ((N + BLOCK_N - 1) // BLOCK_N)  # of an expert
    program = tl.program_id(0)
    stride = tl.num_programs(0)
    # All steps of this program: steps of an expert's tile (one for an empty expert, whose zeros are stored all the
    # same) times how many of its tiles program, program + stride, ... are.
    e = tl.arange(0, PADDED_E)
    steps = tl.maximum((_expert_rows(offsets_ptr, e, NUM_E) + BLOCK_K - 1) // BLOCK_K, 1)
    mine = tl.cdiv((e + 1) * TILES - program, stride) - tl.cdiv(e * TILES - program, stride)
    total = tl.sum(tl.where(e < NUM_E, steps * mine, 0), axis=0)

    index = program - stride
    start = 0
    end = 0
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for _ in tl.range(0, total):
        if start >= end:  # the next tile
            index += stride
            start = tl.load(offsets_ptr + index // TILES).to(tl.int32)
            end = tl.load(offsets_ptr + index // TILES + 1).to(tl.int32)
        m_tile = index % TILES % NUM_M
        n_tile = index % TILES // NUM_M
        m = (m_tile * BLOCK_M + tl.arange(0, BLOCK_M)) % M
        n = (n_tile * BLOCK_N + tl.arange(0, BLOCK_N)) % N
        row = start + tl.arange(0, BLOCK_K)
        live = row < end
        token = tl.load(order_ptr + row, mask=live, other=0).to(tl.int32) // TOP_K
        a_rows = a_ptr + (token if GATHER_A else row).to(tl.int64) * a_stride
        b_rows = b_ptr + (row if GATHER_A else token).to(tl.int64) * b_stride
        a = tl.load(a_rows[None, :] + m[:, None], mask=live[None, :], other=0.0)
        b = tl.load(b_rows[:, None] + n[None, :], mask=live[:, None], other=0.0)
        acc = dot(a, b, acc)
        # Not `start >= end` after the addition: the compiler would compute the sum that the next step's copies wait
        # for together with the epilogue's condition, after the product, and give up the whole pipeline.
        is_last = end - start <= BLOCK_K
        start += BLOCK_K
        if is_last:
            out_m = m_tile * BLOCK_M + tl.arange(0, BLOCK_M)
            out_n = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
            mask = (out_m[:, None] < M) & (out_n[None, :] < N)
            out = out_ptr + (index // TILES).to(tl.int64) * out_stride
            out += out_m[:, None] * N + out_n[None, :]
            if ACCUMULATE:
                acc += tl.load(out, mask=mask, other=0.0).to(tl.float32)
            tl.store(out, narrow(acc, out_ptr.dtype.element_ty), mask=mask)
            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)


def _tile(product: str, x: Tensor) -> tuple[Tile, Target]:
    """The tile of a product and the chip; float32 products, without matrix units, have their own."""
    chip, size = target(x.device), x.element_size()
    return tile("experts.float32" if size == 4 else f"experts.{product}", chip, size), chip


def _programs(chosen: Tile, chip: Target, itemsize: int, tiles: int) -> tuple[int]:
    """As many programs as run at once, by shared memory and by registers: more would only queue."""
    threads = 32 * chosen.warps
    registers = 128 if chosen.m * chosen.n <= 64 * threads else 256  # 64 or more accumulators each
    blocks = min(
        65_536 // (threads * registers), chip.shared_bytes // chosen.shared_bytes(itemsize)
    )
    if chip.arch == 0:
        blocks = 1  # few programs for the interpreter, each with several tiles
    return (min(chip.num_sms * max(1, blocks), tiles),)


def _rows_aligned(x: Tensor) -> Tensor:
    """X itself where its rows can be copied 16 bytes at a time, else a copy."""
    bytes_apart = [n * x.element_size() for n in (x.stride(0), x.storage_offset())]
    return x if x.stride(1) == 1 and not any(n % 16 for n in bytes_apart) else x.contiguous()


def _matrices_contiguous(weight: Tensor) -> Tensor:
    """(E, N, K) itself where each expert's matrix is contiguous, else a copy."""
    return weight if weight.stride()[1:] == (weight.shape[2], 1) else weight.contiguous()


def _check_sizes(rows: int, weight: Tensor) -> None:
    if rows >= 2**31 or weight.shape[1] * weight.shape[2] >= 2**31:
        raise ValueError(
            f"experts: {rows} rows and matrices {tuple(weight.shape[1:])}; both stay below 2^31"
        )


@dataclass(frozen=True)
class Rows:
    """The ragged rows of a product: how many, where experts begin, and which token each belongs to.

    Attributes:
        number: R.
        offsets: (E+1,) int64.
        order: (R,) int64, `Routing.order`; None where no token is asked for.
        top_k: K; `order // K` is the token.
    """

    number: int
    offsets: Tensor
    order: Tensor | None = None
    top_k: int = 1

    @classmethod
    def of(cls, routing: Routing) -> "Rows":
        """Those of a routing."""
        return cls(routing.order.numel(), routing.offsets, routing.order, routing.ids.shape[1])


@dataclass(frozen=True)
class Epilogue:
    """What `_finish` does with a product's accumulators before they are rounded.

    Attributes:
        kind: plain | relu2 | scale | backward.
        w: (T, K) float32, contiguous; of scale and backward.
        act: (R, N), what relu2 gave in the forward pass; of backward, as the next two.
        scaled: (R, N), gets w * act; None where it is not needed.
        parts: (ceil(N/EPILOGUE_COLUMNS), R) float32, gets <acc, act> by blocks of columns.
    """

    kind: str = "plain"
    w: Tensor | None = None
    act: Tensor | None = None
    scaled: Tensor | None = None
    parts: Tensor | None = None


def rows_product(
    product: str,
    x: Tensor,
    weight: Tensor,
    rows: Rows,
    epilogue: Epilogue = Epilogue(),
    *,
    gather: bool = False,
    transposed: bool = False,
) -> Tensor:
    """Y[r] = epilogue(weight[e] @ x[r]) for the rows of every expert.

    Args:
        product: key of the tile table, without `experts.`.
        x: (R, K), or (T, K) where `gather`.
        weight: (E, N, K), or (E, K, N) where `transposed`.
        rows: of every expert.
        epilogue: of the accumulators.
        gather: whether a row reads its token's x.
        transposed: whether each row meets its matrix's transpose.

    Returns:
        y: (R, N) in x's dtype.
    """
    x, weight = _rows_aligned(x), _matrices_contiguous(weight)
    _check_sizes(rows.number, weight)
    experts, n, k = weight.shape if not transposed else weight.transpose(1, 2).shape
    chosen, chip = _tile(product, x)
    y = torch.empty(rows.number, n, dtype=x.dtype, device=x.device)
    table = tile_table(rows.offsets, rows.number, chosen.m, kernels="triton")
    tiles = table.shape[0] * triton.cdiv(n, chosen.n)
    launch(
        _rows_kernel,
        _programs(chosen, chip, x.element_size(), tiles),
        *(x, weight, y, rows.order, epilogue.w, epilogue.act, epilogue.scaled, epilogue.parts),
        *(table, rows.offsets, rows.number, weight.stride(0), x.stride(0)),
        N=n,
        K=k,
        NUM_E=experts,
        TOP_K=rows.top_k,
        GATHER=gather,
        TRANSPOSED=transposed,
        EPILOGUE=epilogue.kind,
        PADDED_E=triton.next_power_of_2(experts),
        BLOCK_M=chosen.m,
        BLOCK_N=chosen.n,
        BLOCK_K=chosen.k,
        COLUMNS=EPILOGUE_COLUMNS if epilogue.kind == "backward" else chosen.n,
        num_warps=chosen.warps,
        num_stages=chosen.stages,
    )
    return y


def weight_gradient(
    a: Tensor, b: Tensor, rows: Rows, out: Tensor, *, gather: str, accumulate: bool = False
) -> None:
    """out[e] = (or +=) the sum over an expert's rows of outer(a[r], b[r]); an expert without rows has the sum 0.

    Args:
        a: (R, M), or (T, M) where it is gathered.
        b: (R, N), or (T, N) where it is gathered.
        rows: of every expert, with their order.
        out: (E, M, N) bfloat16 or float32, each expert's matrix contiguous.
        gather: "a" or "b", the one of which a row reads its token's.
        accumulate: whether to add to what `out` has, in float32, instead of writing over it.

    Raises:
        ValueError: a matrix of `out` is not contiguous.
    """
    a, b = _rows_aligned(a), _rows_aligned(b)
    if _matrices_contiguous(out) is not out:
        raise ValueError("weight_gradient: the matrices of `out` are not contiguous")
    _check_sizes(rows.number, out)
    experts, m, n = out.shape
    chosen, chip = _tile("wgrad", a)
    tiles = experts * triton.cdiv(m, chosen.m) * triton.cdiv(n, chosen.n)
    launch(
        _wgrad_kernel,
        _programs(chosen, chip, a.element_size(), tiles),
        *(a, b, out, rows.order, rows.offsets, out.stride(0), a.stride(0), b.stride(0)),
        M=m,
        N=n,
        NUM_E=experts,
        TOP_K=rows.top_k,
        GATHER_A=gather == "a",
        ACCUMULATE=accumulate,
        PADDED_E=triton.next_power_of_2(experts),
        BLOCK_M=chosen.m,
        BLOCK_N=chosen.n,
        BLOCK_K=chosen.k,
        num_warps=chosen.warps,
        # The copies wait for the tokens' copy, so Triton gives half of the stages to each.
        num_stages=2 * chosen.stages - 1,
    )
