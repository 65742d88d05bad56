"""The convolution's Triton kernels, in the interpreter where there is no GPU."""

import pytest
import torch

from hymoe.kernels import conv1d_triton
from hymoe.kernels.conv1d import causal_conv1d, causal_conv1d_ref
from hymoe.kernels.packed import Packed
from tests.close import assert_close_rel
from tests.kernel_check import RAGGED, assert_documents_alone, check, normal

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CHANNELS = 10
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def triton_conv1d(x, weight, bias, lengths: tuple[int, ...]) -> torch.Tensor:
    """From the CPU and back, so that references and draws are the same with a GPU."""
    given = [None if t is None else t.to(DEVICE) for t in (x, weight, bias)]
    return causal_conv1d(*given, Packed.from_lengths(lengths, DEVICE), kernels="triton").cpu()


def compare(lengths: tuple[int, ...], dtype: torch.dtype, taps: int = 4, bias: bool = True) -> None:
    """x is a column slice of a wider tensor, as in the model."""
    channels = CHANNELS
    inputs = normal(1, wide=(sum(lengths), channels + 5), weight=(channels, taps), b=(channels,))
    if not bias:
        del inputs["b"]
    packed = Packed.from_lengths(lengths)
    columns = slice(3, 3 + channels)

    def kernel(wide, weight, b=None):
        return triton_conv1d(wide.to(DEVICE)[:, columns], weight, b, lengths)

    def reference(wide, weight, b=None):
        return causal_conv1d_ref(wide[:, columns], weight, b, packed)

    check(kernel, reference, inputs, dtype, small=("b",))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("lengths", RAGGED.values(), ids=RAGGED)
def test_ragged_documents(lengths: tuple[int, ...], dtype: torch.dtype) -> None:
    compare(lengths, dtype)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("taps", [1, 2, 3])
def test_fewer_taps(taps: int, bias: bool) -> None:
    compare((2, 9, 1, 6), torch.float32, taps, bias)


@pytest.mark.parametrize("part", [1, 2, 3, 5, 64])
def test_parts(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts shorter than the taps, boundaries on, before and behind the edges of parts."""
    monkeypatch.setattr(conv1d_triton, "LEAST_PART", part)
    compare((4, 1, 5, 2, 1, 3), torch.float32)


def test_blocks_of_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several, the last one ragged, and more of them than there are programs along the rows."""
    monkeypatch.setattr(conv1d_triton, "BLOCK_C", 4)
    compare((7, 13), torch.float32)


@pytest.mark.parametrize("lengths", [(4, 5), (1, 2, 3, 9)], ids=str)
def test_documents_do_not_meet(lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conv1d_triton, "LEAST_PART", 4)
    given = normal(2, x=(sum(lengths), CHANNELS), weight=(CHANNELS, 4), bias=(CHANNELS,))
    weight, bias = given["weight"].float(), given["bias"].float()
    assert_documents_alone(
        lambda lengths, rows: triton_conv1d(rows["x"], weight, bias, lengths),
        lambda lengths: lengths,
        lengths,
        {"x": given["x"].float()},
    )


def test_a_token_without_a_tap_may_be_infinite() -> None:
    """Zero times infinity would be NaN."""
    given = {name: x.float() for name, x in normal(3, x=(9, 4), weight=(4, 2)).items()}
    given["x"][3] = torch.inf
    y = triton_conv1d(given["x"], given["weight"], None, (9,))
    assert torch.isfinite(y[5:]).all()
    assert not torch.isfinite(y[3:5]).any()


def test_strides_of_any_kind() -> None:
    """Columns that lie apart, a weight that is a slice, an upstream gradient without memory of its own."""
    lengths = (5, 12)
    given = normal(4, x=(6, 17), weight=(6, 8), bias=(6,))
    leaves = [t.float().to(DEVICE).requires_grad_() for t in given.values()]

    def gradients(function, *options, **named):
        x, weight, bias = leaves
        y = function(x.T, weight[:, ::2], bias, *options, **named)
        return torch.autograd.grad(y.sum(0), leaves, torch.ones(6, device=DEVICE))

    packed = Packed.from_lengths(lengths, DEVICE)
    found = gradients(causal_conv1d, packed, kernels="triton")
    for one, right in zip(found, gradients(causal_conv1d_ref, packed), strict=True):
        assert_close_rel(one, right, 1e-5)


def far_apart(rows: torch.Tensor, stride: int) -> torch.Tensor:
    """The same rows in memory of which nothing but these rows is ever touched."""
    count, width = rows.shape
    size = ((count - 1) * stride + width) * rows.element_size()
    apart = torch.empty(0, dtype=rows.dtype, device=DEVICE)
    apart = apart.set_(torch.UntypedStorage(size, device=DEVICE), 0, rows.shape, (stride, 1))
    return apart.copy_(rows)


def test_offsets_beyond_32_bits() -> None:
    """Four rows of x and of dy, 2^30 elements apart."""
    given = normal(5, x=(4, 8), weight=(8, 4), dy=(4, 8))
    x, weight, dy = (t.bfloat16() for t in given.values())
    results = []
    for place in (lambda t: t.to(DEVICE), lambda t: far_apart(t, 2**30)):
        leaf = place(x).detach().requires_grad_()
        taps = weight.to(DEVICE).requires_grad_()
        y = causal_conv1d(leaf, taps, None, Packed.from_lengths((4,), DEVICE), kernels="triton")
        results.append([y, *torch.autograd.grad(y, [leaf, taps], place(dy))])
    for near, far in zip(*results, strict=True):
        assert torch.equal(near, far)


def test_more_taps_than_the_kernels_have_are_refused() -> None:
    with pytest.raises(ValueError, match="5 taps, the Triton kernels have at most 4"):
        triton_conv1d(torch.ones(3, 8), torch.ones(8, 5), None, (3,))
