"""Routing: which experts a token goes to, with which weight, and the order in which experts see the tokens.

Math: score = sigmoid(x @ weight^T) in float32. Selection adds a correction bias that is used for nothing else: in each
of `n_group` groups of experts the two best biased scores are summed, the `topk_group` best groups stay, and among their
experts the `top_k` best biased scores win; of equals the lowest index. The weights are the unbiased scores of the
winners, divided by their sum + 1e-20 where `norm_topk_prob`, times `scaling`.
Order: a stable sort of the T*K choices by expert, so that each expert's rows lie together and a token's order is kept.

Dtypes: float32 whatever the model's, ids and index tables int64. Everything stays on the device; R = T*K is static.
The torch version's product obeys torch's own switch for TF32, which is off unless somebody turns it on; the Triton
version never uses TF32. On a GPU: `route_triton` for scores, choice and weights, `order_triton` for the tables.
Source: Wang et al. 2024 (loss-free balancing: the bias selects, the score weighs); DeepSeek-AI 2024, section 2.1.2.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hymoe.kernels import order_triton, route_triton
from hymoe.kernels.launch import arithmetic_dtype, check_shape, uses_triton


@dataclass(frozen=True, eq=False)
class Routing:
    """Choices of T tokens among E experts, and the permutation into expert order.

    Attributes:
        ids: (T, K) int64, the experts of each token, best first.
        order: (R,) int64, for each row in expert order its place in the flattened `ids`; `order // K` is its token.
        inverse: (T, K) int64, where each choice stands in expert order.
        offsets: (E+1,) int64, first row of each expert; the last entry is R.
    """

    ids: Tensor
    order: Tensor
    inverse: Tensor
    offsets: Tensor

    @property
    def counts(self) -> Tensor:
        """(E,) int64, rows of each expert."""
        return self.offsets.diff()


def sort_by_expert(ids: Tensor, num_experts: int, kernels: str = "auto") -> Routing:
    """Builds the tables for chosen experts (T, K) int64 in 0..num_experts-1; `kernels` as in `launch.choose`."""
    if uses_triton("route", kernels, ids):
        return Routing(ids, *order_triton.sort_by_expert(ids, num_experts))
    flat = ids.flatten()
    order = torch.argsort(flat, stable=True)
    inverse = torch.empty_like(order).scatter_(
        0, order, torch.arange(order.numel(), device=ids.device)
    )
    offsets = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
    torch.cumsum(torch.bincount(flat, minlength=num_experts), 0, out=offsets[1:])
    return Routing(ids, order, inverse.view_as(ids), offsets)


def tile_table(offsets: Tensor, rows: int, block: int, kernels: str = "auto") -> Tensor:
    """Which rows each tile of an expert product works on; a tile has rows of one expert only.

    Args:
        offsets: (E+1,) int64, first row of each expert; the last entry is `rows`.
        rows: R, known on the host; below 2^31.
        block: rows of a tile; an expert's last tile may have fewer.
        kernels: which implementation, see `launch.choose`.

    Returns:
        table: (ceil(R/block)+E, 2) int32. Column 0: the expert, in order, -1 behind the last tile. Column 1: the
            tile's first row, 0 behind the last tile. The tile ends `block` rows later or where its expert ends.
    """
    if uses_triton("route", kernels, offsets):
        return order_triton.tile_table(offsets, rows, block)
    tiles = (offsets.diff() + (block - 1)) // block  # (E,)
    ends = tiles.cumsum(0)
    number = torch.arange(-(-rows // block) + tiles.numel(), device=offsets.device)
    expert = torch.searchsorted(ends, number, right=True)
    behind = expert == tiles.numel()
    within = expert.clamp(max=tiles.numel() - 1)
    first = offsets[within] + (number - (ends - tiles)[within]) * block
    table = [expert.masked_fill(behind, -1), first.masked_fill(behind, 0)]
    return torch.stack(table, dim=1).to(torch.int32)


def select_experts(
    scores: Tensor, bias: Tensor, top_k: int, n_group: int = 1, topk_group: int = 1
) -> Tensor:
    """The experts of each token: (T, E) float32 unbiased scores, (E,) bias -> (T, K) int64, best first."""
    biased = scores + bias.to(scores.dtype)
    if topk_group < n_group:
        grouped = biased.unflatten(1, (n_group, -1))  # (T, n_group, E/n_group)
        strength = grouped.topk(2, dim=-1).values.sum(-1)
        best = _top(strength, topk_group)
        dropped = torch.ones_like(strength, dtype=torch.bool).scatter_(1, best, False)
        biased = grouped.masked_fill(dropped[..., None], float("-inf")).flatten(1)
    return _top(biased, top_k)


def _top(values: Tensor, k: int) -> Tensor:
    """Indices of the k largest of each row; a stable sort, because topk leaves the order of equals open."""
    return torch.sort(values, dim=1, descending=True, stable=True).indices[:, :k].contiguous()


def route_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    top_k: int,
    n_group: int = 1,
    topk_group: int = 1,
    norm_topk_prob: bool = True,
    scaling: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The specification of `route`, token by token in Python: ids (T, K) int64 and weights (T, K)."""
    wide = arithmetic_dtype(x)
    scores = torch.sigmoid(x.to(wide) @ weight.to(wide).T)
    ids, size = [], weight.shape[0] // n_group
    for biased in (scores + bias).tolist():
        groups = [sorted(biased[g * size : (g + 1) * size])[-2:] for g in range(n_group)]
        best = sorted(range(n_group), key=lambda g: (-sum(groups[g]), g))[:topk_group]
        experts = [e for e in range(len(biased)) if e // size in best]
        ids.append(sorted(experts, key=lambda e: (-biased[e], e))[:top_k])
    chosen = torch.tensor(ids, device=x.device)
    return chosen, _weights(scores, chosen, norm_topk_prob, scaling)


def _weights(scores: Tensor, ids: Tensor, norm_topk_prob: bool, scaling: float) -> Tensor:
    chosen = scores.gather(1, ids)
    if norm_topk_prob:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + 1e-20)
    return chosen * scaling


def route(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    top_k: int,
    n_group: int = 1,
    topk_group: int = 1,
    norm_topk_prob: bool = True,
    scaling: float = 1.0,
    kept: Routing | None = None,
    kernels: str = "auto",
) -> tuple[Routing, Tensor]:
    """Chooses experts and weighs them.

    Args:
        x: (T, D) normed residual stream.
        weight: (E, D) router weight.
        bias: (E,) correction bias; selects only, gets no gradient.
        top_k: K.
        n_group: number of equal groups of experts; more than 1 needs two experts or more in each.
        topk_group: groups that a token may use.
        norm_topk_prob: whether the K weights are divided by their sum.
        scaling: factor on the weights.
        kept: the routing of an earlier pass over the same tokens: its choices are used instead of new ones, so that a
            recomputed block cannot route differently.
        kernels: which implementation, see `launch.choose`.

    Returns:
        routing: the choices and their order.
        weights: (T, K) float32, differentiable in x and weight.

    Raises:
        ValueError: shapes that do not fit, more choices than experts, groups that experts cannot make.
    """
    check_shape("route weight", weight, (None, x.shape[1]))
    check_shape("route bias", bias, (weight.shape[0],))
    if not 1 <= top_k <= weight.shape[0]:
        raise ValueError(f"route: top_k = {top_k} of {weight.shape[0]} experts")
    if topk_group < n_group and (weight.shape[0] % n_group or weight.shape[0] < 2 * n_group):
        raise ValueError(
            f"route: {weight.shape[0]} experts do not make {n_group} equal groups of two or more"
        )
    if uses_triton("route", kernels, x):
        ids, weights = route_triton.route(
            *(x, weight, bias, None if kept is None else kept.ids),
            top_k=top_k,
            n_group=n_group,
            topk_group=topk_group,
            norm_topk_prob=norm_topk_prob,
            scaling=scaling,
        )
        if kept is None:
            kept = sort_by_expert(ids, weight.shape[0], kernels)
        return kept, weights
    wide = arithmetic_dtype(x)
    scores = torch.sigmoid(x.to(wide) @ weight.to(wide).T)  # (T, E)
    if kept is None:
        with torch.no_grad():
            kept = sort_by_expert(
                select_experts(scores, bias, top_k, n_group, topk_group), weight.shape[0], kernels
            )
    return kept, _weights(scores, kept.ids, norm_topk_prob, scaling)
