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

    def forward(self, x: Tensor, weights: Tensor, routing: Routing, is_read: bool = True) -> Tensor:
        """(T, D) and weights (T, K) -> (T, D), the weighted sum over each token's experts.

        `is_read` False: nobody reads it, see `expert_mlp`.
        """
        if takes_few(x, routing, self.kernels):
            return expert_mlp_few(x, weights, self.up_proj, self.down_proj, routing)
        stacks = (self.up_proj, self.down_proj)
        return expert_mlp(x, weights, *stacks, routing, self.kernels, is_read)


# How rows reach the experts, in three calls between which the shared expert's work covers the journeys. `Exchange`,
# called with the experts, inputs, weights and choices, sends rows on their way; `Finish` lets the experts compute and
# sends their sums back; `Sums` gives them, (T, D). `Finish` is told whether anybody reads the sums. Where nobody does,
# as in a recomputation, nothing travels back, and what `Sums` gives is fresh memory.
Sums = Callable[[], Tensor]
Finish = Callable[[bool], Sums]
Exchange = Callable[[Experts, Tensor, Tensor, Routing], Finish]


def stay(experts: Experts, x: Tensor, weights: Tensor, routing: Routing) -> Finish:
    """The exchange where every expert is at hand: nothing travels."""

    def finish(is_read: bool) -> Sums:
        out = experts(x, weights, routing, is_read)
        return lambda: out

    return finish


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

        A recomputation is there for what the backward pass reads. `checkpoint` ends it at the last tensor that was
        saved: before the last product, which is the shared expert's or the latent projection's. Only the latter reads
        the experts' sums.

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
        inner = self.shared_experts.inner(x)
        sums = finish(first or self.fc2_latent_proj is not None)
        shared = self.shared_experts.down_proj(inner)
        out = sums()
        if self.fc2_latent_proj is not None:
            out = self.fc2_latent_proj(out)
        return out + shared

    @torch.no_grad()
    def _count(self, routing: Routing) -> None:
        self.load = routing.counts if self.load is None else self.load + routing.counts
