"""How evenly tokens fall on experts and on the ranks that hold them, from the rows of every expert."""

from torch import Tensor


def rank_imbalance(loads: Tensor, expert_parallel: int) -> list[float]:
    """Rows of the busiest rank over the mean, by layer; 1.0 where all ranks have the same or none has any.

    Args:
        loads: (L, E) rows of each expert in each layer.
        expert_parallel: ranks that share the experts, in their order.
    """
    ranks = loads.double().unflatten(1, (expert_parallel, -1)).sum(-1)  # (L, n)
    mean = ranks.mean(1)
    return (ranks.amax(1) / mean).where(mean > 0, 1.0).tolist()


def dead_experts(loads: Tensor) -> list[list[int]]:
    """Experts that no token chose, by layer; of a layer without any token none.

    Args:
        loads: (L, E) rows of each expert in each layer.
    """
    return [
        (layer == 0).nonzero().flatten().tolist() if bool(layer.any()) else [] for layer in loads
    ]
