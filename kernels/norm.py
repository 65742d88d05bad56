"""RMS norm, and RMS norm by groups of a gated input.

Math: `rms_norm`: y = w * x * r with r = rsqrt(mean(x^2) + eps) over the last dimension. Backward, with
g = dy * w: dx = r * (g - x * r^2 * mean(g * x)), dw = sum_t dy * x * r.
`gated_rms_norm`: u = x * silu(z), then the same within each of G groups of the last dimension; du as above,
dx = du * silu(z), dz = du * x * silu'(z), silu'(z) = s * (1 + z * (1 - s)) with s = sigmoid(z).

Dtypes: arithmetic in float32 (float64 for float64), output rounded once to x's dtype.
Memory: the inputs and r, (T,) or (T, G); u is computed again in the backward pass.
On a GPU: a program has a few rows of one group. In the backward pass as many programs as the chip holds at once walk
the rows, each with its own partial dw in registers; the partial sums are added in one order, so the bits do not vary.
Source: Zhang and Sennrich 2019 (RMS norm); Dao and Gu 2024, section 7 (the gated norm of Mamba-2).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from hymoe.kernels.launch import (
    arithmetic_dtype,
    check_shape,
    launch,
    narrow,
    row_tiles,
    target,
    uses_triton,
)

# Values of one group that a program holds at once (of several rows where a group is smaller), and of those a thread's.
# The backward pass has eight arrays of them alive: with 16 a thread no second block would fit beside the first.
FORWARD = (2048, 16)
BACKWARD = (512, 8)
AHEAD = 8192  # up to this size the backward pass loads a row ahead; a larger one would not fit beside it
# Warps of the backward pass that an SM of any chip holds, without and with a gate; more would be a short second wave.
RESIDENT_WARPS = (32, 20)


def rms_norm_ref(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The specification of `rms_norm`, differentiable by autograd."""
    wide = x.to(arithmetic_dtype(x))
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (weight.to(wide.dtype) * normed).to(x.dtype)


def gated_rms_norm_ref(x: Tensor, z: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    """The specification of `gated_rms_norm`, differentiable by autograd."""
    wide = x.to(arithmetic_dtype(x))
    gated = (wide * functional.silu(z.to(wide.dtype))).unflatten(-1, (groups, -1))
    normed = gated * torch.rsqrt(gated.pow(2).mean(-1, keepdim=True) + eps)
    return (weight.to(wide.dtype) * normed.flatten(-2)).to(x.dtype)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = arithmetic_dtype(x)
        y = torch.empty_like(x)
        r = torch.empty(x.shape[0], 1, dtype=wide, device=x.device)
        for rows in row_tiles(x):
            part = x[rows].to(wide)
            r[rows] = _inverse_rms(part, eps)
            torch.mul(part * r[rows], weight, out=y[rows])
        ctx.save_for_backward(x, weight, r)
        return y

    @staticmethod
    def backward(ctx, dy: Tensor):
        x, weight, r = ctx.saved_tensors
        dx, dw = torch.empty_like(x), torch.zeros_like(weight, dtype=r.dtype)
        for rows in row_tiles(x):
            part = x[rows].to(r.dtype)
            dx[rows], dw_part = _norm_backward(part, dy[rows].to(r.dtype), weight, r[rows])
            dw += dw_part
        return dx, dw.to(weight.dtype), None


class _GatedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, z: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
        wide = arithmetic_dtype(x)
        y = torch.empty_like(x)
        r = torch.empty(x.shape[0], groups, 1, dtype=wide, device=x.device)
        for rows in row_tiles(x):
            gated = functional.silu(z[rows].to(wide)).mul_(x[rows]).unflatten(1, (groups, -1))
            r[rows] = _inverse_rms(gated, eps)
            torch.mul(gated.mul_(r[rows]).flatten(1), weight, out=y[rows])
        ctx.save_for_backward(x, z, weight, r)
        ctx.groups = groups
        return y

    @staticmethod
    def backward(ctx, dy: Tensor):
        x, z, weight, r = ctx.saved_tensors
        split = lambda t: t.unflatten(-1, (ctx.groups, -1))  # noqa: E731
        dx, dz = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (x, z))
        dw = torch.zeros_like(split(weight), dtype=r.dtype)
        for rows in row_tiles(x):
            part, gate_in = x[rows].to(r.dtype), z[rows].to(r.dtype)
            gate = functional.silu(gate_in)
            du, dw_part = _norm_backward(
                split(part * gate), split(dy[rows].to(r.dtype)), split(weight), r[rows]
            )
            du = du.flatten(1)
            dx[rows] = gate.mul_(du)
            dz[rows] = torch.ops.aten.silu_backward(du.mul_(part), gate_in)
            dw += dw_part
        return dx, dz, dw.flatten().to(weight.dtype), None, None


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    """(..., P) -> (..., 1)."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def _norm_backward(x: Tensor, dy: Tensor, weight: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """Dx and dw of y = w * x * r over the last dimension, all in r's dtype."""
    normed = x * r
    dw = dy * normed
    g = dy * weight
    mean = torch.linalg.vecdot(dw, weight.to(r.dtype))[..., None] / x.shape[-1]  # of g * normed
    return g.sub_(normed.mul_(mean)).mul_(r), dw.sum(0)


@triton.jit
def _forward_kernel(
    x_ptr,
    z_ptr,
    weight_ptr,
    y_ptr,
    r_ptr,
    rows,
    x_stride,
    z_stride,
    eps,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK: tl.constexpr,
    GATED: tl.constexpr,
):
    group = tl.program_id(0) % GROUPS
    row = (tl.program_id(0) // GROUPS).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    within = tl.arange(0, BLOCK)[None, :]
    column = group * SIZE + within
    mask = (row < rows) & (within < SIZE)
    u = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    if GATED:
        z = tl.load(z_ptr + row * z_stride + column, mask=mask, other=0.0).to(tl.float32)
        u = u * (z * tl.sigmoid(z))
    r = 1 / tl.sqrt_rn(tl.sum(u * u, axis=1, keep_dims=True) / SIZE + eps)  # (BLOCK_T, 1)
    weight = tl.load(weight_ptr + column, mask=within < SIZE, other=0.0).to(tl.float32)
    y = weight * (u * r)
    tl.store(y_ptr + row * (GROUPS * SIZE) + column, narrow(y, y_ptr.dtype.element_ty), mask=mask)
    tl.store(r_ptr + row * GROUPS + group, r, mask=row < rows)


@triton.jit
def _backward_kernel(
    x_ptr,
    z_ptr,
    weight_ptr,
    r_ptr,
    dy_ptr,
    dx_ptr,
    dz_ptr,
    dweight_ptr,
    rows,
    x_stride,
    z_stride,
    dy_stride,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    GATED: tl.constexpr,
):
    group = tl.program_id(0) % GROUPS
    program = (tl.program_id(0) // GROUPS).to(tl.int64)
    step = tl.num_programs(0) // GROUPS * BLOCK_T
    within = tl.arange(0, BLOCK)[None, :]
    column = group * SIZE + within
    weight = tl.load(weight_ptr + column, mask=within < SIZE, other=0.0).to(tl.float32)
    dweight = tl.zeros((BLOCK_T, BLOCK), dtype=tl.float32)
    for start in tl.range(program * BLOCK_T, rows, step, num_stages=STAGES):
        row = start + tl.arange(0, BLOCK_T).to(tl.int64)[:, None]
        mask = (row < rows) & (within < SIZE)
        x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * dy_stride + column, mask=mask, other=0.0).to(tl.float32)
        r = tl.load(r_ptr + row * GROUPS + group, mask=row < rows, other=0.0)  # (BLOCK_T, 1)
        normed = x * r
        if GATED:
            z = tl.load(z_ptr + row * z_stride + column, mask=mask, other=0.0).to(tl.float32)
            sigmoid = tl.sigmoid(z)
            normed = normed * (z * sigmoid)
        dweight += dy * normed
        g = dy * weight
        mean = tl.sum(g * normed, axis=1, keep_dims=True) / SIZE
        du = r * (g - normed * mean)
        out = row * (GROUPS * SIZE) + column
        if GATED:
            dz = du * x * (sigmoid * (1 + z * (1 - sigmoid)))
            tl.store(dz_ptr + out, narrow(dz, dz_ptr.dtype.element_ty), mask=mask)
            du = du * (z * sigmoid)
        tl.store(dx_ptr + out, narrow(du, dx_ptr.dtype.element_ty), mask=mask)
    dweight = tl.sum(dweight, axis=0, keep_dims=True)
    tl.store(dweight_ptr + program * (GROUPS * SIZE) + column, dweight, mask=within < SIZE)


def _blocks(width: int, groups: int, sizes: tuple[int, int]) -> dict[str, int]:
    """Constexprs and warps of a kernel, for FORWARD or BACKWARD."""
    tile, values = sizes
    size = width // groups
    block = triton.next_power_of_2(size)
    block_t = min(16, max(1, tile // block))
    warps = min(16, max(1, block_t * block // (32 * values)))
    return {"GROUPS": groups, "SIZE": size, "BLOCK_T": block_t, "BLOCK": block, "num_warps": warps}


def _rows_contiguous(x: Tensor) -> Tensor:
    """X itself where only its rows lie apart, else a copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


class _TritonNorm(torch.autograd.Function):
    """Both norms; `z` is None for the one without a gate."""

    @staticmethod
    def forward(ctx, x: Tensor, z: Tensor | None, weight: Tensor, groups: int, eps: float):
        x, z = _rows_contiguous(x), None if z is None else _rows_contiguous(z)
        rows, blocks = x.shape[0], _blocks(x.shape[1], groups, FORWARD)
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        r = torch.empty(rows, groups, dtype=torch.float32, device=x.device)
        gate = x if z is None else z
        launch(
            _forward_kernel,
            (triton.cdiv(rows, blocks["BLOCK_T"]) * groups,),
            *(x, gate, weight, y, r, rows, x.stride(0), gate.stride(0), eps),
            GATED=z is not None,
            **blocks,
        )
        ctx.save_for_backward(x, z, weight, r)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        x, z, weight, r = ctx.saved_tensors
        dy = _rows_contiguous(dy)
        rows, groups = r.shape
        blocks = _blocks(x.shape[1], groups, BACKWARD)
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        dz = None if z is None else torch.empty(z.shape, dtype=z.dtype, device=z.device)
        gate = x if z is None else z
        blocks_per_sm = RESIDENT_WARPS[z is not None] // blocks["num_warps"]
        walkers = max(1, blocks_per_sm * target(x.device).num_sms // groups)  # of each group
        programs = min(triton.cdiv(rows, blocks["BLOCK_T"]), walkers)
        partial = torch.empty(programs, x.shape[1], dtype=torch.float32, device=x.device)
        launch(
            _backward_kernel,
            (programs * groups,),
            *(x, gate, weight, r, dy, dx, dx if dz is None else dz, partial),
            *(rows, x.stride(0), gate.stride(0), dy.stride(0)),
            STAGES=2 if blocks["BLOCK"] <= AHEAD else 1,
            GATED=z is not None,
            **blocks,
        )
        return dx, dz, partial.sum(0).to(weight.dtype), None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float, kernels: str = "auto") -> Tensor:
    """Root-mean-square norm of each row.

    Args:
        x: (T, D) residual stream.
        weight: (D,) any floating dtype.
        eps: added to the mean square.
        kernels: which implementation, see `launch.choose`.

    Returns:
        y: (T, D) in x's dtype.

    Raises:
        ValueError: shapes that do not fit.
    """
    check_shape("rms_norm x", x, (None, None))
    check_shape("rms_norm weight", weight, (x.shape[1],))
    if uses_triton("rms_norm", kernels, x):
        return _TritonNorm.apply(x, None, weight, 1, eps)
    return _RMSNorm.apply(x, weight, eps)


def gated_rms_norm(
    x: Tensor, z: Tensor, weight: Tensor, groups: int, eps: float, kernels: str = "auto"
) -> Tensor:
    """RMS norm within each group of x * silu(z).

    Args:
        x: (T, H*P) output of the scan.
        z: (T, H*P) gate, before its silu.
        weight: (H*P,) any floating dtype.
        groups: G; must divide H*P.
        eps: added to the mean square.
        kernels: which implementation, see `launch.choose`.

    Returns:
        y: (T, H*P) in x's dtype.

    Raises:
        ValueError: shapes that do not fit.
    """
    check_shape("gated_rms_norm x", x, (None, None))
    check_shape("gated_rms_norm weight", weight, (x.shape[1],))
    check_shape("gated_rms_norm z", z, tuple(x.shape))
    if x.shape[1] % groups:
        raise ValueError(f"gated_rms_norm: width {x.shape[1]} does not divide into {groups} groups")
    if uses_triton("gated_rms_norm", kernels, x):
        return _TritonNorm.apply(x, z, weight, groups, eps)
    return _GatedRMSNorm.apply(x, z, weight, groups, eps)
