"""Several rows of a step through one block: its weights are read once, and their gradients leave it once.

Under FSDP a block's weights are gathered for the forward pass and again for the backward pass, and its gradients are
reduced when the block's backward pass ends. If all rows of a step pass a block before the next one begins, that happens
once a step and not once a row.

A weight's gradient is then a sum over rows. Autograd would make it in the weight's dtype, rounding BF16 to nearest for
every row. So each row gets a *tap* of the weight: the same memory under another name, whose backward pass adds the
row's gradient to a float32 sum; the last row to come hands the sum on, rounded once. A tap is made when its row begins:
autograd works backwards in the order of making, so a row's gradients are in the sum before another row's begin, and no
more than one float32 sum of a block and one row's gradients are alive.

Float32 weights need no tap: autograd's own sum is as good.
"""

import torch
from torch import Tensor, nn

from hymoe.kernels.launch import arithmetic_dtype


class _Sum:
    """The gradient of one weight over `rows` rows."""

    def __init__(self, rows: int) -> None:
        self._rows, self._added = rows, 0
        self._total: Tensor | None = None

    def add(self, dweight: Tensor) -> Tensor | None:
        """The whole sum from the last row, in the gradient's dtype; None from the others."""
        if self._total is None:
            self._total = dweight.to(torch.float32)
        else:
            self._total += dweight
        self._added += 1
        if self._added < self._rows:
            return None
        total, self._total, self._added = self._total, None, 0
        return total.to(dweight.dtype)


class _Tap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight: Tensor, total: _Sum) -> Tensor:
        ctx.total = total
        return weight.detach()

    @staticmethod
    def backward(ctx, dweight: Tensor):
        return ctx.total.add(dweight), None


class WeightTaps:
    """Hands out a module's weights to the rows of one forward pass."""

    def __init__(self, module: nn.Module, rows: int) -> None:
        """`rows` is how many times `for_row` will be called."""
        self._weights: list[tuple[str, Tensor, _Sum]] = []
        if rows > 1 and torch.is_grad_enabled():
            self._weights = [
                (name, weight, _Sum(rows))
                for name, weight in module.named_parameters()
                if weight.requires_grad and weight.dtype != arithmetic_dtype(weight)
            ]

    def for_row(self) -> dict[str, Tensor]:
        """Name -> what stands in for the weight in the row that begins now."""
        return {name: _Tap.apply(weight, total) for name, weight, total in self._weights}
