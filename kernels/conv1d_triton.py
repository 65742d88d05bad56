"""The Triton kernels of `conv1d.py`.

A program walks down a part of the rows with the rows before, the unfinished sums and the next four rows in registers,
so that memory is read once: a tile would read each row once a tap, and compute each SiLU once a tap going back.
At a document's start nothing is compared: what is kept of the rows before becomes zeros, and going back the rows
before are finished. Each program adds up its own dweight and dbias; their sums are added in one order, so the bits
do not vary.
Bound by memory, not far from being bound by instructions (of 4 an SM and clock): 19 an element forward, about 35 back.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hymoe.kernels.launch import launch, narrow, target
from hymoe.kernels.packed import Packed

MAX_TAPS = 4  # of the Triton kernels: each is a set of registers with a name
BLOCK_C = 512
LEAST_PART = 16  # rows of a program; the backward pass reads six more
# Warps an SM: one wave of as many as their registers allow, each thread with four rows under way from memory.
FORWARD_WARPS = 16  # of 128 registers a thread, which reads 16 bytes of a row
BACKWARD_WARPS = 12  # of up to 168


@triton.jit
def _row(x_ptr, t, is_wanted, stride, c, channels):
    """Row t as it lies in memory; zeros, and nothing is read, where it is not wanted."""
    mask = c < tl.where(is_wanted, channels, 0)
    return tl.load(x_ptr + tl.cast(t, tl.int64) * stride + c, mask=mask, other=0.0)


@triton.jit
def _document(id_ptr, t, rows):
    """The document of row t; -1 outside of the T rows."""
    return tl.load(id_ptr + t, mask=(t >= 0) & (t < rows), other=-1)


@triton.jit
def _before(x_ptr, id_ptr, start, rows, stride, c, channels):
    """The three rows before `start`, nearest first, zeros where of another document than the nearest; and that one."""
    document = _document(id_ptr, start - 1, rows)
    is_second = (start > 1) & (_document(id_ptr, start - 2, rows) == document)
    is_third = (start > 2) & (_document(id_ptr, start - 3, rows) == document)
    x1 = _row(x_ptr, start - 1, start > 0, stride, c, channels).to(tl.float32)
    x2 = _row(x_ptr, start - 2, is_second, stride, c, channels).to(tl.float32)
    x3 = _row(x_ptr, start - 3, is_third, stride, c, channels).to(tl.float32)
    return x1, x2, x3, document


@triton.jit
def _four_rows(x_ptr, start, stop, stride, c, channels):
    """Rows start..start+3, zeros from `stop` on."""
    x0 = _row(x_ptr, start, start < stop, stride, c, channels)
    x1 = _row(x_ptr, start + 1, start + 1 < stop, stride, c, channels)
    x2 = _row(x_ptr, start + 2, start + 2 < stop, stride, c, channels)
    x3 = _row(x_ptr, start + 3, start + 3 < stop, stride, c, channels)
    return x0, x1, x2, x3


@triton.jit
def _weights(weight_ptr, bias_ptr, c, channels, TAPS: tl.constexpr, HAS_BIAS: tl.constexpr):
    """The weights of the token itself and of those 1, 2, 3 before it, zeros where there is no such tap; the bias."""
    last = weight_ptr + c * TAPS + (TAPS - 1)
    mask = c < channels
    zero = tl.zeros(c.shape, dtype=tl.float32)
    w0 = tl.load(last, mask=mask, other=0.0).to(tl.float32)
    w1, w2, w3, bias = zero, zero, zero, zero
    if TAPS > 1:
        w1 = tl.load(last - 1, mask=mask, other=0.0).to(tl.float32)
    if TAPS > 2:
        w2 = tl.load(last - 2, mask=mask, other=0.0).to(tl.float32)
    if TAPS > 3:
        w3 = tl.load(last - 3, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + c, mask=mask, other=0.0).to(tl.float32)
    return w0, w1, w2, w3, bias


@triton.jit
def _convolve_row(x, x1, x2, x3, w0, w1, w2, w3, bias, TAPS: tl.constexpr):
    """The convolution before SiLU; what has no tap is left out, for it may be infinite."""
    pre = bias + w0 * x
    if TAPS > 1:
        pre += w1 * x1
    if TAPS > 2:
        pre += w2 * x2
    if TAPS > 3:
        pre += w3 * x3
    return pre


@triton.jit
def _sigmoid(x):
    """Five instructions where a division would take eleven; rsqrt(1 + inf) is 0."""
    root = tl.rsqrt(1 + tl.exp2(x * -1.4426950408889634))
    return root * root


@triton.jit
def _store_row(y_ptr, y, t, is_wanted, c, channels):
    mask = c < tl.where(is_wanted, channels, 0)
    at = y_ptr + tl.cast(t, tl.int64) * channels + c
    tl.store(at, narrow(y, y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _forward_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    id_ptr,
    y_ptr,
    rows,
    channels,
    part,
    x_stride,
    TAPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    blocks = tl.cdiv(channels, BLOCK_C)
    start = tl.program_id(0) // blocks * part
    stop = min(start + part, rows)
    c = tl.program_id(0) % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    w0, w1, w2, w3, bias = _weights(weight_ptr, bias_ptr, c, channels, TAPS, HAS_BIAS)
    # Of the rows 1, 2, 3 before row t, zeros where of another document; and rows t to t+3, on their way from memory.
    x1, x2, x3, before = _before(x_ptr, id_ptr, start, rows, x_stride, c, channels)
    n0, n1, n2, n3 = _four_rows(x_ptr, start, stop, x_stride, c, channels)
    zero = tl.zeros((BLOCK_C,), dtype=tl.float32)
    for t in tl.range(start, stop, loop_unroll_factor=4):
        x = n0.to(tl.float32)
        n0, n1, n2 = n1, n2, n3
        n3 = _row(x_ptr, t + 4, t + 4 < stop, x_stride, c, channels)
        document = _document(id_ptr, t, rows)
        if document != before:
            x1, x2, x3 = zero, zero, zero
        before = document
        pre = _convolve_row(x, x1, x2, x3, w0, w1, w2, w3, bias, TAPS)
        _store_row(y_ptr, pre * _sigmoid(pre), t, True, c, channels)
        x3, x2, x1 = x2, x1, x


@triton.jit
def _backward_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    id_ptr,
    dy_ptr,
    dx_ptr,
    sums_ptr,
    rows,
    channels,
    part,
    x_stride,
    dy_stride,
    TAPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    blocks = tl.cdiv(channels, BLOCK_C)
    program = tl.program_id(0) // blocks
    start = program * part
    stop = min(start + part, rows)
    end = min(stop + 3, rows)  # three rows more than its own give them their last terms
    c = tl.program_id(0) % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    w0, w1, w2, w3, bias = _weights(weight_ptr, bias_ptr, c, channels, TAPS, HAS_BIAS)
    x1, x2, x3, before = _before(x_ptr, id_ptr, start, rows, x_stride, c, channels)
    n0, n1, n2, n3 = _four_rows(x_ptr, start, end, x_stride, c, channels)
    dn0, dn1, dn2, dn3 = _four_rows(dy_ptr, start, end, dy_stride, c, channels)
    zero = tl.zeros((BLOCK_C,), dtype=tl.float32)
    dx1, dx2, dx3 = zero, zero, zero  # of the rows 1, 2, 3 before row t, as far as they are known
    first = start  # the first row whose dx is not written yet
    dw0, dw1, dw2, dw3, dbias = zero, zero, zero, zero, zero
    for t in tl.range(start, stop + 3, loop_unroll_factor=4):
        x = n0.to(tl.float32)
        n0, n1, n2 = n1, n2, n3
        n3 = _row(x_ptr, t + 4, t + 4 < end, x_stride, c, channels)
        dy = dn0.to(tl.float32)
        dn0, dn1, dn2 = dn1, dn2, dn3
        dn3 = _row(dy_ptr, t + 4, t + 4 < end, dy_stride, c, channels)
        if t == stop:  # what follows is in the next program's sums
            out = sums_ptr + tl.cast(program, tl.int64) * ((TAPS + 1) * channels) + c
            mask = c < channels
            tl.store(out + (TAPS - 1) * channels, dw0, mask=mask)
            if TAPS > 1:
                tl.store(out + (TAPS - 2) * channels, dw1, mask=mask)
            if TAPS > 2:
                tl.store(out + (TAPS - 3) * channels, dw2, mask=mask)
            if TAPS > 3:
                tl.store(out + (TAPS - 4) * channels, dw3, mask=mask)
            tl.store(out + TAPS * channels, dbias, mask=mask)
        document = _document(id_ptr, t, rows)
        if document != before:  # nothing passes: the rows before are finished
            _store_row(dx_ptr, dx1, t - 1, (t - 1 >= first) & (t - 1 < stop), c, channels)
            _store_row(dx_ptr, dx2, t - 2, (t - 2 >= first) & (t - 2 < stop), c, channels)
            _store_row(dx_ptr, dx3, t - 3, t - 3 >= first, c, channels)
            first = t
            x1, x2, x3 = zero, zero, zero
        before = document
        pre = _convolve_row(x, x1, x2, x3, w0, w1, w2, w3, bias, TAPS)
        sigmoid = _sigmoid(pre)
        dpre = dy * (sigmoid * (1 + pre * (1 - sigmoid)))
        if TAPS > 1:
            dx1 += w1 * dpre
        if TAPS > 2:
            dx2 += w2 * dpre
        if TAPS > 3:
            dx3 += w3 * dpre
        _store_row(dx_ptr, dx3, t - 3, t - 3 >= first, c, channels)
        dbias += dpre
        dw0 += dpre * x
        dw1 += dpre * x1
        dw2 += dpre * x2
        dw3 += dpre * x3
        dx3, dx2, dx1 = dx2, dx1, w0 * dpre
        x3, x2, x1 = x2, x1, x


def _rows_contiguous(x: Tensor) -> Tensor:
    """X itself where only its rows lie apart, else a copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _parts(x: Tensor, programs_per_sm: int) -> tuple[int, int, int]:
    """Rows of a program, programs along the rows, programs along the channels."""
    rows, channels = x.shape
    blocks = triton.cdiv(channels, BLOCK_C)
    wanted = max(1, programs_per_sm * target(x.device).num_sms // blocks)
    part = max(LEAST_PART, triton.cdiv(rows, wanted))
    return part, triton.cdiv(rows, part), blocks


class TritonConv1d(torch.autograd.Function):
    """`causal_conv1d` on the Triton kernels."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, packed: Packed) -> Tensor:
        """(T, C) -> (T, C), see `conv1d.causal_conv1d`."""
        x, weight = _rows_contiguous(x), weight.contiguous()
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        warps = x.element_size()  # 16 bytes a thread
        part, programs, blocks = _parts(x, FORWARD_WARPS // warps)
        launch(
            _forward_kernel,
            (programs * blocks,),
            *(x, weight, weight if bias is None else bias, packed.seq_idx, y),
            *(*x.shape, part, x.stride(0)),
            TAPS=weight.shape[1],
            HAS_BIAS=bias is not None,
            BLOCK_C=BLOCK_C,
            num_warps=warps,
            maxnreg=65_536 // (32 * FORWARD_WARPS),
        )
        ctx.save_for_backward(x, weight, bias)
        ctx.packed = packed
        return y

    @staticmethod
    def backward(ctx, dy: Tensor):
        """Gradients of x, weight and bias."""
        x, weight, bias = ctx.saved_tensors
        dy = _rows_contiguous(dy)
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        warps = 4
        part, programs, blocks = _parts(x, BACKWARD_WARPS // warps)
        taps = weight.shape[1]
        sums = torch.empty(programs, taps + 1, x.shape[1], dtype=torch.float32, device=x.device)
        launch(
            _backward_kernel,
            (programs * blocks,),
            *(x, weight, weight if bias is None else bias, ctx.packed.seq_idx, dy, dx, sums),
            *(*x.shape, part, x.stride(0), dy.stride(0)),
            TAPS=taps,
            HAS_BIAS=bias is not None,
            BLOCK_C=BLOCK_C,
            num_warps=warps,
        )
        total = sums.sum(0)  # (W+1, C)
        dweight = total[:taps].T.to(weight.dtype).contiguous()
        return dx, dweight, None if bias is None else total[taps].to(bias.dtype), None
