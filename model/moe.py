"""The mixture of experts: router, routed experts, shared expert, and the point where tokens may travel."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from hymoe.kernels.experts import expert_mlp
from hymoe.kernels.few_rows import expert_mlp_few, takes_few
from hymoe.kernels.route import Routing, route
from hymoe.model.config import HybridConfig
from hymoe.model.mlp import MLP, Linear


class Router(nn.Module):
    """Weight (E, D) and correction bias (E,), both float32; the bias is a buffer that nothing trains."""

    def __init__(self, config: HybridConfig, kernels: str = "auto") -> None:
        """Allocates only."""
        super().__init__()
        self.config, self.kernels = config, kernels
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.empty(config.n_routed_experts))

    def forward(self, x: Tensor, kept: Routing | None) -> tuple[Routing, Tensor]:
        """(T, D) -> choices, and weights (T, K) float32."""
        return route(
            x,
            self.weight,
            self.e_score_correction_bias,
            top_k=self.config.num_experts_per_tok,
            n_group=self.config.n_group,
            topk_group=self.config.topk_group,
            norm_topk_prob=self.config.norm_topk_prob,
            scaling=self.config.routed_scaling_factor,
            kept=kept,
            kernels=self.kernels,
        )


class Experts(nn.Module):
    """The routed experts, stacked: one tensor for all up projections, one for all down projections."""

    def __init__(self, config: HybridConfig, dtype: torch.dtype, kernels: str = "auto") -> None:
        """Allocates only."""
        super().__init__()
        self.kernels = kernels
        experts, inner, outer = (
            config.n_routed_experts,
            config.moe_intermediate_size,
            config.expert_input,
        )
        self.up_proj = nn.Parameter(torch.empty(experts, inner, outer, dtype=dtype))  # (E, F, D)
        self.down_proj = nn.Parameter(torch.empty(experts, outer, inner, dtype=dtype))  # (E, D, F)

    def forward(self, x: Tensor, weights: Tensor, routing: Routing) -> Tensor:
        """(T, D) and weights (T, K) -> (T, D), the weighted sum over each token's experts."""
        if takes_few(x, routing, self.kernels):
            return expert_mlp_few(x, weights, self.up_proj, self.down_proj, routing)
        return expert_mlp(x, weights, self.up_proj, self.down_proj, routing, self.kernels)


# How rows reach the experts. Called with the experts, inputs, weights and choices, it may send rows on their way; what
# it returns is called after the shared expert, whose work covers the journey, and gives the weighted sums (T, D).
Exchange = Callable[[Experts, Tensor, Tensor, Routing], Callable[[], Tensor]]


def stay(experts: Experts, x: Tensor, weights: Tensor, routing: Routing) -> Callable[[], Tensor]:
    """The exchange where every expert is at hand: nothing travels."""
    return lambda: experts(x, weights, routing)


class MoE(nn.Module):
    """Routed experts plus the shared expert; with a latent size the routed ones work in a narrower space."""

    def __init__(self, config: HybridConfig, dtype: torch.dtype, kernels: str = "auto") -> None:
        """Allocates only."""
        super().__init__()
        self.gate = Router(config, kernels)
        self.experts = Experts(config, dtype, kernels)
        shared = config.moe_shared_expert_intermediate_size
        self.shared_experts = MLP(config, shared, dtype, kernels)
        self.fc1_latent_proj = self.fc2_latent_proj = None
        if config.moe_latent_size is not None:
            self.fc1_latent_proj = Linear(
                config.hidden_size, config.moe_latent_size, config.mlp_bias, dtype
            )
            self.fc2_latent_proj = Linear(
                config.moe_latent_size, config.hidden_size, config.mlp_bias, dtype
            )
        self.exchange: Exchange = stay
        self.load: Tensor | None = (
            None  # (E,) int64, rows of each expert since a caller last reset it
        )

    def forward(self, x: Tensor, kept: list[Routing]) -> Tensor:
        """(T, D) -> (T, D).

        Args:
            x: (T, D) normed residual stream.
            kept: empty on a first pass, which leaves its routing there; a recomputation gives it back.
        """
        first = not kept
        routing, weights = self.gate(x, None if first else kept[0])
        if first:
            kept.append(routing)
            self._count(routing)
        rows = x if self.fc1_latent_proj is None else self.fc1_latent_proj(x)
        finish = self.exchange(self.experts, rows, weights, routing)
        shared = self.shared_experts(x)
        out = finish()
        if self.fc2_latent_proj is not None:
            out = self.fc2_latent_proj(out)
        return out + shared

    @torch.no_grad()
    def _count(self, routing: Routing) -> None:
        self.load = routing.counts if self.load is None else self.load + routing.counts
