"""Linear layers and the plain MLP; the shared expert of a mixture is one too."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from hymoe.kernels.relu2 import relu2
from hymoe.model.config import HybridConfig


class Linear(nn.Module):
    """y = x @ weight^T + bias, with parameters that nobody initialises but `HybridLM.init_weights` or a checkpoint."""

    def __init__(self, inputs: int, outputs: int, bias: bool, dtype: torch.dtype) -> None:
        """Allocates (outputs, inputs) and, where asked for, (outputs,)."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(outputs, dtype=dtype)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """(T, inputs) -> (T, outputs)."""
        return functional.linear(x, self.weight, self.bias)


class MLP(nn.Module):
    """down(relu(up(x))^2)."""

    def __init__(
        self,
        config: HybridConfig,
        intermediate_size: int,
        dtype: torch.dtype,
        kernels: str = "auto",
    ) -> None:
        """`intermediate_size` is the shared expert's or the layer's own."""
        super().__init__()
        self.kernels = kernels
        self.up_proj = Linear(config.hidden_size, intermediate_size, config.mlp_bias, dtype)
        self.down_proj = Linear(intermediate_size, config.hidden_size, config.mlp_bias, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(T, D) -> (T, D)."""
        return self.down_proj(self.inner(x))

    def inner(self, x: Tensor) -> Tensor:
        """(T, D) -> (T, F), what the down product takes."""
        return relu2(self.up_proj(x), self.kernels)
