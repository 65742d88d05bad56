"""The Mamba-2 scan in Triton: outputs and gradients of each chunk, and the autograd wrapper.

Math, chunk of Q tokens, one head of a group, s and step as in `decay.py`, E the state that enters, D the gradient of
the one that leaves (`states.py`); L[i,j] = exp(s[i] - s[j]) for j <= i, else 0:
    y[i] = sum_j (c[i] . b[j]) L[i,j] step[j] x[j] + exp(s[i]) c[i] . E + skip x[i]
Backward, with dm[i,j] = (dy[i] . x[j]) L[i,j] step[j] and w[j] = exp(s[last] - s[j]):
    dx[j] / step[j] = sum_i (c[i] . b[j]) L[i,j] dy[i] + w[j] b[j] . D     (+ skip dy[j] / step[j])
    dc[i] = sum_heads (sum_j dm[i,j] b[j] + exp(s[i]) E . dy[i])
    db[j] = sum_heads (sum_i dm[i,j] c[i] + w[j] step[j] D . x[j])
    ds[i] = sum_j (dm * c.b)[i,j] - sum_j (dm * c.b)[j,i], both without the diagonal, which cancels, + what reads E
Two kernels, each its own transpose on the way back (BACK): `_values_kernel` makes y from x with rows c and columns b,
and dx from dy with rows b and columns c; `_projections_kernel` makes dc with rows dy and columns x, and db with the two
exchanged. Either way m are the tokens of the program's tile, q those it looks at, `own` and `other` their projections.
A program has BLOCK_M tokens of a chunk and one group, and loops over the group's heads: c . b is computed once a group
and never written, sums over heads are sums in registers, so there are no atomics and the bits do not vary. Every
product but the last takes its operands as they lie in memory: decays and time steps are applied to float32 results.

Documents: all of them is in `Packed.chunks`. Chunks begin anew with each, so no kernel compares ids and nothing leaks.
What a chunk's end leaves empty is not loaded, and tiles of BLOCK_M tokens behind it are skipped: a row of T tokens in S
documents costs at most the work of T + S * BLOCK_M tokens, and no more states than one document.
Shapes: x (T, H, P), b and c (T, G, N); rows and heads may lie apart, int64 offsets. N of 256 or P of 128 run with a few
spilled registers.
Dtypes: operands in x's dtype (the decayed scores, their gradients and the states are rounded to it), sums float32.
Float32 operands have the second float32 of s, and float64 where sums cancel: for checks; slow, and at N = 128 too wide
for the shared memory of sm_120.
Memory: saved are the inputs alone; decays and states (0.13 GB in bfloat16 at the shapes below) are computed again.
Bytes at T = 16384, Q = 128, H = 64, P = 64, N = 128, G = 8 in bfloat16, of which inputs and outputs of the forward pass
are 0.34 GB. Forward: x 0.134, b c 0.067, E 0.133, y 0.134 and 0.30 of `states.py`: 0.77 GB, 0.18 ms of 4.3 TB/s; five
kernels that write chunk states and c . b move 1.50 GB. Backward: states again 0.30 and back 0.43, dc 0.50, db 0.50,
dx 0.60, what `decay.py` sums 0.08: 2.4 GB, 0.56 ms, where those layouts move about three times their forward pass.
Products: 0.06 TFLOP forward, 0.14 backward, 0.25 ms at 790 TFLOP/s. Not yet measured on a GPU.
Source: Dao and Gu 2024, section 6.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hymoe.kernels.launch import dot, launch, narrow
from hymoe.kernels.packed import Chunks, Packed
from hymoe.kernels.ssd.decay import Decays, Parts, Raw, block_of, decays, decays_backward
from hymoe.kernels.ssd.states import states_backward, states_between

MOST_CHUNK = 128  # tokens: what fits a program's registers
BLOCK_M = 64  # tokens a program: the rows of one matrix instruction


@triton.jit
def _rows(ptr, row, stride, column, mask, WIDTH: tl.constexpr):
    """(rows, columns) of a matrix whose columns lie side by side, zeros where there is none."""
    return tl.load(
        ptr + row[:, None] * stride + column[None, :],
        mask=mask[:, None] & (column[None, :] < WIDTH),
        other=0.0,
    )


@triton.jit
def _state(ptr, slot, head, n, p, HEADS: tl.constexpr, N: tl.constexpr, P: tl.constexpr):
    """(N, P) of a head, zeros where the slot is -1."""
    rows = tl.where(slot >= 0, N, 0)
    return tl.load(
        ptr + (slot * HEADS + head) * (N * P) + n[:, None] * P + p[None, :],
        mask=(n[:, None] < rows) & (p[None, :] < P),
        other=0.0,
    )


@triton.jit
def _tile(table_ptr, TILES: tl.constexpr, BLOCK_M: tl.constexpr, BACK: tl.constexpr):
    """Of the program's tile: the chunk's first token, its tokens, the tile's first one, and the slot of its state."""
    row = table_ptr + 4 * (tl.program_id(0) // TILES).to(tl.int64)
    begin = (tl.program_id(0) % TILES) * BLOCK_M
    slot = tl.load(row + (3 if BACK else 2)).to(tl.int64)
    return tl.load(row).to(tl.int64), tl.load(row + 1), begin, slot


@triton.jit
def _decay(high_ptr, low_ptr, base, m, q, length, dtype: tl.constexpr, BACK: tl.constexpr):
    """(M, Q), exp(s[m] - s[q]) for q <= m, on the way back exp(s[q] - s[m]) for m <= q; the rest is 0.

    Masked before exp: on the other side of the diagonal it may be infinite, and infinity times 0 is NaN.
    """
    high_m = tl.load(high_ptr + base + m, mask=m < length, other=0.0)[:, None]
    high_q = tl.load(high_ptr + base + q, mask=q < length, other=0.0)[None, :]
    difference = high_m - high_q
    if dtype == tl.float32:  # narrower operands err by more than `low` holds
        low_m = tl.load(low_ptr + base + m, mask=m < length, other=0.0)[:, None]
        low_q = tl.load(low_ptr + base + q, mask=q < length, other=0.0)[None, :]
        difference += low_m - low_q
    if BACK:
        keep = (m[:, None] <= q[None, :]) & (q[None, :] < length)
        return tl.exp2(tl.where(keep, -difference, float("-inf")))
    keep = (q[None, :] <= m[:, None]) & (m[:, None] < length)
    return tl.exp2(tl.where(keep, difference, float("-inf")))


@triton.jit
def _reach(high_ptr, low_ptr, base, m, length, BACK: tl.constexpr):
    """(M,), the decay between a token and the state that enters its chunk, on the way back the one that leaves it."""
    high = tl.load(high_ptr + base + m, mask=m < length, other=0.0)
    if BACK:
        low = tl.load(low_ptr + base + m, mask=m < length, other=0.0)
        high_last = tl.load(high_ptr + base + length - 1)
        low_last = tl.load(low_ptr + base + length - 1)
        return tl.exp2(tl.where(m < length, (high_last - high) + (low_last - low), float("-inf")))
    return tl.exp2(high)


@triton.jit
def _values_kernel(
    x_ptr,
    own_ptr,
    other_ptr,
    input_ptr,
    skip_ptr,
    step_ptr,
    high_ptr,
    low_ptr,
    states_ptr,
    table_ptr,
    y_ptr,
    steps_ptr,
    skips_ptr,
    tokens,
    stride_xt,
    stride_xh,
    stride_mt,
    stride_mg,
    stride_qt,
    stride_qg,
    stride_it,
    stride_ih,
    HEADS: tl.constexpr,
    REPEAT: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BACK: tl.constexpr,
):
    """Outputs y from x; on the way back dx from dy, with `input` the x itself."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    first, length, begin, slot = _tile(table_ptr, TILES, BLOCK_M, BACK)
    if begin >= length:
        return
    group = tl.program_id(1).to(tl.int64)
    m = begin + tl.arange(0, BLOCK_M)
    q = tl.arange(0, TILES * BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    p = tl.arange(0, BLOCK_P)
    own = _rows(own_ptr + group * stride_mg, first + m, stride_mt, n, m < length, N)
    other = _rows(other_ptr + group * stride_qg, first + q, stride_qt, n, q < length, N)
    scores = dot(own, tl.trans(other), tl.zeros((BLOCK_M, TILES * BLOCK_M), dtype=tl.float32))

    for r in range(REPEAT):
        head = group * REPEAT + r
        base = head * tokens + first
        weights = scores * _decay(high_ptr, low_ptr, base, m, q, length, dtype, BACK)
        if not BACK:
            step = tl.load(step_ptr + base + q, mask=q < length, other=0.0)
            weights *= step[None, :]
        x = _rows(x_ptr + head * stride_xh, first + q, stride_xt, p, q < length, P)
        state = _state(states_ptr, slot, head, n, p, HEADS, N, P)
        y = dot(own, state, tl.zeros((BLOCK_M, BLOCK_P), dtype=tl.float32))
        y *= _reach(high_ptr, low_ptr, base, m, length, BACK)[:, None]
        y = dot(narrow(weights, dtype), x, y)
        x_own = _rows(x_ptr + head * stride_xh, first + m, stride_xt, p, m < length, P)
        x_own = x_own.to(tl.float32)
        if BACK:
            given = _rows(input_ptr + head * stride_ih, first + m, stride_it, p, m < length, P)
            given = given.to(tl.float32)
            tl.store(steps_ptr + base + m, tl.sum(y * given, axis=1), mask=m < length)
            tl.store(skips_ptr + base + m, tl.sum(x_own * given, axis=1), mask=m < length)
            y *= tl.load(step_ptr + base + m, mask=m < length, other=0.0)[:, None]
        y += tl.load(skip_ptr + head).to(tl.float32) * x_own
        tl.store(
            y_ptr + ((first + m)[:, None] * HEADS + head) * P + p[None, :],
            narrow(y, dtype),
            mask=(m[:, None] < length) & (p[None, :] < P),
        )


@triton.jit
def _projections_kernel(
    x_ptr,
    y_ptr,
    own_ptr,
    other_ptr,
    step_ptr,
    high_ptr,
    low_ptr,
    states_ptr,
    table_ptr,
    grad_ptr,
    beyond_ptr,
    reads_ptr,
    writes_ptr,
    tokens,
    stride_xt,
    stride_xh,
    stride_yt,
    stride_yh,
    stride_mt,
    stride_mg,
    stride_qt,
    stride_qg,
    HEADS: tl.constexpr,
    REPEAT: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BACK: tl.constexpr,
):
    """Gradient dc, with y the dy of the tile's tokens and x the inputs; on the way back db, with the two exchanged."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    sums: tl.constexpr = tl.float64 if dtype == tl.float32 else tl.float32
    first, length, begin, slot = _tile(table_ptr, TILES, BLOCK_M, BACK)
    if begin >= length:
        return
    group = tl.program_id(1).to(tl.int64)
    m = begin + tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    p = tl.arange(0, BLOCK_P)
    r = tl.arange(0, BLOCK_R)
    own = _rows(own_ptr + group * stride_mg, first + m, stride_mt, n, m < length, N)

    grad = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for number in range(REPEAT):
        head = group * REPEAT + number
        base = head * tokens + first
        y = _rows(y_ptr + head * stride_yh, first + m, stride_yt, p, m < length, P)
        state = _state(states_ptr, slot, head, n, p, HEADS, N, P)
        reach = _reach(high_ptr, low_ptr, base, m, length, BACK)
        if BACK:
            reach *= tl.load(step_ptr + base + m, mask=m < length, other=0.0)
        read = dot(y, tl.trans(state), tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32))
        read *= reach[:, None]
        grad += read
        beyond = tl.sum(read * own.to(tl.float32), axis=1)
        tl.store(beyond_ptr + base + m, beyond, mask=m < length)

    reads = tl.zeros((BLOCK_M, BLOCK_R), dtype=sums)
    # Unrolled: a loop around this loop crashes Triton 3.9 for sm_100.
    for block in tl.static_range(TILES):
        start = block * BLOCK_M
        if (start >= begin and start < length) if BACK else start <= begin:
            q = start + tl.arange(0, BLOCK_M)
            other = _rows(other_ptr + group * stride_qg, first + q, stride_qt, n, q < length, N)
            if not BACK:
                scores = dot(own, tl.trans(other), tl.zeros((BLOCK_M, BLOCK_M), dtype=tl.float32))
            dscores = tl.zeros((BLOCK_M, BLOCK_M), dtype=tl.float32)
            for number in range(REPEAT):
                head = group * REPEAT + number
                base = head * tokens + first
                y = _rows(y_ptr + head * stride_yh, first + m, stride_yt, p, m < length, P)
                x = _rows(x_ptr + head * stride_xh, first + q, stride_xt, p, q < length, P)
                dm = dot(y, tl.trans(x), tl.zeros((BLOCK_M, BLOCK_M), dtype=tl.float32))
                dm *= _decay(high_ptr, low_ptr, base, m, q, length, dtype, BACK)
                if BACK:
                    dm *= tl.load(step_ptr + base + m, mask=m < length, other=0.0)[:, None]
                else:
                    dm *= tl.load(step_ptr + base + q, mask=q < length, other=0.0)[None, :]
                    # Rows' sums minus columns' sums: of the same numbers, without the diagonal, which cancels.
                    pairs = tl.where(m[:, None] != q[None, :], dm * scores, 0.0).to(sums)
                    by_row = tl.sum(pairs, axis=1)[:, None]
                    reads += tl.where(r[None, :] == number, by_row, 0.0)
                    plane = (head + (begin // BLOCK_M) * HEADS) * tokens + first
                    tl.store(writes_ptr + plane + q, tl.sum(pairs, axis=0), mask=q < length)
                dscores += dm
            nothing = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            grad += dot(narrow(dscores, dtype), other, nothing)

    if not BACK:
        tl.store(
            reads_ptr + (group * REPEAT + r)[None, :] * tokens + (first + m)[:, None],
            reads,
            mask=(m[:, None] < length) & (r[None, :] < REPEAT),
        )
    tl.store(
        grad_ptr + ((first + m)[:, None] * (HEADS // REPEAT) + group) * N + n[None, :],
        narrow(grad, dtype),
        mask=(m[:, None] < length) & (n[None, :] < N),
    )


def _launch(
    kernel: object, chunks: Chunks, x: Tensor, b: Tensor, *args: object, **how: int
) -> None:
    """Launches one of the two on every tile of every chunk and every group."""
    heads, width = x.shape[1:]
    groups, states = b.shape[1:]
    launch(
        kernel,
        (chunks.count * _tiles(chunks), groups),
        *args,
        HEADS=heads,
        REPEAT=heads // groups,
        P=width,
        N=states,
        TILES=_tiles(chunks),
        BLOCK_M=_block_m(chunks),
        BLOCK_N=block_of(states),
        BLOCK_P=block_of(width),
        **how,
        num_warps=8,
        num_stages=2,
    )


def _block_m(chunks: Chunks) -> int:
    return min(BLOCK_M, block_of(chunks.size))


def _tiles(chunks: Chunks) -> int:
    """Of a chunk."""
    return block_of(chunks.size) // _block_m(chunks)


def _strides(*tensors: Tensor) -> list[int]:
    """Of tokens, and of heads or groups."""
    return [s for t in tensors for s in t.stride()[:2]]


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        dt: Tensor,
        a_log: Tensor,
        b: Tensor,
        c: Tensor,
        skip: Tensor,
        bias: Tensor,
        limit: tuple[float, float],
        chunks: Chunks,
    ) -> Tensor:
        decayed = decays(Raw(dt, a_log, bias, limit), chunks)
        states = states_between(x, b, decayed, chunks)
        y = _outputs(x, b, c, skip, decayed, states, chunks)
        ctx.save_for_backward(x, dt, a_log, b, c, skip, bias)
        ctx.limit, ctx.chunks = limit, chunks
        return y

    @staticmethod
    def backward(ctx, dy: Tensor):
        x, dt, a_log, b, c, skip, bias = ctx.saved_tensors
        chunks, dy = ctx.chunks, _side_by_side(dy)
        raw = Raw(dt, a_log, bias, ctx.limit)
        decayed = decays(raw, chunks)
        parts = Parts.empty(decayed.step, _tiles(chunks), _block_m(chunks))
        states = states_between(x, b, decayed, chunks)
        dstates, through = states_backward(dy, c, decayed, chunks, states)
        dc = _projections(x, dy, c, b, decayed, states, chunks, parts, back=False)
        del states
        db = _projections(dy, x, b, c, decayed, dstates, chunks, parts, back=True)
        dx = _dx(x, dy, b, c, skip, decayed, dstates, chunks, parts)
        ddt, da_log, dbias, dskip = decays_backward(raw, chunks, parts, through)
        small = (da_log.to(a_log.dtype), db, dc, dskip.to(skip.dtype), dbias.to(bias.dtype))
        return dx, ddt, *small, None, None


def _outputs(
    x: Tensor, b: Tensor, c: Tensor, skip: Tensor, decayed: Decays, states: Tensor, chunks: Chunks
) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(
        _values_kernel,
        *(chunks, x, b),
        *(x, c, b, x, skip, decayed.step, decayed.high, decayed.low, states, chunks.table),
        *(y, y, y, x.shape[0], *_strides(x, c, b, x)),  # no sums on this way
        BACK=False,
    )
    return y


def _dx(
    x: Tensor,
    dy: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor,
    decayed: Decays,
    dstates: Tensor,
    chunks: Chunks,
    parts: Parts,
) -> Tensor:
    """Gradient of x; fills `parts.steps` and `parts.skips`."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(
        _values_kernel,
        *(chunks, x, b),
        *(dy, b, c, x, skip, decayed.step, decayed.high, decayed.low, dstates, chunks.table),
        *(dx, parts.steps, parts.skips, x.shape[0], *_strides(dy, b, c, x)),
        BACK=True,
    )
    return dx


def _projections(
    x: Tensor,
    y: Tensor,
    own: Tensor,
    other: Tensor,
    decayed: Decays,
    states: Tensor,
    chunks: Chunks,
    parts: Parts,
    back: bool,
) -> Tensor:
    """Gradient of `own`, which is c, or on the way back b; fills the rest of `parts`."""
    grad = torch.empty(own.shape, dtype=own.dtype, device=own.device)
    _launch(
        _projections_kernel,
        *(chunks, x, own),
        *(x, y, own, other, decayed.step, decayed.high, decayed.low, states, chunks.table),
        *(grad, parts.leaves if back else parts.enters, parts.reads, parts.writes),
        *(x.shape[0], *_strides(x, y, own, other)),
        BLOCK_R=triton.next_power_of_2(x.shape[1] // own.shape[1]),
        BACK=back,
    )
    return grad


def _side_by_side(x: Tensor) -> Tensor:
    """X itself where its last dimension is contiguous, else a copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def triton_scan(
    x: Tensor,
    dt: Tensor,
    a_log: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
    packed: Packed,
    chunk_size: int,
) -> Tensor:
    """See `op.ssd_scan`, which checks the shapes; b and c are taken in x's dtype."""
    b, c = (t.to(x.dtype) for t in (b, c))
    x, dt, b, c = (_side_by_side(t) for t in (x, dt, b, c))
    chunks = packed.chunks(min(chunk_size, MOST_CHUNK))
    return _Scan.apply(x, dt, a_log, b, c, skip, dt_bias, dt_limit, chunks)
