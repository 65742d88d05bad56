"""The routed experts against every expert on every token."""

from typing import Any

import pytest
import torch
from torch import Tensor

from hymoe.kernels.experts import expert_mlp, expert_mlp_ref, grouped_gemm, grouped_gemm_ref
from hymoe.kernels.route import Routing, sort_by_expert
from tests.close import assert_close_rel, assert_twice_as_close
from tests.kernel_check import DTYPE_IDS, DTYPES, check, normal

WIDTH, INNER = 12, 7


def some(tokens: int, top_k: int, experts: int, seed: int = 3) -> Tensor:
    """(T, K) different experts for each token."""
    rng = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, experts, generator=rng).topk(top_k).indices


CHOICES: dict[str, tuple[Tensor, int]] = {
    "one-token": (some(1, 3, 8), 8),
    "ragged": (some(63, 3, 8), 8),
    "many": (some(1000, 6, 16), 16),
    "every-expert": (some(20, 4, 4), 4),
    "idle-between": (some(30, 2, 3) * 2 + 1, 8),  # experts 1, 3 and 5
    "all-to-one": (torch.full((37, 1), 2), 4),
    "all-to-the-last": (torch.full((5, 1), 3), 4),
    "one-row-each": (torch.arange(6)[:, None], 6),
    "one-expert": (torch.zeros(9, 1, dtype=torch.int64), 1),
}


def inputs_of(ids: Tensor, experts: int, width: int = WIDTH, inner: int = INNER) -> dict:
    inputs = normal(
        1,
        x=(ids.shape[0], width),
        weights=tuple(ids.shape),
        up=(experts, inner, width),
        down=(experts, width, inner),
    )
    inputs["up"] *= width**-0.5
    inputs["down"] *= inner**-0.5
    return inputs


def with_routing(function: Any, routing: Routing) -> Any:
    return lambda x, weights, up, down: function(x, weights, up, down, routing)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("name", CHOICES)
def test_output_and_every_gradient(name: str, dtype: torch.dtype) -> None:
    ids, experts = CHOICES[name]
    routing = sort_by_expert(ids, experts)
    check(
        with_routing(expert_mlp, routing),
        with_routing(expert_mlp_ref, routing),
        inputs_of(ids, experts),
        dtype,
        small=("weights",),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_square_matrices_are_not_transposed(dtype: torch.dtype) -> None:
    ids, experts = CHOICES["ragged"]
    routing = sort_by_expert(ids, experts)
    check(
        with_routing(expert_mlp, routing),
        with_routing(expert_mlp_ref, routing),
        inputs_of(ids, experts, width=16, inner=16),
        dtype,
        small=("weights",),
    )


def test_strided_inputs() -> None:
    """x and the weights as slices of wider tensors, the matrices as transposes of how they are stored."""
    ids, experts = CHOICES["ragged"]
    routing = sort_by_expert(ids, experts)
    inputs = normal(
        2,
        x=(63, WIDTH + 5),
        weights=(63, 6),
        up=(experts, WIDTH, INNER),
        down=(experts, INNER + 3, WIDTH),
    )

    def sliced(function: Any) -> Any:
        def run(x: Tensor, weights: Tensor, up: Tensor, down: Tensor) -> Tensor:
            down = down[:, 2 : 2 + INNER].transpose(1, 2)
            x, weights = x[:, 3 : 3 + WIDTH], weights[:, ::2]
            return function(x, weights, up.transpose(1, 2), down, routing)

        return run

    check(sliced(expert_mlp), sliced(expert_mlp_ref), inputs, torch.float32)


def test_an_upstream_gradient_of_stride_zero() -> None:
    """What `sum().backward()` sends: one number seen from everywhere."""
    ids, experts = CHOICES["ragged"]
    routing = sort_by_expert(ids, experts)
    found, expected = (
        [x.double().requires_grad_() for x in inputs_of(ids, experts).values()] for _ in range(2)
    )
    expert_mlp(*found, routing).sum().backward()
    expert_mlp_ref(*expected, routing).sum().backward()
    for one, other in zip(found, expected, strict=True):
        assert_close_rel(one.grad, other.grad, 1e-12)


def test_idle_experts_have_a_gradient_and_it_is_zero() -> None:
    """pytorch#126616: never None, never what memory held before."""
    ids, experts = CHOICES["idle-between"]
    inputs = {n: x.float().requires_grad_() for n, x in inputs_of(ids, experts).items()}
    expert_mlp(**inputs, routing=sort_by_expert(ids, experts)).square().sum().backward()
    for name in ("up", "down"):
        gradient = inputs[name].grad
        busy = [bool(gradient[e].any()) for e in range(experts)]
        assert busy == [False, True, False, True, False, True, False, False], name


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("token", [0, 1, 3])
def test_a_token_reads_nothing_of_another(token: int, dtype: torch.dtype) -> None:
    """A row of NaN reaches its own output and its experts' gradients alone."""
    ids = torch.tensor([[0, 1], [2, 3], [3, 2], [1, 0]])
    routing = sort_by_expert(ids, 4)
    inputs = {
        n: x.to(torch.promote_types(dtype, torch.float32) if n == "weights" else dtype)
        for n, x in inputs_of(ids, 4).items()
    }
    inputs["up"].requires_grad_()
    clean = expert_mlp(**inputs, routing=routing)
    clean_up = torch.autograd.grad(clean.sum(), inputs["up"])[0]
    with torch.no_grad():
        inputs["x"][token] = torch.nan
    dirty = expert_mlp(**inputs, routing=routing)
    dirty_up = torch.autograd.grad(dirty.sum(), inputs["up"])[0]
    others = [t for t in range(4) if t != token]
    strangers = [e for e in range(4) if e not in ids[token]]
    assert dirty[token].isnan().all()
    assert torch.equal(dirty[others], clean[others])
    assert torch.equal(dirty_up[strangers], clean_up[strangers])
    assert dirty_up[ids[token]].isnan().any()


def test_the_sum_over_experts_is_float32_in_bfloat16() -> None:
    """257 = 256 + 1 takes nine bits: a bfloat16 sum of the three choices would stay at 256."""
    ids = torch.tensor([[0, 1, 2]])
    up = torch.ones(3, 1, 1, dtype=torch.bfloat16)
    down = torch.tensor([256.0, 1.0, 1.0], dtype=torch.bfloat16).view(3, 1, 1)
    x = torch.ones(1, 1, dtype=torch.bfloat16)
    out = expert_mlp(x, torch.ones(1, 3), up, down, sort_by_expert(ids, 3))
    assert out.item() == 258.0


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize(
    "counts", [(5,), (0, 3, 0), (1, 1, 1), (63, 0, 130, 1), (0, 0, 17)], ids=str
)
def test_grouped_gemm(counts: tuple[int, ...], dtype: torch.dtype) -> None:
    """Rows are a slice of a wider tensor, matrices a transposed view."""
    offsets = torch.tensor((0, *counts)).cumsum(0)
    inputs = normal(4, x=(sum(counts), 20), weight=(len(counts), 11, 6))
    x, weight = (t.to(dtype) for t in inputs.values())
    found = grouped_gemm(x[:, 2:13], weight.transpose(1, 2), offsets)
    exact, plain = (
        grouped_gemm_ref(x.to(d)[:, 2:13], weight.to(d).transpose(1, 2), offsets)
        for d in (torch.float64, dtype)
    )
    assert found.dtype == dtype
    if dtype == torch.float64:
        assert_close_rel(found, exact, 1e-12)
    else:
        assert_twice_as_close(found, plain, exact)


def test_shapes_that_do_not_fit_are_refused() -> None:
    ids = torch.tensor([[0, 1]])
    routing = sort_by_expert(ids, 2)
    good = {n: x.float() for n, x in inputs_of(ids, 2).items()}
    for name, bad, message in (
        ("weights", torch.ones(1, 3), r"expert_mlp routing: expected shape \(1, 3\)"),
        ("up", torch.ones(3, INNER, WIDTH), r"expert_mlp up: expected shape \(2, \*, 12\)"),
        ("down", torch.ones(2, INNER, WIDTH), r"expert_mlp down: expected shape \(2, 12, 7\)"),
    ):
        with pytest.raises(ValueError, match=message):
            expert_mlp(**{**good, name: bad}, routing=routing)
    with pytest.raises(ValueError, match=r"grouped_gemm weight: expected shape \(\*, \*, 4\)"):
        grouped_gemm(torch.ones(2, 4), torch.ones(2, 3, 5), torch.tensor([0, 1, 2]))
    with pytest.raises(ValueError, match=r"grouped_gemm offsets: expected shape \(3\)"):
        grouped_gemm(torch.ones(2, 4), torch.ones(2, 3, 4), torch.tensor([0, 2]))
