"""The Triton kernels of the linear cross-entropy: in the interpreter, or on a GPU where there is one."""

import mmap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.shapes import D, T, V
from hymoe.kernels import loss, loss_triton
from hymoe.kernels.launch import KNOWN_TARGETS, recording
from hymoe.kernels.loss import (
    IGNORE,
    linear_cross_entropy,
    linear_cross_entropy_ref,
    per_token_loss,
)
from tests.close import assert_close_rel, relative_error
from tests.kernel_check import check, normal, run
from tests.kernels.test_loss import Largest, labels_of, plain

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NORESERVE = 0x4000  # Linux's flag, which mmap names from Python 3.13 on: only pages that are touched need memory
DTYPES = (torch.float32, torch.bfloat16)
# Tokens, width, words. An interpreted tile has 16 rows (of dweight: words), 32 columns, 16 deep, in spans of 8 columns.
SIZES = {
    "one-row": (1, 8, 5),
    "one-tile": (16, 16, 32),
    "nothing-divides": (37, 24, 41),
    "odd-width": (18, 13, 33),
    "many-tiles": (35, 24, 100),
}


def on_device(function: Callable[..., Tensor], labels: Tensor, *args: Any, **options: Any) -> Any:
    """Of hidden and weight that lie on the CPU."""
    labels = labels.to(DEVICE)
    return lambda hidden, weight: function(
        hidden.to(DEVICE), weight.to(DEVICE), labels, *args, **options
    ).cpu()


def ours(labels: Tensor, **options: Any) -> Any:
    return on_device(linear_cross_entropy, labels, kernels="triton", **options)


def with_labels(function: Any, labels: Tensor, **options: Any) -> Any:
    return lambda hidden, weight: function(hidden, weight, labels, **options)


def check_all(
    inputs: dict[str, Tensor], labels: Tensor, dtype: torch.dtype, reduction: str = "sum"
) -> None:
    check(
        ours(labels, reduction=reduction),
        with_labels(linear_cross_entropy_ref, labels, reduction=reduction),
        inputs,
        dtype,
        plain=with_labels(plain, labels, reduction=reduction),
    )


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "chunk_rows", lambda weight: 18)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", loss.REDUCTIONS)
@pytest.mark.parametrize(("tokens", "width", "words"), SIZES.values(), ids=SIZES)
def test_loss_and_gradients(
    tokens: int, width: int, words: int, reduction: str, dtype: torch.dtype
) -> None:
    labels = labels_of(tokens, "all" if tokens == 1 else "half", words)
    inputs = normal(1, hidden=(tokens, width), weight=(words, width))
    check_all(inputs, labels, dtype, reduction)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", loss.REDUCTIONS)
@pytest.mark.parametrize("tokens", [18, 19, 37])
def test_several_chunks(tokens: int, reduction: str, dtype: torch.dtype) -> None:
    """One that is full, two of nearly equal size, three; the buffer's rows past a chunk hold the one before."""
    labels = labels_of(tokens, "all")
    check_all(normal(2, hidden=(tokens, 24), weight=(41, 24)), labels, dtype, reduction)


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_scale_on_the_device(
    dtype: torch.dtype, reduction: str, scale_dtype: torch.dtype
) -> None:
    labels, scale = labels_of(21), torch.tensor(700, dtype=scale_dtype, device=DEVICE)
    scaled = lambda f, by: lambda **x: f(**x) / by  # noqa: E731
    check(
        ours(labels, reduction=reduction, scale=scale),
        scaled(with_labels(linear_cross_entropy_ref, labels, reduction=reduction), 700),
        normal(3, hidden=(21, 16), weight=(41, 16)),
        dtype,
        plain=scaled(with_labels(plain, labels, reduction=reduction), 700),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["large", "equal", "one-word-far-above", "one-span-far-below"])
def test_extreme_logits(kind: str, dtype: torch.dtype) -> None:
    inputs = normal(4, hidden=(9, 16), weight=(70, 16))
    if kind == "large":  # up to about 80 and -80
        inputs["hidden"] *= 80 / (inputs["hidden"] @ inputs["weight"].T).abs().max()
    elif kind == "equal":
        inputs["weight"][:] = inputs["weight"][0]
    elif kind == "one-word-far-above":
        inputs["weight"][33] = 20 * inputs["hidden"][2] / inputs["hidden"][2].square().sum()
    else:  # exp of the difference to the row's peak is 0 in float32
        inputs["hidden"][:, 0], inputs["weight"][:, 0] = 40.0, 0.0
        inputs["weight"][8:16, 0] = -8.0
    labels = labels_of(9, "all", 70)
    labels[4] = 9
    check_all(inputs, labels, dtype)


def test_a_sure_model_keeps_its_gradient() -> None:
    """p of the target is 1 to the last bit of float32, and p - 1 is right all the same."""
    words = 40
    hidden = (20 * torch.eye(words)[[3, 39]]).bfloat16()
    labels = torch.tensor([3, 39])
    inputs = {"hidden": hidden, "weight": torch.eye(words, dtype=torch.bfloat16)}
    found = run(ours(labels), inputs)
    exact = run(
        with_labels(linear_cross_entropy_ref, labels), {n: x.double() for n, x in inputs.items()}
    )
    for name in ("hidden", "weight"):
        assert exact[name].abs().max() < 1e-5
        assert relative_error(found[name], exact[name]) < 2**-7
    usual = run(with_labels(plain, labels), inputs)
    assert relative_error(usual["hidden"], exact["hidden"]) > 2**-7  # the measure sees it


@pytest.mark.parametrize("row", [0, 6, 12])
def test_one_supervised_row(row: int) -> None:
    labels = torch.full((13,), IGNORE)
    labels[row] = 40
    check_all(normal(5, hidden=(13, 16), weight=(41, 16)), labels, torch.bfloat16)


@pytest.mark.parametrize("reduction", loss.REDUCTIONS)
@pytest.mark.parametrize("count", [None, 0], ids=["asks", "knows"])
@pytest.mark.parametrize("tokens", [0, 6])
def test_nothing_supervised(tokens: int, count: int | None, reduction: str) -> None:
    """Zero and connected, also where the scale, the count over all ranks, is zero itself."""
    scale = None if reduction == "mean" else torch.zeros((), device=DEVICE)
    leaves = [torch.ones(n, 8, device=DEVICE, requires_grad=True) for n in (tokens, 11)]
    labels = torch.full((tokens,), IGNORE, device=DEVICE)
    found = linear_cross_entropy(*leaves, labels, count, "triton", reduction=reduction, scale=scale)
    assert not found.any()
    found.sum().backward()
    for x in leaves:
        assert torch.equal(x.grad, torch.zeros_like(x))


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("reduction", loss.REDUCTIONS)
@pytest.mark.parametrize("bad", [41, -1, -101, 2**31 + 7], ids=str)
def test_a_target_outside_the_vocabulary_is_nan(bad: int, reduction: str) -> None:
    labels = labels_of(40, "half").to(DEVICE)
    labels[14] = bad
    hidden, weight = normal(6, hidden=(40, 16), weight=(41, 16)).values()
    leaves = [x.float().to(DEVICE).requires_grad_() for x in (hidden, weight)]
    found = linear_cross_entropy(*leaves, labels, kernels="triton", reduction=reduction)
    found.sum().backward()
    at = torch.arange(40, device=DEVICE) == 14
    assert torch.equal(found.isnan(), at if reduction == "none" else found.new_tensor(True).bool())
    assert torch.equal(leaves[0].grad.isnan(), at[:, None].expand(40, 16))
    assert leaves[1].grad.isnan().all()
    rows = per_token_loss(*leaves, labels, "triton")
    assert torch.nonzero(rows.isnan()).tolist() == [[14]]


@pytest.mark.usefixtures("small_chunks")
def test_strided_inputs() -> None:
    """Rows apart, and columns: a slice of hidden states, a transposed weight, every second label."""
    labels = torch.stack([labels_of(30), labels_of(30, "all")], dim=1)[:, 0]

    def sliced(function: Any) -> Any:
        return lambda hidden, weight: function(hidden=hidden[:, 3:15], weight=weight.T)

    inputs = normal(7, hidden=(30, 17), weight=(12, 41))
    reference = with_labels(linear_cross_entropy_ref, labels)
    check(sliced(ours(labels)), sliced(reference), inputs, torch.float32)


def test_rows_without_a_target_are_not_read() -> None:
    labels = labels_of(30, "half")
    inputs = {n: x.float() for n, x in normal(8, hidden=(30, 16), weight=(41, 16)).items()}
    first = run(ours(labels), inputs)
    inputs["hidden"][labels == IGNORE] = torch.nan
    second = run(ours(labels), inputs)
    for name, one in first.items():
        assert torch.equal(one, second[name]), name


@pytest.mark.usefixtures("small_chunks")
def test_a_missing_gradient_and_a_loss_alone_change_nothing() -> None:
    labels = labels_of(40).to(DEVICE)
    inputs = normal(9, hidden=(40, 16), weight=(41, 16)).values()
    inputs = [x.bfloat16().to(DEVICE) for x in inputs]
    full = [x.clone().requires_grad_() for x in inputs]
    expected = linear_cross_entropy(*full, labels, kernels="triton")
    expected.backward()
    assert torch.equal(linear_cross_entropy(*inputs, labels, kernels="triton"), expected)
    for trained in range(2):
        some = [x.clone() for x in inputs]
        some[trained].requires_grad_()
        linear_cross_entropy(*some, labels, kernels="triton").backward()
        assert torch.equal(some[trained].grad, full[trained].grad)
        assert some[1 - trained].grad is None


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("reduction", loss.REDUCTIONS)
def test_two_runs_give_the_same_bits(reduction: str) -> None:
    labels = labels_of(20, "all")
    inputs = {n: x.bfloat16() for n, x in normal(10, hidden=(20, 16), weight=(41, 16)).items()}
    first, second = (run(ours(labels, reduction=reduction), inputs) for _ in range(2))
    for name, one in first.items():
        assert torch.equal(one, second[name]), name


def far_apart(shape: tuple[int, int], stride: int, dtype: torch.dtype) -> Tensor:
    """Zeros, rows `stride` values apart, with as much memory before them as between them, none of it in use."""
    before = stride * (shape[0] - 1)
    size = 2 * before + shape[1]
    if DEVICE == "cuda":
        memory = torch.zeros(size, dtype=dtype, device=DEVICE)
    else:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
        memory = torch.frombuffer(mmap.mmap(-1, size * dtype.itemsize, flags=flags), dtype=dtype)
    return memory.as_strided(shape, (stride, 1), before)


def test_rows_past_32_bits() -> None:
    """Rows 2^30 values apart in the weight and in the buffer: an offset that wraps meets zeros, or loses its result."""
    rows, width, words = 4, 16, 5
    inputs = normal(11, hidden=(rows, width), weight=(words, width)).values()
    hidden, weight = (x.bfloat16().to(DEVICE) for x in inputs)
    label = torch.tensor([4, 0, 3, 1], device=DEVICE)
    far_weight = far_apart((words, width), 1 << 30, torch.bfloat16).copy_(weight)
    buffers = [
        hidden.new_zeros(rows, loss_triton.ALIGN),
        far_apart((rows, loss_triton.ALIGN), 1 << 30, torch.bfloat16),
    ]
    results = []
    for buffer, w in zip(buffers, (weight, far_weight), strict=True):
        dz = buffer[:, :words]
        losses = loss_triton.row_losses(hidden, w, label, dz, None)
        dweight = hidden.new_zeros(words, width, dtype=torch.float32)
        loss_triton.add_outer(dweight, dz, hidden, True)
        results.append((losses, dz, dweight))
    for near, far in zip(*results, strict=True):
        assert near.any()
        assert torch.equal(near, far)


@pytest.mark.parametrize("arch", KNOWN_TARGETS)
@pytest.mark.parametrize("form", [{}, {"reduction": "mean"}, {"reduction": "none"}], ids=str)
def test_the_real_shapes_never_ask_the_device(form: dict[str, str], arch: int) -> None:
    """A meta tensor has no values to ask for. The largest tensor is a chunk or the float32 gradient of the weight."""
    leaves = [
        torch.zeros(n, D, dtype=torch.bfloat16, device="meta", requires_grad=True) for n in (T, V)
    ]
    labels = torch.empty(T, dtype=torch.int64, device="meta")
    with recording(KNOWN_TARGETS[arch]) as launches, Largest() as seen:
        linear_cross_entropy(*leaves, labels, T, "triton", **form).sum().backward()
    assert 2 * 4096 * V <= seen.bytes <= max(loss.CHUNK_BYTES, 4 * V * D)
    names = [one.kernel.__name__ for one in launches]
    assert names.count("_dweight_kernel") == T // 4096
    assert names.count("_logits_kernel") == T // 4096 * (2 if form == {"reduction": "none"} else 1)
    products = [one for one in launches if one.kernel.__name__ != "_rows_kernel"]
    assert all(one.grid[0] <= 2 * KNOWN_TARGETS[arch].num_sms for one in products)


@pytest.mark.gpu
@pytest.mark.parametrize("reduction", loss.REDUCTIONS)
def test_a_gpu_is_not_waited_for(reduction: str) -> None:
    inputs = normal(12, hidden=(40, 16), weight=(41, 16)).values()
    leaves = [x.bfloat16().to(DEVICE).requires_grad_() for x in inputs]
    labels = labels_of(40).to(DEVICE)
    count = int((labels != IGNORE).sum())
    scale = None if reduction == "mean" else torch.full((), 9.0, device=DEVICE)

    def step() -> Tensor:
        options = {"reduction": reduction, "scale": scale}
        found = linear_cross_entropy(*leaves, labels, count, "triton", **options)
        found.sum().backward()
        return found

    step()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_close_rel(found, linear_cross_entropy(*leaves, labels, reduction=reduction), 1)
