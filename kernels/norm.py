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

from hymoe.kernels.launch import arithmetic_dtype, check_shape


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
        wide = x.to(arithmetic_dtype(x))
        r = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True).add_(eps))  # (T, 1)
        ctx.save_for_backward(x, weight, r)
        return (wide * r).mul_(weight.to(wide.dtype)).to(x.dtype)

    @staticmethod
    def backward(ctx, dy: Tensor):
        x, weight, r = ctx.saved_tensors
        dx, dw = _norm_backward(x.to(r.dtype), dy.to(r.dtype), weight, r)
        return dx.to(x.dtype), dw.to(weight.dtype), None


class _GatedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, z: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
        wide = x.to(arithmetic_dtype(x))
        gated = (wide * functional.silu(z.to(wide.dtype))).unflatten(-1, (groups, -1))  # (T, G, P)
        r = torch.rsqrt(gated.pow(2).mean(-1, keepdim=True).add_(eps))  # (T, G, 1)
        ctx.save_for_backward(x, z, weight, r)
        ctx.groups = groups
        return gated.mul_(r).flatten(-2).mul_(weight.to(wide.dtype)).to(x.dtype)

    @staticmethod
    def backward(ctx, dy: Tensor):
        x, z, weight, r = ctx.saved_tensors
        split = lambda t: t.unflatten(-1, (ctx.groups, -1))  # noqa: E731
        wide, wide_z = x.to(r.dtype), z.to(r.dtype)
        s = torch.sigmoid(wide_z)
        gate = wide_z * s
        du, dw = _norm_backward(split(wide * gate), split(dy.to(r.dtype)), split(weight), r)
        du = du.flatten(-2)
        dz = (1 - s).mul_(wide_z).add_(1).mul_(s).mul_(wide).mul_(du)
        return du.mul_(gate).to(x.dtype), dz.to(z.dtype), dw.flatten().to(weight.dtype), None, None


def _norm_backward(x: Tensor, dy: Tensor, weight: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """Dx and dw of y = w * x * r over the last dimension, all in r's dtype."""
    normed = x * r
    dw = (dy * normed).sum(0)
    g = dy * weight.to(r.dtype)
    dx = g.sub_(normed * (g * normed).mean(-1, keepdim=True)).mul_(r)
    return dx, dw


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
