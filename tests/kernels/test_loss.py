"""Linear layer and cross-entropy in one, against all logits at once."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hymoe.kernels import loss
from hymoe.kernels.loss import (
    IGNORE,
    linear_cross_entropy,
    linear_cross_entropy_ref,
    per_token_loss,
)
from tests.close import assert_close_rel
from tests.kernel_check import DTYPE_IDS, DTYPES, check, normal

WIDTH, WORDS = 12, 41
MASKS = {
    "all": lambda t: t >= 0,
    "half": lambda t: t % 2 == 0,
    "spans": lambda t: t % 7 > 3,
    "first": lambda t: t == 0,
    "last": lambda t: t == t.max(),
}


def labels_of(tokens: int, mask: str = "spans", words: int = WORDS) -> Tensor:
    """Targets with both ends of the vocabulary among them."""
    rng = torch.Generator().manual_seed(5)
    labels = torch.randint(words, (tokens,), generator=rng)
    labels[::3] = words - 1
    labels[1::5] = 0
    return labels.masked_fill(~MASKS[mask](torch.arange(tokens)), IGNORE)


def inputs_of(tokens: int, words: int = WORDS) -> dict[str, Tensor]:
    return normal(1, hidden=(tokens, WIDTH), weight=(words, WIDTH))


def plain(hidden: Tensor, weight: Tensor, labels: Tensor, reduction: str = "sum") -> Tensor:
    """What plain torch does: logits in the model's dtype, cross-entropy in float32."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    logits = functional.linear(hidden, weight).to(wide)
    return functional.cross_entropy(logits, labels, ignore_index=IGNORE, reduction=reduction)


def with_labels(function: Any, labels: Tensor, **options: Any) -> Any:
    return lambda hidden, weight: function(hidden, weight, labels, **options)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "chunk_rows", lambda weight: 5)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("tokens", [1, 63, 200])
def test_loss_and_gradients(tokens: int, mask: str, dtype: torch.dtype) -> None:
    labels = labels_of(tokens, mask)
    if not (labels != IGNORE).any():
        labels[-1] = WORDS - 1
    check(
        with_labels(linear_cross_entropy, labels),
        with_labels(linear_cross_entropy_ref, labels),
        inputs_of(tokens),
        dtype,
        plain=with_labels(plain, labels),
    )


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("tokens", [4, 5, 6, 48])
def test_several_chunks(tokens: int, dtype: torch.dtype) -> None:
    """Below, at and above one chunk; many, the last one not full."""
    labels = labels_of(tokens, "all")
    check(
        with_labels(linear_cross_entropy, labels),
        with_labels(linear_cross_entropy_ref, labels),
        inputs_of(tokens),
        dtype,
        plain=with_labels(plain, labels),
    )


@pytest.mark.usefixtures("small_chunks")
def test_strided_inputs() -> None:
    labels = torch.stack([labels_of(30), labels_of(30, "all")], dim=1)[:, 0]
    inputs = normal(2, hidden=(30, WIDTH + 5), weight=(WIDTH, WORDS))

    def sliced(function: Any) -> Any:
        return lambda hidden, weight: function(hidden[:, 3 : 3 + WIDTH], weight.T, labels)

    check(sliced(linear_cross_entropy), sliced(linear_cross_entropy_ref), inputs, torch.float32)


def test_large_logits_do_not_overflow() -> None:
    labels = labels_of(20, "all")
    inputs = inputs_of(20)
    inputs["hidden"] *= 1000
    check(
        with_labels(linear_cross_entropy, labels),
        with_labels(linear_cross_entropy_ref, labels),
        inputs,
        torch.float32,
    )


@pytest.mark.parametrize("count", [None, 0], ids=["asks", "knows"])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_nothing_supervised(dtype: torch.dtype, count: int | None) -> None:
    """Zero and connected: no NaN, no missing gradient."""
    inputs = {n: x.to(dtype).requires_grad_() for n, x in inputs_of(6).items()}
    found = linear_cross_entropy(**inputs, labels=torch.full((6,), IGNORE), count=count)
    assert found.item() == 0
    found.backward()
    for name, x in inputs.items():
        assert torch.equal(x.grad, torch.zeros_like(x)), name
    assert not per_token_loss(*inputs.values(), torch.full((6,), IGNORE)).any()


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("bad", [WORDS, WORDS + 1000, -1, -101], ids=str)
def test_a_target_outside_the_vocabulary_is_nan(bad: int) -> None:
    labels = labels_of(30, "half")
    labels[14] = bad
    hidden, weight = (x.float().requires_grad_() for x in inputs_of(30).values())
    found = linear_cross_entropy(hidden, weight, labels)
    assert found.isnan()
    found.backward()
    assert hidden.grad[14].isnan().all()
    assert hidden.grad[torch.arange(30) != 14].isfinite().all()
    assert weight.grad.isnan().all()
    with torch.no_grad():
        assert linear_cross_entropy(hidden, weight, labels).isnan()
    rows = per_token_loss(hidden, weight, labels)
    assert torch.nonzero(rows.isnan()).tolist() == [[14]]


@pytest.mark.usefixtures("small_chunks")
def test_per_token_loss() -> None:
    labels = labels_of(30)
    hidden, weight = inputs_of(30).values()
    found = per_token_loss(hidden, weight, labels)
    expected = functional.cross_entropy(hidden @ weight.T, labels, reduction="none")
    assert_close_rel(found, expected, 1e-12)
    assert not found[labels == IGNORE].any()
    assert_close_rel(linear_cross_entropy(hidden, weight, labels), found.sum(), 1e-12)


@pytest.mark.usefixtures("small_chunks")
def test_a_known_count_and_a_missing_gradient_change_nothing() -> None:
    labels = labels_of(30)
    count = int((labels != IGNORE).sum())
    hidden, weight = (x.float() for x in inputs_of(30).values())
    expected = linear_cross_entropy(hidden, weight, labels)
    full = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    found = linear_cross_entropy(*full, labels, count=count)
    found.backward()
    assert_close_rel(found, expected, 1e-6)
    for trained in range(2):  # the other one is frozen
        some = [hidden.clone(), weight.clone()]
        some[trained].requires_grad_()
        linear_cross_entropy(*some, labels).backward()
        assert torch.equal(some[trained].grad, full[trained].grad)
        assert some[1 - trained].grad is None


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self.bytes = max(self.bytes, x.numel() * x.element_size())
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_no_tensor_of_all_logits_exists(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, words, chunk = 600, 500, 16
    monkeypatch.setattr(loss, "chunk_rows", lambda weight: chunk)
    hidden, weight = (x.to(dtype).requires_grad_() for x in inputs_of(tokens, words).values())
    labels = labels_of(tokens, "all", words)
    with Largest() as ours:
        linear_cross_entropy(hidden, weight, labels).backward()
    with Largest() as all_logits:
        linear_cross_entropy_ref(hidden, weight, labels).backward()
    allowed = 4 * max(chunk * words, words * WIDTH, tokens * WIDTH)
    assert ours.bytes <= allowed
    assert all_logits.bytes >= 4 * tokens * words > 20 * allowed  # the measure sees what it should


def test_a_chunk_has_a_row_and_not_more_than_its_bytes() -> None:
    for words in (41, 131_072, 1 << 40):
        rows = loss.chunk_rows(torch.empty(words, 1, device="meta"))
        assert rows == 1 or 1 < 4 * rows * words <= loss.CHUNK_BYTES


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_rows_without_a_target_are_not_read(dtype: torch.dtype) -> None:
    """NaN there would reach the gradient of the weight even through a factor of 0."""
    labels = labels_of(70, "half")
    hidden, weight = (x.to(dtype) for x in inputs_of(70).values())
    found = []
    for value in (1.0, torch.nan):
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        leaves[0].data[labels == IGNORE] = value
        total = linear_cross_entropy(*leaves, labels)
        total.backward()
        found.append([total, leaves[0].grad, leaves[1].grad])
        assert not leaves[0].grad[labels == IGNORE].any()
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_shapes_that_do_not_fit_are_refused() -> None:
    hidden, weight = torch.ones(3, 4), torch.ones(7, 4)
    with pytest.raises(ValueError, match=r"linear_cross_entropy weight: expected shape \(\*, 4\)"):
        linear_cross_entropy(hidden, torch.ones(7, 5), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"linear_cross_entropy labels: expected shape \(3\)"):
        linear_cross_entropy(hidden, weight, torch.zeros(4, dtype=torch.int64))


def test_a_wrong_count_of_supervised_rows_is_refused() -> None:
    hidden, weight = torch.randn(4, 8), torch.randn(11, 8)
    labels = torch.tensor([1, -100, 3, 4])
    right = linear_cross_entropy(hidden, weight, labels, 3)
    assert torch.equal(right, linear_cross_entropy(hidden, weight, labels))
    for count in (2, 4):
        with pytest.raises(ValueError, match=f"3 labels are not -100, the host counted {count}"):
            linear_cross_entropy(hidden, weight, labels, count)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("reduction", loss.REDUCTIONS)
@pytest.mark.parametrize("scale", [None, 700.0, 700], ids=["no-scale", "scale", "count"])
def test_forms(reduction: str, scale: float | None, dtype: torch.dtype) -> None:
    """For "none" `check` gives every row an upstream gradient of its own."""
    if reduction == "mean" and scale is not None:
        return
    labels = labels_of(48)
    options = {"reduction": reduction}
    divided = lambda f: lambda **x: f(**x) / (scale or 1)  # noqa: E731
    check(
        with_labels(
            linear_cross_entropy,
            labels,
            scale=None if scale is None else torch.tensor(scale),
            **options,
        ),
        divided(with_labels(linear_cross_entropy_ref, labels, **options)),
        inputs_of(48),
        dtype,
        plain=divided(with_labels(plain, labels, **options)),
    )


@pytest.mark.parametrize("reduction", loss.REDUCTIONS)
def test_nothing_supervised_in_every_form(reduction: str) -> None:
    """Also where the scale, a count over all ranks, is zero."""
    inputs = {n: x.requires_grad_() for n, x in inputs_of(6).items()}
    scale = None if reduction == "mean" else torch.zeros(())
    labels = torch.full((6,), IGNORE)
    found = linear_cross_entropy(**inputs, labels=labels, reduction=reduction, scale=scale)
    assert not found.any()
    found.sum().backward()
    for name, x in inputs.items():
        assert torch.equal(x.grad, torch.zeros_like(x)), name


def test_a_gradient_in_bfloat16_keeps_the_precision_of_its_upstream_factor() -> None:
    """1/700 has no BF16: were it rounded first, every gradient would be off by the same 0.1 %."""
    labels = labels_of(48)
    leaves = [x.bfloat16().requires_grad_() for x in inputs_of(48).values()]
    linear_cross_entropy(*leaves, labels).backward()
    whole = [x.grad.double() for x in leaves]
    factor = torch.tensor(1 / 700)
    assert (factor.bfloat16().double() * 700 - 1).abs() > 1e-3
    for x in leaves:
        x.grad = None
    (linear_cross_entropy(*leaves, labels) * factor).backward()
    for x, gradient in zip(leaves, whole, strict=True):
        ratio = (x.grad.double() * gradient).sum() / (gradient * gradient).sum()
        assert abs(ratio.item() * 700 - 1) < 5e-4


@pytest.mark.usefixtures("small_chunks")
def test_blocks_of_the_weights_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """In BF16 a CPU adds it up in blocks of words, here of 5, the last one short."""
    labels = labels_of(30)
    leaves = [x.bfloat16().requires_grad_() for x in inputs_of(30).values()]
    found = []
    for size in (loss.CPU_TILE_BYTES, 4 * WIDTH * 5):
        monkeypatch.setattr(loss, "CPU_TILE_BYTES", size)
        found.append(torch.autograd.grad(linear_cross_entropy(*leaves, labels), leaves))
    for one, other in zip(*found, strict=True):
        assert_close_rel(one, other, 2**-8)


def test_chunks_are_of_nearly_equal_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "chunk_rows", lambda weight: 10)
    for count, sizes in {0: [], 1: [1], 10: [10], 11: [6, 5], 25: [9, 9, 7]}.items():
        slices = loss._row_slices(torch.zeros(count), torch.zeros(3, 2))
        assert [s.stop - s.start for s in slices] == sizes
        assert [s.start for s in slices[1:]] == [s.stop for s in slices[:-1]]


def test_rows_of_a_count_that_no_one_checks() -> None:
    """A GPU is not asked: what the host counted wrongly shows as NaN, never as a loss of fewer rows."""
    labels = torch.tensor([1, IGNORE, 3, 4])
    rows, targets = loss.counted_rows(labels, 3)
    assert (rows.tolist(), targets.tolist()) == ([0, 2, 3], [1, 3, 4])
    for count in (0, 1, 2, 4, 9):
        rows, targets = loss.counted_rows(labels, count)
        assert (len(rows), targets.tolist()) == (count, [-1] * count)
        assert ((rows >= 0) & (rows < 4)).all()


def test_arguments_that_do_not_fit_are_refused() -> None:
    hidden, weight, labels = torch.ones(3, 4), torch.ones(7, 4), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"hidden is torch.float32 and weight is torch.bfloat16"):
        linear_cross_entropy(hidden, weight.bfloat16(), labels)
    with pytest.raises(ValueError, match="reduction = 'average'; expected one of sum, mean, none"):
        linear_cross_entropy(hidden, weight, labels, reduction="average")
    with pytest.raises(ValueError, match="a mean has its own divisor"):
        linear_cross_entropy(hidden, weight, labels, reduction="mean", scale=torch.ones(()))
    with pytest.raises(ValueError, match=r"linear_cross_entropy scale: expected shape \(\)"):
        linear_cross_entropy(hidden, weight, labels, scale=torch.ones(1))
