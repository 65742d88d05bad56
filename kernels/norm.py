"""RMS norm, and RMS norm by groups of a gated input.

Math: `rms_norm`: y = w * x * r with r = rsqrt(mean(x^2) + eps) over the last dimension. Backward, with
g = dy * w: dx = r * (g - x * r^2 * mean(g * x)), dw = sum_t dy * x * r.
`gated_rms_norm`: u = x * silu(z), then the same within each of G groups of the last dimension; du as above,
dx = du * silu(z), dz = du * x * silu'(z), silu'(z) = s * (1 + z * (1 - s)) with s = sigmoid(z).

Dtypes: arithmetic in float32 (float64 for float64), output rounded once to x's dtype.
Memory: the inputs and r, (T,) or (T, G); u is computed again in the backward pass.
Source: Zhang and Sennrich 2019 (RMS norm); Dao and Gu 2024, section 7 (the gated norm of Mamba-2).
"""

import torch
from torch import Tensor
from torch.nn import functional

from hymoe.kernels.launch import arithmetic_dtype, check_shape, row_tiles


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


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm of each row.

    Args:
        x: (T, D) residual stream.
        weight: (D,) any floating dtype.
        eps: added to the mean square.

    Returns:
        y: (T, D) in x's dtype.

    Raises:
        ValueError: the weight is not (D,).
    """
    check_shape("rms_norm weight", weight, (x.shape[-1],))
    return _RMSNorm.apply(x, weight, eps)


def gated_rms_norm(x: Tensor, z: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    """RMS norm within each group of x * silu(z).

    Args:
        x: (T, H*P) output of the scan.
        z: (T, H*P) gate, before its silu.
        weight: (H*P,) any floating dtype.
        groups: G; must divide H*P.
        eps: added to the mean square.

    Returns:
        y: (T, H*P) in x's dtype.

    Raises:
        ValueError: shapes that do not fit.
    """
    check_shape("gated_rms_norm weight", weight, (x.shape[-1],))
    check_shape("gated_rms_norm z", z, tuple(x.shape))
    if x.shape[-1] % groups:
        raise ValueError(
            f"gated_rms_norm: width {x.shape[-1]} does not divide into {groups} groups"
        )
    return _GatedRMSNorm.apply(x, z, weight, groups, eps)
