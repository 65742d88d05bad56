"""Grouped-query attention without positional encoding: the Mamba layers carry the order."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from hymoe.kernels.attention import varlen_attention
from hymoe.kernels.packed import Packed
from hymoe.model.cache import AttentionState
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

    def forward(
        self, x: Tensor, packed: Packed | None, state: AttentionState | None = None
    ) -> Tensor:
        """(T, D) -> (T, D).

        Args:
            x: (T, D) normed residual stream.
            packed: boundaries of the documents in the T tokens; None: one more token of each sequence of `state`.
            state: gets keys and values, where decoding comes next.
        """
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim))
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        # q (T, H, P), k and v (T, G, P)
        if packed is None:
            return self.o_proj(_attend(q, *state.append(k, v)).flatten(1))
        if state is not None:
            state.fill(k, v, packed)
        return self.o_proj(varlen_attention(q, k, v, packed, self.kernels).flatten(1))


def _attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """One token's queries (S, H, P) over keys and values (S, G, L, P) -> (S, H, P).

    The heads of a group ask the same keys, so they stand where a longer query's tokens would: nothing is repeated.
    """
    grouped = q.unflatten(1, (keys.shape[1], -1))  # (S, G, H/G, P)
    out = functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
    return out.flatten(1, 2)
