"""Triton version of the routed experts: six products over ragged rows, all that lies between them in their epilogues.

r is a row of expert e, t its token, w[r] its routing weight:

| launch            | product                        | from its float32 accumulators                          |
|-------------------|--------------------------------|--------------------------------------------------------|
| up                | z[r] = up[e] @ x[t]            | a[r] = relu(z[r])^2                                    |
| down              | down[e] @ a[r]                 | y[r], times w[r]                                       |
| combine           |                                | out[t] = sum of its K rows y                           |
| dgrad_down        | da[r] = down[e]^T @ dout[t]    | dz = 2 sqrt(a) w da, b = w a, dw = <da, a> in parts    |
| wgrad             | sum of outer(dout[t], b[r])    | ddown[e], written                                      |
| wgrad             | sum of outer(dz[r], x[t])      | dup[e], written                                        |
| dgrad_up, combine | dy[r] = up[e]^T @ dz[r]        | dx[t] = sum of its K rows dy                           |

Memory: saved beside inputs and tables is a, (R, F), alone. relu(z) is its root. Rounded to BF16, a is off by up to 2^-9
and its root by half of that, so dz is nearer than from a rounded relu(z), and the down product reads a as it is. A
saved relu(z) would have to be squared on its way into that product, through registers instead of straight from memory
to shared memory, or a written as well. w is not folded into a: from w a, neither a nor dw can be had where w is 0. So
`dgrad_down`, which has a in registers, writes b for ddown: an (R, F) tensor of the real model is 0.36 GB, 0.085 ms of
an H200's memory beneath 1.24 ms of arithmetic. Nothing of (R, D) is saved; y and dy live until they are summed.
dw: a column block's part of <da, a> goes to a workspace, (ceil(F/32), R) float32, summed afterwards: no atomics.
Dtypes, order, ragged edges: `grouped_gemm_triton.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hymoe.kernels import grouped_gemm_triton
from hymoe.kernels.grouped_gemm_triton import Epilogue, Rows, rows_product, weight_gradient
from hymoe.kernels.launch import launch, narrow
from hymoe.kernels.route import Routing

COMBINE_COLUMNS = (
    1024  # of a program with 4 warps: one load of 16 bytes a thread for each of the K rows
)


@triton.jit
def _combine_kernel(
    rows_ptr,  # (R, N)
    inverse_ptr,  # (T, K) int64
    out_ptr,  # (T, N)
    N: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < N
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in tl.static_range(TOP_K):
        row = tl.load(inverse_ptr + token * TOP_K + k)
        total += tl.load(rows_ptr + row * N + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * N + column, narrow(total, out_ptr.dtype.element_ty), mask=mask)


def combine(rows: Tensor, routing: Routing) -> Tensor:
    """(R, N) rows in expert order -> (T, N): each token's sum in float32, its choices in their order."""
    tokens, top_k = routing.inverse.shape
    out = torch.empty(tokens, rows.shape[1], dtype=rows.dtype, device=rows.device)
    block = min(COMBINE_COLUMNS, triton.next_power_of_2(rows.shape[1]))
    launch(
        _combine_kernel,
        (tokens, triton.cdiv(rows.shape[1], block)),
        *(rows, routing.inverse, out),
        N=rows.shape[1],
        TOP_K=top_k,
        BLOCK=block,
        num_warps=4,
    )
    return out


class TritonExpertMLP(torch.autograd.Function):
    """`experts.expert_mlp` on these kernels."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        weights: Tensor,
        up: Tensor,
        down: Tensor,
        routing: Routing,
        is_read: bool,
    ) -> Tensor:
        """(T, D) -> (T, D), see `experts.expert_mlp`."""
        rows, w = Rows.of(routing), weights.float().contiguous()
        act = rows_product("up", x, up, rows, Epilogue("relu2"), gather=True)  # (R, F)
        ctx.save_for_backward(x, weights, up, down, act)
        ctx.routing = routing
        if not is_read:
            return torch.empty_like(x)
        return combine(rows_product("down", act, down, rows, Epilogue("scale", w)), routing)

    @staticmethod
    def backward(ctx, dout: Tensor):
        """Gradients of x, weights, up and down."""
        x, weights, up, down, act = ctx.saved_tensors
        needs_x, _, needs_up, needs_down, *_ = ctx.needs_input_grad
        rows = Rows.of(ctx.routing)
        parts = act.new_empty(
            triton.cdiv(act.shape[1], grouped_gemm_triton.EPILOGUE_COLUMNS),
            rows.number,
            dtype=torch.float32,
        )
        scaled = torch.empty_like(act) if needs_down else None
        epilogue = Epilogue("backward", weights.float().contiguous(), act, scaled, parts)
        dz = rows_product(
            "dgrad_down", dout, down, rows, epilogue, gather=True, transposed=True
        )  # (R, F)
        dw = parts.sum(0).index_select(0, ctx.routing.inverse.flatten())
        dweights = dw.view(weights.shape).to(weights.dtype)
        dx = dup = ddown = None
        if needs_down:
            ddown = torch.empty(down.shape, dtype=down.dtype, device=down.device)
            weight_gradient(dout, scaled, rows, ddown, gather="a")
        del scaled, epilogue  # of an (R, F) tensor's size, before the (R, D) rows below
        if needs_up:
            dup = torch.empty(up.shape, dtype=up.dtype, device=up.device)
            weight_gradient(dz, x, rows, dup, gather="b")
        if needs_x:
            dx = combine(rows_product("dgrad_up", dz, up, rows, transposed=True), ctx.routing)
        return dx, dweights, dup, ddown, None, None
