"""Routing's Triton kernels: in the interpreter, or on a GPU where there is one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hymoe.kernels import route_triton
from hymoe.kernels.launch import KNOWN_TARGETS, recording
from hymoe.kernels.route import Routing, route, route_ref, sort_by_expert, tile_table
from tests.close import assert_close_rel
from tests.kernel_check import check, normal, run
from tests.kernels.test_norm_triton import far_apart

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.bfloat16)
# The interpreter's tile is 16 x 32 x 16: 40 columns are three steps, the last one short.
EXPERTS, WIDTH = 12, 40
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"top_k": 5, "scaling": 2.5},
    "not-normalised": {"top_k": 2, "norm_topk_prob": False, "scaling": 2.5},
    "every-expert": {"top_k": EXPERTS, "norm_topk_prob": False},
    "groups": {"top_k": 3, "n_group": 4, "topk_group": 2},  # of three: no power of two
    "three-groups": {"top_k": 4, "n_group": 3, "topk_group": 1},
    "all-groups-stay": {"top_k": 5, "n_group": 4, "topk_group": 4},
}


def inputs_of(tokens: int) -> tuple[dict[str, Tensor], Tensor]:
    inputs = normal(1, wide=(tokens, WIDTH + 9), weight=(EXPERTS, WIDTH))
    inputs["weight"] /= WIDTH**0.5
    return inputs, normal(2, bias=(EXPERTS,))["bias"].float() * 0.3


def weights_of(function: Callable[..., Any], bias: Tensor, **options: Any) -> Callable[..., Tensor]:
    """The weights, of an x that is a column slice."""
    device = DEVICE if "kernels" in options else "cpu"

    def weights(wide: Tensor, weight: Tensor) -> Tensor:
        x, last = wide.to(device)[:, 4:-5], bias.to(device)
        return function(x, weight.to(device), last, **options)[1].cpu()

    return weights


def both(x: Tensor, weight: Tensor, bias: Tensor, **options: Any) -> tuple[Any, Any]:
    """Routing and weights of the Triton kernels, and of the torch version, on the CPU."""
    routing, weights = route(
        *(t.to(DEVICE) for t in (x, weight, bias)), kernels="triton", **options
    )
    found = Routing(*(t.cpu() for t in vars(routing).values())), weights.cpu()
    return found, route(x, weight, bias, kernels="torch", **options)


def assert_same_routing(found: Routing, expected: Routing) -> None:
    for name, right in vars(expected).items():
        assert getattr(found, name).dtype == torch.int64, name
        assert torch.equal(getattr(found, name), right), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 21])
@pytest.mark.parametrize("name", OPTIONS)
def test_weights_and_gradients(name: str, tokens: int, dtype: torch.dtype) -> None:
    inputs, bias = inputs_of(tokens)
    kernel = weights_of(route, bias, kernels="triton", **OPTIONS[name])
    check(kernel, weights_of(route_ref, bias, **OPTIONS[name]), inputs, dtype, small=("weight",))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_weight_gradient_is_shared_out_over_tokens(dtype: torch.dtype) -> None:
    """Narrow enough for one tile: three programs share 63 tokens, and the last share is short."""
    inputs = normal(3, x=(63, 20), weight=(7, 20))
    bias = torch.zeros(7, device=DEVICE)
    with recording(route_triton.target(torch.device("cpu"))) as launches:
        x, weight = (torch.empty_like(t, device="meta", dtype=dtype) for t in inputs.values())
        weights = route(
            x.requires_grad_(), weight.float().requires_grad_(), bias.to("meta"), top_k=3
        )[1]
        weights.backward(torch.empty_like(weights))
    assert launches[-1].grid == (1, 2)
    check(
        lambda x, weight: route(x.to(DEVICE), weight.to(DEVICE), bias, top_k=3, kernels="triton")[
            1
        ].cpu(),
        lambda x, weight: route_ref(x, weight, bias.cpu(), top_k=3)[1],
        inputs,
        dtype,
        small=("weight",),
    )


def test_three_bfloat16_values_are_a_float32_value() -> None:
    x = torch.cat([normal(4, x=(9, 30))["x"].float() * 10.0**e for e in range(-20, 21, 5)])
    x[0, :4] = torch.tensor([0.0, 1 + 2**-23, -1.0, 2**-100])
    parts = route_triton._parts(x.to(DEVICE)[:, 3:]).cpu()
    assert parts.dtype == torch.bfloat16
    assert torch.equal(parts.double().sum(0), x[:, 3:].double())
    own = x.bfloat16()
    assert route_triton._parts(own).data_ptr() == own.data_ptr()


@pytest.mark.parametrize(
    ("tokens", "experts", "options"),
    [
        (30, 128, {"top_k": 6}),
        (20, 7, {"top_k": 3}),
        (20, 7, {"top_k": 7}),
        (9, 1, {"top_k": 1}),
        pytest.param(2, 1024, {"top_k": 32}, marks=pytest.mark.slow),  # the sort has 1,025 programs
        (20, 40, {"top_k": 6, "n_group": 8, "topk_group": 3}),
        (20, 21, {"top_k": 4, "n_group": 7, "topk_group": 2}),
    ],
    ids=lambda v: str(v) if isinstance(v, int) else "-".join(map(str, v.values())),
)
def test_choices_equal_torch(tokens: int, experts: int, options: dict[str, int]) -> None:
    """A bias as large as the scores' spread."""
    inputs = normal(5, x=(tokens, 24), weight=(experts, 24), bias=(experts,))
    x, weight, bias = (t.float() for t in inputs.values())
    (found, weights), (expected, right) = both(x.bfloat16(), weight, bias * 0.3, **options)
    assert_same_routing(found, expected)
    assert_close_rel(weights, right, 1e-6)
    assert weights.dtype == torch.float32


@pytest.mark.parametrize("name", OPTIONS)
def test_of_equals_the_lowest_index_wins(name: str) -> None:
    """Scores from a grid of three values: nearly every choice meets a tie, of experts or of groups."""
    rng = torch.Generator().manual_seed(3)
    x = torch.randint(-1, 2, (60, 2), generator=rng).float()
    weight = torch.randint(-1, 2, (EXPERTS, 2), generator=rng).float()
    (found, _), (expected, _) = both(x, weight, torch.zeros(EXPERTS), **OPTIONS[name])
    assert_same_routing(found, expected)
    assert torch.equal(found.ids, route_ref(x, weight, torch.zeros(EXPERTS), **OPTIONS[name])[0])


@pytest.mark.parametrize("name", OPTIONS)
def test_all_equal_chooses_the_first(name: str) -> None:
    """Also where every biased score is negative: what is dropped or outside must not come in."""
    for bias in (0.0, -9.0):
        (found, _), _ = both(
            torch.zeros(3, 4), torch.ones(EXPERTS, 4), torch.full((EXPERTS,), bias), **OPTIONS[name]
        )
        assert found.ids.tolist() == [list(range(OPTIONS[name]["top_k"]))] * 3


def test_the_bias_selects_in_float32_and_nothing_else() -> None:
    """In bfloat16 all three biases are 34.5 and expert 0 would win; the weight is expert 1's unbiased score."""
    weight = torch.logit(torch.tensor([[0.30], [0.28], [0.10]]))
    bias = torch.tensor([34.40, 34.45, 34.60])
    (found, weights), _ = both(
        torch.ones(1, 1).bfloat16(), weight, bias, top_k=1, norm_topk_prob=False
    )
    assert found.ids.tolist() == [[1]]
    assert weights.item() == pytest.approx(0.28, rel=1e-6)


def test_scores_at_both_ends() -> None:
    """flashinfer#3875: a score of 1e-26 is lost in score + bias, so the weight may not be made from that."""
    logits = torch.tensor([[-60.0, -61.0, -200.0, 200.0]])
    x, weight = torch.ones(1, 1), logits.T.contiguous()
    (found, weights), _ = both(
        x, weight, torch.tensor([3.0, 2.5, 2.0, 0.0]), top_k=3, norm_topk_prob=False
    )
    assert found.ids.tolist() == [[0, 1, 2]]
    assert_close_rel(weights[0, :2], torch.sigmoid(logits[0, :2]), 1e-5)
    assert 0 <= weights[0, 2] < 1e-38
    (found, weights), (_, right) = both(x, weight, torch.zeros(4), top_k=1)
    assert (found.ids.tolist(), weights.tolist()) == ([[3]], [[1.0]])
    # All scores zero: the weights are zero, by the 1e-20 in the sum, and so are the gradients.
    inputs = {"x": x.to(DEVICE), "weight": torch.full((4, 1), -200.0, device=DEVICE)}
    leaves = [t.requires_grad_() for t in inputs.values()]
    weights = route(*leaves, torch.zeros(4, device=DEVICE), top_k=2, kernels="triton")[1]
    for result in (weights, *torch.autograd.grad(weights, leaves, torch.ones_like(weights))):
        assert not result.any()


@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["plain", "groups"])
def test_a_bad_token_stays_alone_and_has_valid_choices(name: str, bad: float) -> None:
    """All its logits are NaN, so that its experts are the first ones; its weights are NaN."""
    inputs, bias = inputs_of(6)
    x, weight = inputs["wide"][:, :WIDTH].float(), inputs["weight"].float()
    (clean, right), _ = both(x, weight, bias, **OPTIONS[name])
    x[2, 5] = bad
    (found, weights), (expected, _) = both(x, weight, bias, **OPTIONS[name])
    others = torch.arange(6) != 2
    assert torch.equal(found.ids[others], clean.ids[others])
    assert torch.equal(weights[others], right[others])
    assert weights[2].isnan().all()
    assert found.ids[2].tolist() == list(range(OPTIONS[name]["top_k"]))
    if bad != torch.inf:
        assert_same_routing(found, expected)


def test_an_expert_with_nan_weight_wins_everywhere() -> None:
    """As in torch.sort: NaN above all, one NaN like another."""
    inputs, bias = inputs_of(5)
    x, weight = inputs["wide"][:, :WIDTH].float(), inputs["weight"].float()
    weight[7], weight[9] = torch.nan, -torch.nan
    for name in ("plain", "groups"):
        (found, weights), (expected, _) = both(x, weight, bias, **OPTIONS[name])
        assert_same_routing(found, expected)
        assert found.ids[:, 0].tolist() == [7] * 5
        assert weights.isnan().all()


@pytest.mark.parametrize("name", ["plain", "groups"])
def test_nan_of_either_sign_in_the_bias(name: str) -> None:
    """As bits, one is the largest and one the smallest of all; the weights are still those of the scores."""
    inputs, bias = inputs_of(5)
    x, weight = inputs["wide"][:, :WIDTH].float(), inputs["weight"].float()
    bias[2], bias[9] = torch.tensor([0xFFC00000, 0x7FC00000]).to(torch.int32).view(torch.float32)
    (found, weights), (expected, right) = both(x, weight, bias, **OPTIONS[name])
    assert_same_routing(found, expected)
    assert found.ids[:, :2].tolist() == [[2, 9]] * 5
    assert_close_rel(weights, right, 1e-6)


def test_kept_choices_are_used_whatever_the_bias_says_now() -> None:
    inputs, bias = inputs_of(20)
    first, _ = route(*on_device(inputs, bias), top_k=3, kernels="triton")
    other = bias + torch.linspace(-3, 3, EXPERTS)
    assert not torch.equal(
        route(*on_device(inputs, other), top_k=3, kernels="triton")[0].ids, first.ids
    )
    results = []
    for now in (bias, other):
        leaves = [t.requires_grad_() for t in on_device(inputs, now)[:2]]
        routing, weights = route(*leaves, now.to(DEVICE), top_k=3, kept=first, kernels="triton")
        assert routing is first
        results.append((weights, *torch.autograd.grad(weights[:, 0].sum(), leaves)))
    leaves = [t.requires_grad_() for t in on_device(inputs, bias)[:2]]
    weights = route(*leaves, bias.to(DEVICE), top_k=3, kernels="triton")[1]
    results.append((weights, *torch.autograd.grad(weights[:, 0].sum(), leaves)))
    for one, other, fresh in zip(*results, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, fresh)


def on_device(inputs: dict[str, Tensor], bias: Tensor) -> list[Tensor]:
    x = inputs["wide"][:, :WIDTH].bfloat16()
    return [t.to(DEVICE) for t in (x, inputs["weight"].float(), bias)]


def test_two_runs_give_the_same_bits() -> None:
    inputs, bias = inputs_of(50)
    function = weights_of(route, bias, top_k=4, kernels="triton")
    inputs = {"wide": inputs["wide"].bfloat16(), "weight": inputs["weight"].float()}
    first, second = run(function, inputs), run(function, inputs)
    for name, one in first.items():
        assert torch.equal(one, second[name]), name


def test_no_tokens() -> None:
    x = torch.ones(0, 12, device=DEVICE, requires_grad=True)
    weight = torch.ones(5, 12, device=DEVICE, requires_grad=True)
    routing, weights = route(x, weight, torch.zeros(5, device=DEVICE), top_k=2, kernels="triton")
    weights.sum().backward()
    assert weights.shape == routing.ids.shape == (0, 2)
    assert routing.offsets.tolist() == [0] * 6
    assert torch.equal(weight.grad, torch.zeros_like(weight))
    assert x.grad.shape == x.shape


def test_rows_past_32_bits() -> None:
    """Rows of x 2^27 values apart: an offset that wraps reads another place of the same memory, which holds zeros.

    Of 18 rows the last two are past 2^31 values, in tiles of rows and in steps over rows alike.
    """
    values = normal(9, x=(18, 12), weight=(5, 12), dy=(18, 2))
    x, weight, dy = (
        values["x"].bfloat16(),
        values["weight"].float().to(DEVICE),
        values["dy"].float(),
    )
    results = []
    for rows in (x.to(DEVICE), far_apart(x, 1 << 27)):
        leaves = [t.detach().requires_grad_() for t in (rows, weight)]
        weights = route(*leaves, torch.zeros(5, device=DEVICE), top_k=2, kernels="triton")[1]
        results.append((weights, *torch.autograd.grad(weights, leaves, dy.to(DEVICE))))
    for name, one, other in zip(("weights", "dx", "dweight"), *results, strict=True):
        assert torch.equal(one, other), name


SORTS: dict[str, tuple[Tensor, int]] = {
    "one-row": (torch.tensor([[2]]), 4),
    "no-rows": (torch.zeros(0, 3, dtype=torch.int64), 4),
    "first-and-last-idle": (torch.tensor([[1, 3], [3, 1], [1, 2]]), 5),
    "all-to-last": (torch.full((40, 1), 3), 4),
    "all-to-first": (torch.zeros(40, 1, dtype=torch.int64), 4),
    "one-expert": (torch.zeros(9, 1, dtype=torch.int64), 1),
    "whole-tiles": (torch.arange(64).view(16, 4) % 7, 7),
    "many-experts": (torch.arange(4 * 32).view(4, 32) * 37 % 300, 300),
    "six-of-128": (
        torch.rand(20, 128, generator=torch.Generator().manual_seed(5)).topk(6).indices,
        128,
    ),
    "rows-apart": (
        torch.rand(21, 9, generator=torch.Generator().manual_seed(6)).argsort(1)[:, 2:8:2],
        9,
    ),
}


@pytest.mark.parametrize("name", SORTS)
def test_expert_order_and_tiles(name: str) -> None:
    """The interpreter's tile of the sort has 16 rows, and 4 tiles are scanned at a time."""
    ids, experts = SORTS[name]
    found = sort_by_expert(ids.to(DEVICE), experts, "triton")
    expected = sort_by_expert(ids, experts, "torch")
    assert_same_routing(Routing(*(t.cpu() for t in vars(found).values())), expected)
    assert found.inverse.shape == ids.shape
    for block in (1, 3, 128) if experts < 100 else (16,):
        table = tile_table(found.offsets, ids.numel(), block, "triton").cpu()
        assert table.dtype == torch.int32
        assert torch.equal(table, tile_table(expected.offsets, ids.numel(), block, "torch"))


@pytest.mark.parametrize("arch", KNOWN_TARGETS)
def test_launches(arch: int) -> None:
    """What one call launches; on meta tensors, which could not tell the host anything."""
    meta = {"device": "meta"}
    x = torch.ones(4096, 64, dtype=torch.bfloat16, requires_grad=True, **meta)
    weight = torch.ones(128, 64, requires_grad=True, **meta)
    bias = torch.ones(128, **meta)
    with recording(KNOWN_TARGETS[arch]) as launches:
        routing, weights = route(x, weight, bias, top_k=6, kernels="triton")
        names = [one.kernel.__name__ for one in launches]
        assert names == ["_split_kernel", "_product_kernel", "_choose_kernel",
                         "_below_kernel", "_starts_kernel", "_scatter_kernel"]  # fmt: skip
        launches.clear()
        weights.backward(torch.empty_like(weights))
        names = [one.kernel.__name__ for one in launches]
        assert names == ["_dlogits_kernel", "_split_kernel", "_product_kernel", "_product_kernel"]
        launches.clear()
        kept = {"top_k": 6, "kept": routing, "kernels": "triton"}
        again = route(x.detach(), weight, bias, **kept)[1]
        assert len(launches) == 3  # no sort
        again.backward(torch.empty_like(weights))
        assert len(launches) == 5  # no gradient of x
        launches.clear()
        assert tile_table(routing.offsets, 4096 * 6, 128, "triton").shape == (192 + 128, 2)
        assert len(launches) == 1


def test_float64_is_not_for_the_kernels() -> None:
    inputs = normal(10, x=(3, 8), weight=(4, 8))
    assert route(**inputs, bias=torch.zeros(4), top_k=2, kernels="triton")[1].dtype == torch.float64
