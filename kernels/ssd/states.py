"""The states between the chunks of a document and their gradients, each in one walk along the document.

Math, one head, chunk k of a document with s as in `decay.py`: the state behind it is
    E[k+1] = exp(s[last]) E[k] + sum_t exp(s[last] - s[t]) step[t] b[t] outer x[t],   E[0] = 0,
and the gradient of the state before it
    D[k] = exp(s[last]) D[k+1] + sum_t exp(s[t]) c[t] outer dy[t],   D[number of chunks] = 0.
One kernel does both: the second walks back. A program holds a tile of one head's state in registers, in float32, from
the document's first chunk to its last; the states go out once, as the operands that the other kernels want. What a
chunk adds never exists in memory, and there is no pass for the recurrence.
The way back leaves the gradient of s[last] through exp(s[last]), too: exp(s[last]) * sum(E[k] * D[k+1]).

Shapes: states (slots, H, N, P); a slot is numbered by `packed.Chunks`. Dtypes: operands in x's dtype, sums in float32.
Bytes at T = 16384, Q = 128, H = 64, P = 64, N = 128, G = 8, one document: x 0.134 GB (twice through L2) and b 0.034 GB
(16 times through L2) in, states 0.133 GB out: 0.30 GB, 0.070 ms of 4.3 TB/s; back 0.44 GB, 0.10 ms. Chunk states in
float32 with a pass of their own move 0.84 GB. 17 GFLOP, 0.02 ms. The price is a chain of T/Q products: 127 in a row of
one document, on 256 programs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hymoe.kernels.launch import dot, launch, narrow
from hymoe.kernels.packed import Chunks
from hymoe.kernels.ssd.decay import Decays, block_of

BLOCK_N, BLOCK_P = (
    64,
    32,
)  # of the state a program: 256 programs of one document at H = 64, P = 64, N = 128


@triton.jit
def _states_kernel(
    x_ptr,
    b_ptr,
    step_ptr,
    high_ptr,
    low_ptr,
    long_ptr,
    states_ptr,
    out_ptr,
    through_ptr,
    tokens,
    stride_xt,
    stride_xh,
    stride_bt,
    stride_bg,
    HEADS: tl.constexpr,
    REPEAT: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    Q: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BACK: tl.constexpr,
):
    """One document, one head, one tile; on the way back x is dy, b is c, and `states` the states themselves."""
    tiles_p: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    tiles: tl.constexpr = tiles_p * ((N + BLOCK_N - 1) // BLOCK_N)
    tile = tl.program_id(0) % tiles
    head = ((tl.program_id(0) // tiles) % HEADS).to(tl.int64)
    document = (tl.program_id(0) // (tiles * HEADS)).to(tl.int64)
    begin = tl.load(long_ptr + 3 * document).to(tl.int64)
    length = tl.load(long_ptr + 3 * document + 1)
    slot = tl.load(long_ptr + 3 * document + 2).to(tl.int64)
    t = tl.arange(0, BLOCK_Q)
    n = (tile // tiles_p) * BLOCK_N + tl.arange(0, BLOCK_N)
    p = (tile % tiles_p) * BLOCK_P + tl.arange(0, BLOCK_P)
    at = n[:, None] * P + p[None, :]  # (N, P)
    inside = (n[:, None] < N) & (p[None, :] < P)

    acc = tl.zeros((BLOCK_N, BLOCK_P), dtype=tl.float32)
    count = (length - 1) // Q  # states between chunks
    for k in range(count):
        chunk = count - k if BACK else k
        first = begin + chunk * Q
        row = first + t
        mask = (t < Q) & (t < length - chunk * Q)
        last = first + tl.minimum(Q, length - chunk * Q) - 1
        high = tl.load(high_ptr + head * tokens + row, mask=mask, other=0.0)
        high_last = tl.load(high_ptr + head * tokens + last)
        through = tl.exp2(high_last)
        if BACK:
            weight = tl.exp2(high)
            out = (slot + chunk - 1) * HEADS + head
            state = tl.load(states_ptr + out * (N * P) + at, mask=inside, other=0.0)
            share = tl.sum(tl.sum(acc * state.to(tl.float32), axis=1), axis=0) * through
            tl.store(through_ptr + ((slot + chunk - 1) * tiles + tile) * HEADS + head, share)
        else:
            low = tl.load(low_ptr + head * tokens + row, mask=mask, other=0.0)
            low_last = tl.load(low_ptr + head * tokens + last)
            step = tl.load(step_ptr + head * tokens + row, mask=mask, other=0.0)
            weight = step * tl.exp2((high_last - high) + (low_last - low))
            out = (slot + chunk) * HEADS + head
        x = tl.load(
            x_ptr + row[:, None] * stride_xt + head * stride_xh + p[None, :],
            mask=mask[:, None] & (p[None, :] < P),
            other=0.0,
        )
        b = tl.load(
            b_ptr + row[:, None] * stride_bt + (head // REPEAT) * stride_bg + n[None, :],
            mask=mask[:, None] & (n[None, :] < N),
            other=0.0,
        )
        weight = tl.where(mask, weight, 0.0)
        weighted = narrow(x.to(tl.float32) * weight[:, None], x_ptr.dtype.element_ty)
        acc = dot(tl.trans(b), weighted, acc * through)
        tl.store(out_ptr + out * (N * P) + at, narrow(acc, out_ptr.dtype.element_ty), mask=inside)


def _walk(
    x: Tensor, b: Tensor, decays: Decays, chunks: Chunks, states: Tensor | None
) -> tuple[Tensor, Tensor]:
    tokens, heads, width = x.shape
    groups, size = b.shape[1:]
    block_n, block_p = min(BLOCK_N, block_of(size)), min(BLOCK_P, block_of(width))
    tiles = triton.cdiv(size, block_n) * triton.cdiv(width, block_p)
    out = torch.empty(chunks.slots, heads, size, width, dtype=x.dtype, device=x.device)
    through = torch.empty(chunks.slots, tiles, heads, dtype=torch.float32, device=x.device)
    launch(
        _states_kernel,
        (chunks.long.shape[0] * heads * tiles,),
        *(x, b, decays.step, decays.high, decays.low, chunks.long),
        *(out if states is None else states, out, through, tokens),
        *(x.stride(0), x.stride(1), b.stride(0), b.stride(1)),
        HEADS=heads,
        REPEAT=heads // groups,
        P=width,
        N=size,
        Q=chunks.size,
        BLOCK_Q=block_of(chunks.size),
        BLOCK_N=block_n,
        BLOCK_P=block_p,
        BACK=states is not None,
        num_warps=4,
        num_stages=3,
    )
    return out, through


def states_between(x: Tensor, b: Tensor, decays: Decays, chunks: Chunks) -> Tensor:
    """The states that enter chunks, (slots, H, N, P) in x's dtype; x (T, H, P), b (T, G, N)."""
    return _walk(x, b, decays, chunks, None)[0]


def states_backward(
    dy: Tensor, c: Tensor, decays: Decays, chunks: Chunks, states: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of those states, in dy's dtype, and of s at the end of the chunks they enter, (slots, tiles, H)."""
    return _walk(dy, c, decays, chunks, states)
