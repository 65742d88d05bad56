"""The Triton version of the routed experts against every expert on every token, in float64.

In the interpreter a tile is 16 rows, 32 columns and 16 deep; it divides neither WIDTH nor INNER, multiples of 8.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hymoe.kernels import experts_triton, grouped_gemm_triton
from hymoe.kernels.experts import expert_mlp, expert_mlp_ref, grouped_gemm, grouped_gemm_ref
from hymoe.kernels.grouped_gemm_triton import Epilogue, Rows, rows_product, weight_gradient
from hymoe.kernels.route import Routing, sort_by_expert
from tests.close import assert_close_rel, assert_twice_as_close
from tests.kernel_check import check, normal, run

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTH, INNER = 40, 24
DTYPES = (torch.float32, torch.bfloat16)
DTYPE_IDS = ("float32", "bfloat16")


def some(tokens: int, top_k: int, experts: int) -> Tensor:
    """(T, K) different experts for each token."""
    rng = torch.Generator().manual_seed(3)
    return torch.rand(tokens, experts, generator=rng).topk(top_k).indices


CHOICES: dict[str, tuple[Tensor, int]] = {
    "one-token": (some(1, 3, 5), 5),
    "ragged": (some(23, 3, 5), 5),
    "every-expert": (some(7, 3, 3), 3),
    "idle-between": (some(20, 2, 3) * 2 + 1, 7),  # experts 1, 3 and 5
    "all-to-one": (torch.full((37, 1), 2), 4),
    "all-to-the-last": (torch.full((17, 1), 3), 4),  # a tile and one row
    "whole-tiles": (torch.arange(2).repeat(16)[:, None], 2),
    "one-row-each": (torch.arange(5)[:, None], 5),
    "one-expert": (torch.zeros(9, 1, dtype=torch.int64), 1),
}


@pytest.fixture(autouse=True)
def epilogue_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's tile is as wide as one part of the epilogue: cut it into two."""
    if DEVICE == "cpu":
        monkeypatch.setattr(grouped_gemm_triton, "EPILOGUE_COLUMNS", 16)


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


def on_device(routing: Routing, kernels: str = "triton") -> Callable[..., Tensor]:
    """`expert_mlp` of inputs on the CPU, computed on the device."""
    moved = Routing(**{name: x.to(DEVICE) for name, x in vars(routing).items()})
    return lambda x, weights, up, down: expert_mlp(
        *(t.to(DEVICE) for t in (x, weights, up, down)), moved, kernels
    ).cpu()


def reference(routing: Routing) -> Callable[..., Tensor]:
    return lambda x, weights, up, down: expert_mlp_ref(x, weights, up, down, routing)


def check_choice(name: str, dtype: torch.dtype, width: int = WIDTH, inner: int = INNER) -> None:
    ids, experts = CHOICES[name]
    routing = sort_by_expert(ids, experts)
    check(
        on_device(routing),
        reference(routing),
        inputs_of(ids, experts, width, inner),
        dtype,
        small=("weights",),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("name", CHOICES)
def test_output_and_every_gradient(name: str, dtype: torch.dtype) -> None:
    check_choice(name, dtype)


@pytest.mark.parametrize(
    ("width", "inner"),
    [
        (16, 32),  # whole tiles: no masks in the loop over K
        (32, 32),  # square: a transposed matrix would fit
        (8, 72),  # less than a tile; three tiles, the last a fourth full
        (12, 7),  # not multiples of 8: slow, but right
    ],
    ids=str,
)
def test_other_sizes(width: int, inner: int) -> None:
    check_choice("ragged", torch.float32, width, inner)


def test_strided_inputs() -> None:
    """x and the weights as slices of wider tensors, the matrices transposed, dout with rows apart."""
    ids, experts = CHOICES["ragged"]
    routing = sort_by_expert(ids, experts)
    tokens = ids.shape[0]
    inputs = normal(
        2,
        x=(tokens, WIDTH + 24),
        weights=(tokens, 6),
        up=(experts, WIDTH, INNER),
        down=(experts, INNER + 3, WIDTH),
    )

    def sliced(function: Any) -> Any:
        def run(x: Tensor, weights: Tensor, up: Tensor, down: Tensor) -> Tensor:
            down = down[:, 2 : 2 + INNER].transpose(1, 2)
            x, weights = x[:, 16 : 16 + WIDTH], weights[:, ::2]
            y = function(x, weights, up.transpose(1, 2), down)
            # Backward, dout is a column slice here and stride 0 below.
            return torch.cat([y, y.sum(1, keepdim=True).expand(-1, 8)], dim=1)

        return run

    check(sliced(on_device(routing)), sliced(reference(routing)), inputs, torch.float32)


def test_an_upstream_gradient_of_stride_zero() -> None:
    ids, experts = CHOICES["ragged"]
    routing = sort_by_expert(ids, experts)
    found = [x.float().requires_grad_() for x in inputs_of(ids, experts).values()]
    expected = [x.detach().double().requires_grad_() for x in found]
    on_device(routing)(*found).sum().backward()
    reference(routing)(*expected).sum().backward()
    for one, other in zip(found, expected, strict=True):
        assert_close_rel(one.grad, other.grad, 1e-6)


def test_no_tokens() -> None:
    """Outputs of no rows; the experts' gradients exist and are zero."""
    routing = sort_by_expert(torch.empty(0, 2, dtype=torch.int64), 3)
    inputs = {n: x.float() for n, x in inputs_of(torch.empty(0, 2), 3).items()}
    found = run(on_device(routing), inputs)
    assert found["y"].shape == found["x"].shape == (0, WIDTH)
    assert found["weights"].shape == (0, 2)
    assert not found["up"].any()
    assert not found["down"].any()


def test_idle_experts_have_a_gradient_and_it_is_zero() -> None:
    """pytorch#126616: never None, never what memory held before."""
    ids, experts = CHOICES["idle-between"]
    inputs = {n: x.float() for n, x in inputs_of(ids, experts).items()}
    found = run(on_device(sort_by_expert(ids, experts)), inputs)
    for name in ("up", "down"):
        busy = [bool(found[name][e].any()) for e in range(experts)]
        assert busy == [False, True, False, True, False, True, False], name


def test_weights_of_zero_have_a_gradient() -> None:
    """Why the saved activation is not multiplied by the routing weight."""
    ids, experts = CHOICES["ragged"]
    routing = sort_by_expert(ids, experts)
    inputs = inputs_of(ids, experts)
    inputs["weights"][:, 1] = 0
    check(on_device(routing), reference(routing), inputs, torch.float32)


@pytest.mark.parametrize(
    ("bad", "dtype"), [(torch.nan, torch.float32), (torch.inf, torch.bfloat16)], ids=["nan", "inf"]
)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_token_reads_nothing_of_another(bad: float, dtype: torch.dtype) -> None:
    """What is not finite in a row reaches its own results and its experts' gradients alone; 0 times NaN is NaN."""
    ids = torch.tensor([[0, 1], [2, 3], [3, 2], [1, 0], [4, 5]])
    function = on_device(sort_by_expert(ids, 6))
    inputs = {
        n: x.to(torch.promote_types(dtype, torch.float32) if n == "weights" else dtype)
        for n, x in inputs_of(ids, 6).items()
    }
    clean = run(function, inputs)
    others, strangers = [0, 2, 3, 4], [0, 1, 4, 5]
    for name in ("x", "weights"):
        dirty = run(function, inputs | {name: inputs[name].index_fill(0, torch.tensor(1), bad)})
        assert not dirty["y"][1].isfinite().all()
        for result in ("y", "x", "weights"):
            assert torch.equal(dirty[result][others], clean[result][others]), (name, result)
        for result in ("up", "down"):
            assert torch.equal(dirty[result][strangers], clean[result][strangers]), (name, result)
            assert not dirty[result][2:4].isfinite().all()


@pytest.mark.parametrize("matrix", ["up", "down"])
def test_an_expert_reads_nothing_of_another(matrix: str) -> None:
    """Tiles end in the middle of experts: a matrix of NaN reaches its expert's tokens alone."""
    ids = torch.tensor([[0], [1], [1], [2], [2], [2]])
    function = on_device(sort_by_expert(ids, 3))
    inputs = {n: x.float() for n, x in inputs_of(ids, 3).items()}
    clean = run(function, inputs)
    dirty = run(
        function, inputs | {matrix: inputs[matrix].index_fill(0, torch.tensor(1), torch.nan)}
    )
    others = [0, 3, 4, 5]
    for result in ("y", "x", "weights"):
        assert torch.equal(dirty[result][others], clean[result][others]), result
        assert dirty[result][1:3].isnan().any(), result
    for result in ("up", "down"):
        assert torch.equal(dirty[result][::2], clean[result][::2]), result


def test_two_runs_give_the_same_bits() -> None:
    ids, experts = CHOICES["ragged"]
    inputs = {n: x.float() for n, x in inputs_of(ids, experts).items()}
    first, second = (run(on_device(sort_by_expert(ids, experts)), inputs) for _ in range(2))
    for name, result in first.items():
        assert torch.equal(result, second[name]), name


def test_only_the_gradients_that_are_asked_for() -> None:
    ids, experts = CHOICES["ragged"]
    inputs = {n: x.float() for n, x in inputs_of(ids, experts).items()}
    routing = sort_by_expert(ids, experts)
    every = run(on_device(routing), inputs)
    for name in inputs:
        function = lambda **leaf: on_device(routing)(**(inputs | leaf))  # noqa: E731
        assert torch.equal(run(function, {name: inputs[name]})[name], every[name]), name


def test_the_sum_over_experts_is_float32_in_bfloat16() -> None:
    """257 = 256 + 1 takes nine bits: a bfloat16 sum of the three choices would stay at 256."""
    routing = sort_by_expert(torch.tensor([[0, 1, 2]]), 3)
    up = torch.ones(3, 1, 1, dtype=torch.bfloat16)
    down = torch.tensor([256.0, 1.0, 1.0], dtype=torch.bfloat16).view(3, 1, 1)
    x = torch.ones(1, 1, dtype=torch.bfloat16)
    assert on_device(routing)(x, torch.ones(1, 3), up, down).item() == 258.0


def test_router_gradients_come_from_float32_accumulators() -> None:
    """257 - 256 is 1: of <da, a>, with da = (257, -256), bfloat16 da would leave 256 - 256 = 0."""
    routing = sort_by_expert(torch.tensor([[0]]), 1)
    x = torch.ones(1, 2, dtype=torch.bfloat16)
    up = torch.tensor([[[1.0, 0.0], [1.0, 0.0]]], dtype=torch.bfloat16)  # a = (1, 1)
    down = torch.tensor([[[256.0, -256.0], [1.0, 0.0]]], dtype=torch.bfloat16)
    weights = torch.ones(1, 1, requires_grad=True)
    on_device(routing)(x, weights, up, down).sum().backward()
    assert weights.grad.item() == 1.0


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize(
    "counts", [(5,), (0, 3, 0), (1, 1, 1), (33, 0, 16, 1), (0, 0, 17), (0, 0)], ids=str
)
def test_grouped_gemm(counts: tuple[int, ...], dtype: torch.dtype) -> None:
    """Rows are a slice of a wider tensor, matrices a transposed view."""
    offsets = torch.tensor((0, *counts)).cumsum(0)
    inputs = normal(4, x=(sum(counts), 40), weight=(len(counts), 24, 40))
    x, weight = (t.to(dtype) for t in inputs.values())
    moved = [t.to(DEVICE) for t in (x[:, 8:32], weight.transpose(1, 2), offsets)]
    found = grouped_gemm(*moved, kernels="triton").cpu()
    exact, plain = (
        grouped_gemm_ref(x.to(d)[:, 8:32], weight.to(d).transpose(1, 2), offsets)
        for d in (torch.float64, dtype)
    )
    assert found.dtype == dtype
    assert_twice_as_close(found, plain, exact)


@pytest.mark.parametrize("out_dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("accumulate", [False, True], ids=["write", "accumulate"])
def test_weight_gradients_write_or_accumulate(accumulate: bool, out_dtype: torch.dtype) -> None:
    """Two micro-steps' worth: what was there is added to in float32, or overwritten; of an idle expert, too."""
    ids, experts = CHOICES["idle-between"]
    routing = sort_by_expert(ids, experts)
    inputs = normal(5, a=(ids.shape[0], 40), b=(ids.numel(), 24), before=(experts, 40, 24))
    a, b = (inputs[n].bfloat16() for n in ("a", "b"))
    out = inputs["before"].to(out_dtype)
    given = out.clone()
    moved = Routing(**{name: x.to(DEVICE) for name, x in vars(routing).items()})
    found = out.to(DEVICE)
    rows = Rows.of(moved)
    weight_gradient(a.to(DEVICE), b.to(DEVICE), rows, found, gather="a", accumulate=accumulate)

    def right(dtype: torch.dtype) -> Tensor:
        token = routing.order // ids.shape[1]
        bounds = routing.offsets.tolist()
        sums = [
            a[token[s:t]].to(dtype).T @ b[s:t].to(dtype)
            for s, t in zip(bounds[:-1], bounds[1:], strict=True)
        ]
        return torch.stack(sums) + given.to(dtype) * accumulate

    assert_twice_as_close(found.cpu(), right(torch.float32).to(out_dtype), right(torch.float64))
    idle = found.cpu()[::2]
    assert torch.equal(idle, given[::2] if accumulate else torch.zeros_like(idle))


def test_weight_gradients_need_contiguous_matrices() -> None:
    rows = Rows(2, torch.tensor([0, 2]), torch.arange(2))
    out = torch.zeros(1, 4, 3).transpose(1, 2)
    with pytest.raises(ValueError, match="not contiguous"):
        weight_gradient(torch.ones(2, 3), torch.ones(2, 4), rows, out, gather="a")


def test_nothing_is_written_past_the_end() -> None:
    """72 columns are two tiles and a fourth of one: the parts of the sums that lie behind stay as they were."""
    count, inner = 5, 72
    values = normal(8, x=(count, 8), act=(count, inner), weight=(1, inner, 8), w=(count, 1))
    x, act, weight, w = (t.float().to(DEVICE) for t in values.values())
    columns = grouped_gemm_triton.EPILOGUE_COLUMNS
    parts = torch.full((128 // columns, count), torch.nan, device=DEVICE)
    rows = Rows(count, torch.tensor([0, count], device=DEVICE), torch.arange(count, device=DEVICE))
    act = act.abs()
    rows_product("dgrad_down", x, weight, rows, Epilogue("backward", w, act, None, parts))
    used = -(-inner // columns)
    assert_close_rel(parts[:used].sum(0), (x @ weight[0].T * act).sum(1), 1e-6)
    assert parts[used:].isnan().all()


FAR = 2**28  # a row of 8 values here begins at element 2^31


def untouched(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor of pages that take no memory until they are written."""
    if DEVICE == "cuda":
        return torch.zeros(shape, dtype=dtype, device=DEVICE)
    size = torch.empty(0, dtype=dtype).element_size()
    memory = np.empty(int(np.prod(shape)) * size, dtype=np.uint8)  # torch.empty is filled with NaN
    return torch.from_numpy(memory).view(dtype).view(shape)


def apart(*shape: int, seed: int) -> Tensor:
    """Random bfloat16 slices 2^30 elements from each other: the third begins behind 2^31."""
    strides = torch.empty(shape[1:]).stride()
    memory = untouched((shape[0] - 1) * (2**30 + 64) + torch.Size(shape[1:]).numel())
    found = memory.as_strided(shape, (2**30 + 64, *strides))
    return found.copy_(normal(seed, x=shape)["x"])


def test_rows_past_two_to_the_31(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows 2^28 and behind of 8 values: inputs, outputs and what the epilogue reads and writes."""
    offsets = torch.tensor([FAR, FAR + 2, FAR + 5], device=DEVICE)
    x, act, y, scaled = (untouched(FAR + 5, 8) for _ in range(4))
    order = untouched(FAR + 5, dtype=torch.int64)
    parts = untouched(1, FAR + 5, dtype=torch.float32)
    values = normal(6, x=(5, 8), act=(5, 8), tokens=(5, 8), weight=(2, 8, 8), w=(5, 1))
    near = {name: t.bfloat16().to(DEVICE) for name, t in values.items()}
    x[FAR:], act[FAR:], w = near["x"], near["act"].abs(), near["w"].float()
    order[FAR:] = torch.arange(5)
    rows = Rows(FAR + 5, offsets, order)
    table = torch.tensor([[0, FAR], [1, FAR + 2], [-1, 0]], dtype=torch.int32, device=DEVICE)
    with monkeypatch.context() as patch:
        patch.setattr(grouped_gemm_triton, "tile_table", lambda *_, **__: table)
        patch.setattr(torch, "empty", lambda *_, **__: y)
        rows_product("up", x, near["weight"], rows, Epilogue("backward", w, act, scaled, parts))
    a, x_near = act[FAR:].float(), x[FAR:].float()
    da = torch.cat(
        [x_near[:2] @ near["weight"][0].float().T, x_near[2:] @ near["weight"][1].float().T]
    )
    assert_close_rel(y[FAR:], 2 * a.sqrt() * w * da, 1e-2, "dz")
    assert_close_rel(scaled[FAR:], a * w, 1e-2, "scaled")
    assert_close_rel(parts[0, FAR:], (da * a).sum(1), 1e-5, "dw")

    out = torch.zeros(2, 8, 8, device=DEVICE)
    weight_gradient(near["tokens"], x, rows, out, gather="a")
    assert_close_rel(out[1], near["tokens"][2:].float().T @ x_near[2:], 1e-5, "wgrad")

    inverse = torch.tensor([[FAR, FAR + 4], [FAR + 3, FAR + 1]], device=DEVICE)
    combined = experts_triton.combine(x, Routing(inverse, order, inverse, offsets))
    assert_close_rel(combined, torch.stack([x_near[0] + x_near[4], x_near[3] + x_near[1]]), 1e-2)


def test_tokens_and_experts_past_two_to_the_31() -> None:
    """Rows of tokens, and the experts' matrices read and written, each 2^30 elements behind the one before."""
    x, weight, out = (
        apart(*shape, seed=n) for n, shape in enumerate([(3, 8), (3, 8, 8), (3, 8, 8)])
    )
    routing = sort_by_expert(torch.tensor([[2], [1], [2]], device=DEVICE), 3)
    rows = Rows.of(routing)
    y = rows_product("up", x, weight, rows, gather=True)
    expected = torch.stack([weight[e].float() @ x[t].float() for t, e in ((1, 1), (0, 2), (2, 2))])
    assert_close_rel(y, expected, 1e-2)
    weight_gradient(x, y, rows, out, gather="a")
    expected = x[0].float().outer(y[1].float()) + x[2].float().outer(y[2].float())
    assert_close_rel(out[2], expected, 1e-2)
    assert not out[0].any()
