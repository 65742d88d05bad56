"""Causal convolution against its reference, one document after another."""

import pytest
import torch

from hymoe.kernels import launch
from hymoe.kernels.conv1d import causal_conv1d, causal_conv1d_ref
from hymoe.kernels.packed import Packed
from tests.kernel_check import (
    DTYPE_IDS,
    DTYPES,
    RAGGED,
    assert_documents_alone,
    check,
    normal,
)

CHANNELS = 10


def compare(
    lengths: tuple[int, ...], taps: int, bias: bool, dtype: torch.dtype, channels: int = CHANNELS
) -> None:
    """x is a column slice of a wider tensor, as in the model."""
    packed = Packed.from_lengths(lengths)
    inputs = normal(1, wide=(sum(lengths), channels + 5), weight=(channels, taps), b=(channels,))
    if not bias:
        del inputs["b"]

    def sliced(function):
        return lambda wide, weight, b=None: function(wide[:, 3 : 3 + channels], weight, b, packed)

    check(sliced(causal_conv1d), sliced(causal_conv1d_ref), inputs, dtype, small=("b",))


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("lengths", RAGGED.values(), ids=RAGGED)
def test_ragged_documents(lengths: tuple[int, ...], dtype: torch.dtype) -> None:
    compare(lengths, 4, True, dtype)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("taps", [1, 2, 3, 7])
def test_other_widths(taps: int, bias: bool) -> None:
    """More taps than the shortest document and than some rows have tokens."""
    compare((2, 9, 1, 6), taps, bias, torch.float32)
    compare((3,), taps, bias, torch.float32)


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 64])
def test_tiles(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles shorter than the taps, boundaries on, before and behind the edges of tiles."""
    monkeypatch.setattr(launch, "TILE_ELEMENTS", rows * CHANNELS)
    compare((63, 2, 64, 1, 3, 128, 5), 4, True, torch.float64)


@pytest.mark.parametrize("rows", [2, 1000])
@pytest.mark.parametrize("lengths", [(4, 5), (1, 2, 3, 20), (1, 1, 1)], ids=str)
def test_documents_do_not_meet(
    lengths: tuple[int, ...], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "TILE_ELEMENTS", rows * CHANNELS)
    inputs = normal(2, x=(sum(lengths), CHANNELS), weight=(CHANNELS, 4), bias=(CHANNELS,))
    weight, bias = inputs["weight"].float(), inputs["bias"].float()
    assert_documents_alone(
        lambda packed, rows: causal_conv1d(rows["x"], weight, bias, packed),
        Packed.from_lengths,
        lengths,
        {"x": inputs["x"].float()},
    )


def test_shapes_that_do_not_fit_are_refused() -> None:
    packed = Packed.from_lengths((3,))
    with pytest.raises(ValueError, match=r"causal_conv1d x: expected shape \(3, 8\)"):
        causal_conv1d(torch.ones(4, 8), torch.ones(8, 4), None, packed)
    with pytest.raises(ValueError, match=r"causal_conv1d bias: expected shape \(8\)"):
        causal_conv1d(torch.ones(3, 8), torch.ones(8, 4), torch.ones(7), packed)
