"""Squared ReLU.

Math: y = max(x, 0)^2; dx = 2 max(x, 0) dy, where max(x, 0) = sqrt(y).
Dtypes: arithmetic in float32, one rounding to x's dtype; float64 stays float64.
Memory: y alone, which the product after it keeps in any case. The root of a rounded square, rounded, is the number that
was squared, bit for bit (Boldo 2015), unless the square is subnormal: below 1e-19, in float16 below 2^-7.
Source: So et al. 2021 (Primer).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from hymoe.kernels.launch import launch, narrow, uses_triton

BLOCK = 2048  # 16 values a thread: two loads of 16 bytes in a 16-bit dtype


def relu2_ref(x: Tensor) -> Tensor:
    """The specification of `relu2`, differentiable by autograd."""
    return torch.relu(x).square()


@triton.jit
def _forward_kernel(x_ptr, y_ptr, size, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < size).to(tl.float32)
    relu = tl.where(x <= 0, 0.0, x)  # a NaN stays one
    tl.store(y_ptr + i, narrow(relu * relu, y_ptr.dtype.element_ty), mask=i < size)


@triton.jit
def _backward_kernel(y_ptr, dy_ptr, dx_ptr, size, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(y_ptr + i, mask=i < size).to(tl.float32)
    dy = tl.load(dy_ptr + i, mask=i < size).to(tl.float32)
    relu = narrow(tl.sqrt_rn(y), y_ptr.dtype.element_ty).to(tl.float32)
    tl.store(dx_ptr + i, narrow(2 * relu * dy, dx_ptr.dtype.element_ty), mask=i < size)


class _TritonReLU2(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        x = x.contiguous()
        y = torch.empty_like(x)
        ctx.save_for_backward(y)
        launch(_forward_kernel, (triton.cdiv(x.numel(), BLOCK),), x, y, x.numel(), BLOCK=BLOCK)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        dy, dx, grid = dy.contiguous(), torch.empty_like(y), (triton.cdiv(y.numel(), BLOCK),)
        launch(_backward_kernel, grid, y, dy, dx, y.numel(), BLOCK=BLOCK)
        return dx


class _ReLU2(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        y = torch.relu(x).square_()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return torch.sqrt(y).mul_(dy).mul_(2)


def relu2(x: Tensor, kernels: str = "auto") -> Tensor:
    """Squared ReLU.

    Args:
        x: any shape, any floating dtype.
        kernels: which implementation, see `launch.choose`.

    Returns:
        y: of x's shape and dtype.
    """
    return (_TritonReLU2 if uses_triton("relu2", kernels, x) else _ReLU2).apply(x)
