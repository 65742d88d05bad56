"""Grouped-query attention without positional encoding: the Mamba layers carry the order."""

import torch
from torch import Tensor, nn

from hymoe.kernels.attention import varlen_attention
from hymoe.kernels.packed import Packed
from hymoe.model.config import HybridConfig
from hymoe.model.mlp import Linear


class Attention(nn.Module):
    """Causal attention within each document; `rope_theta` in a config is not used by this family."""

    def __init__(self, config: HybridConfig, dtype: torch.dtype, kernels: str = "auto") -> None:
        """Heads are `head_dim` wide whatever D / H is."""
        super().__init__()
        self.head_dim, self.kernels = config.head_dim, kernels
        width, bias = config.hidden_size, config.attention_bias
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.q_proj = Linear(width, queries, bias, dtype)
        self.k_proj = Linear(width, keys, bias, dtype)
        self.v_proj = Linear(width, keys, bias, dtype)
        self.o_proj = Linear(queries, width, bias, dtype)

    def forward(self, x: Tensor, packed: Packed) -> Tensor:
        """(T, D) -> (T, D)."""
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim))
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        # q (T, H, P), k and v (T, G, P)
        return self.o_proj(varlen_attention(q, k, v, packed, self.kernels).flatten(1))
