"""Embedding whose gradient is summed in float32 and rounded once: a common word comes thousands of times in a step.

Torch's own sums in the gradient's dtype, so that in BF16 a sum stops growing when it is 256 times what is added.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from hymoe.kernels.launch import arithmetic_dtype


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.words = weight.shape[0]
        return functional.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout: Tensor):
        (ids,) = ctx.saved_tensors
        wide = dout.to(arithmetic_dtype(dout))
        dweight = torch.ops.aten.embedding_dense_backward(wide, ids, ctx.words, -1, False)
        return None, dweight.to(dout.dtype)


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """Rows of `weight` (V, D) for ids (T,) int64 -> (T, D)."""
    return _Embedding.apply(ids, weight)
