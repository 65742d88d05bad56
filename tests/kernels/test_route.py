"""Choice of experts, their weights and the expert order against the reference, token by token."""

from typing import Any

import pytest
import torch
from torch import Tensor

from hymoe.kernels.route import (
    Routing,
    route,
    route_ref,
    select_experts,
    sort_by_expert,
    tile_table,
)
from tests.kernel_check import DTYPE_IDS, DTYPES, check, normal

EXPERTS, WIDTH = 8, 12
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"top_k": 3},
    "best-alone": {"top_k": 1, "norm_topk_prob": False, "scaling": 2.5},
    "every-expert": {"top_k": 8, "norm_topk_prob": False},
    "groups": {"top_k": 3, "n_group": 4, "topk_group": 2, "scaling": 2.5},
    "one-group-of-two": {"top_k": 2, "n_group": 2, "topk_group": 1, "norm_topk_prob": False},
    "all-groups-stay": {"top_k": 5, "n_group": 4, "topk_group": 4},
    "whole-groups": {"top_k": 4, "n_group": 4, "topk_group": 2},
}


def inputs_of(tokens: int) -> tuple[dict[str, Tensor], Tensor]:
    inputs = normal(1, wide=(tokens, WIDTH + 9), weight=(EXPERTS, WIDTH))
    return inputs, normal(2, bias=(EXPERTS,))["bias"].float() * 0.3


def logit(*scores: float) -> Tensor:
    """Router weight (E, 1) that gives these scores for an input of 1."""
    return torch.logit(torch.tensor(scores, dtype=torch.float64)).float()[:, None]


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("tokens", [1, 63])
@pytest.mark.parametrize("name", OPTIONS)
def test_weights_and_gradients(name: str, tokens: int, dtype: torch.dtype) -> None:
    """x is a column slice of a wider tensor."""
    inputs, bias = inputs_of(tokens)

    def weights_of(function: Any) -> Any:
        def weights(wide: Tensor, weight: Tensor) -> Tensor:
            return function(wide[:, 4 : 4 + WIDTH], weight, bias, **OPTIONS[name])[1]

        return weights

    check(weights_of(route), weights_of(route_ref), inputs, dtype, small=("weight",))


def test_an_expert_alone_gets_the_whole_weight_when_normalised() -> None:
    inputs, bias = inputs_of(9)
    x, weight = inputs["wide"][:, :WIDTH].float(), inputs["weight"].float()
    _, weights = route(x, weight, bias, top_k=1, scaling=2.5)
    torch.testing.assert_close(weights, torch.full((9, 1), 2.5))


@pytest.mark.parametrize("name", OPTIONS)
def test_choices_equal_the_reference(name: str) -> None:
    """In bfloat16 the model's router still works in float32: its choices are those of float32 inputs."""
    inputs, bias = inputs_of(1000)
    x, weight = inputs["wide"][:, :WIDTH].bfloat16(), inputs["weight"].float()
    found, weights = route(x, weight, bias, **OPTIONS[name])
    expected, _ = route_ref(x.float(), weight, bias, **OPTIONS[name])
    assert torch.equal(found.ids, expected)
    assert weights.dtype == torch.float32
    assert found.ids.dtype == torch.int64


@pytest.mark.parametrize("name", OPTIONS)
def test_of_equals_the_lowest_index_wins(name: str) -> None:
    """Scores and biases from a grid of three values: nearly every choice meets a tie, of experts or of groups."""
    rng = torch.Generator().manual_seed(3)
    x = torch.randint(-1, 2, (400, 2), generator=rng).float()
    weight = torch.randint(-1, 2, (EXPERTS, 2), generator=rng).float()
    bias = torch.zeros(EXPERTS)
    found, _ = route(x, weight, bias, **OPTIONS[name])
    expected, _ = route_ref(x, weight, bias, **OPTIONS[name])
    assert torch.equal(found.ids, expected)


def test_all_equal_chooses_the_first_experts_of_the_first_groups() -> None:
    scores, bias = torch.full((3, 64), 0.5), torch.zeros(64)
    assert select_experts(scores, bias, 6).tolist() == [[0, 1, 2, 3, 4, 5]] * 3
    scores[:, :8] = 0.25  # the first group of eight is the weakest: the next two stay
    chosen = select_experts(scores, bias, 10, n_group=8, topk_group=2)
    assert chosen.tolist() == [list(range(8, 18))] * 3


def test_a_group_counts_by_its_two_best_biased_scores() -> None:
    """Group 0 has the best expert, group 1 the best pair, group 2 the best sum of three, group 3 the best bias."""
    scores = torch.tensor(
        [[0.9, 0.1, 0.1, 0.6, 0.55, 0.0, 0.5, 0.5, 0.5, 0.1, 0.1, 0.1]], dtype=torch.float32
    )
    bias = torch.zeros(12)
    assert select_experts(scores, bias, 2, n_group=4, topk_group=1).tolist() == [[3, 4]]
    bias[9:11] = 1
    assert select_experts(scores, bias, 2, n_group=4, topk_group=1).tolist() == [[9, 10]]


def test_negative_biased_scores_in_a_chosen_group_beat_other_groups() -> None:
    """What is dropped may not come back, however low the rest is."""
    scores = torch.full((1, 4), 0.5)
    bias = torch.tensor([-5.0, -9.0, -7.1, -7.2])
    assert select_experts(scores, bias, 2, n_group=2, topk_group=1).tolist() == [[0, 1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_selection_keeps_the_float32_bias(dtype: torch.dtype) -> None:
    """Automodel#2553: in bfloat16 all three biases are 34.5, and expert 0 wins."""
    bias = torch.tensor([34.40, 34.45, 34.60])
    routing, weights = route(
        torch.ones(1, 1, dtype=dtype), logit(0.30, 0.28, 0.10), bias, top_k=1, norm_topk_prob=False
    )
    assert routing.ids.tolist() == [[1]]
    assert weights.item() == pytest.approx(0.28, rel=1e-6)  # the unbiased score
    rounded, _ = route(torch.ones(1, 1), logit(0.30, 0.28, 0.10), bias.bfloat16().float(), top_k=1)
    assert rounded.ids.tolist() == [[0]]


@pytest.mark.parametrize(
    ("norm", "expected"), [(True, [1.4285714, 1.0714286]), (False, [1.0, 0.75])]
)
def test_weights_are_normalised_then_scaled_once(norm: bool, expected: list[float]) -> None:
    """vllm#45037: chosen scores 0.4 and 0.3, factor 2.5."""
    _, weights = route(
        torch.ones(1, 1),
        logit(0.3, 0.1, 0.4),
        torch.zeros(3),
        top_k=2,
        norm_topk_prob=norm,
        scaling=2.5,
    )
    assert weights[0].tolist() == pytest.approx(expected, rel=1e-6)


def test_kept_choices_are_used_whatever_the_bias_says_now() -> None:
    inputs, bias = inputs_of(20)
    x, weight = inputs["wide"][:, :WIDTH].float(), inputs["weight"].float()
    first, weights = route(x, weight, bias, top_k=2)
    other = bias + torch.linspace(-3, 3, EXPERTS)
    assert not torch.equal(route(x, weight, other, top_k=2)[0].ids, first.ids)
    again, same = route(x, weight, other, top_k=2, kept=first)
    assert again is first
    assert torch.equal(same, weights)


def check_tables(routing: Routing, experts: int) -> None:
    """Every row once, experts one after another, a token's order kept within an expert."""
    flat = routing.ids.flatten()
    in_order = flat[routing.order]
    assert torch.equal(routing.order.sort().values, torch.arange(flat.numel()))
    assert torch.equal(in_order, flat.sort().values)
    for e in range(experts):
        rows = routing.order[routing.offsets[e] : routing.offsets[e + 1]]
        assert torch.equal(rows, torch.nonzero(flat == e)[:, 0]), f"expert {e}"
    assert torch.equal(routing.order[routing.inverse.flatten()], torch.arange(flat.numel()))
    assert routing.inverse.shape == routing.ids.shape
    assert routing.offsets.tolist()[0] == 0
    assert routing.offsets.tolist()[-1] == flat.numel()
    assert torch.equal(routing.counts, torch.bincount(flat, minlength=experts))


@pytest.mark.parametrize(
    ("ids", "experts"),
    [
        ([[2]], 4),
        ([[1, 3], [3, 1], [1, 2]], 5),  # the first and the last expert idle
        ([[3]] * 40, 4),  # all to the last
        ([[0]] * 40, 4),  # all to the first
        ([[2, 0, 1], [0, 1, 2]], 3),  # K = E
        ([[0], [0]], 1),
    ],
    ids=["one-row", "idle", "all-to-last", "all-to-first", "every", "one-expert"],
)
def test_expert_order(ids: list[list[int]], experts: int) -> None:
    check_tables(sort_by_expert(torch.tensor(ids), experts), experts)


def test_expert_order_of_many_rows() -> None:
    ids = torch.rand(1031, 40, generator=torch.Generator().manual_seed(5)).topk(6).indices
    check_tables(sort_by_expert(ids, 40), 40)


def test_shapes_that_do_not_fit_are_refused() -> None:
    x = torch.ones(2, 4)
    with pytest.raises(ValueError, match=r"route weight: expected shape \(\*, 4\), found \(3, 5\)"):
        route(x, torch.ones(3, 5), torch.zeros(3), top_k=1)
    with pytest.raises(ValueError, match=r"route bias: expected shape \(3\), found \(4,\)"):
        route(x, torch.ones(3, 4), torch.zeros(4), top_k=1)
    with pytest.raises(ValueError, match="top_k = 4 of 3 experts"):
        route(x, torch.ones(3, 4), torch.zeros(3), top_k=4)
    for experts, groups in ((7, 2), (4, 4)):
        with pytest.raises(
            ValueError, match=f"{experts} experts do not make {groups} equal groups"
        ):
            route(x, torch.ones(experts, 4), torch.zeros(experts), top_k=1, n_group=groups)


def test_tiles_hold_every_row_once_and_one_expert_each() -> None:
    ids = torch.tensor([[1, 3], [3, 1], [1, 5], [5, 3], [3, 1]])  # 0, 2, 4 and 6 idle
    offsets = sort_by_expert(ids, 7).offsets
    assert tile_table(offsets, 10, 3).tolist() == [
        [1, 0], [1, 3], [3, 4], [3, 7], [5, 8], *[[-1, 0]] * 6
    ]  # fmt: skip
    assert tile_table(offsets, 10, 128).tolist() == [[1, 0], [3, 4], [5, 8], *[[-1, 0]] * 5]
    assert tile_table(torch.zeros(3, dtype=torch.int64), 0, 16).tolist() == [[-1, 0]] * 2
