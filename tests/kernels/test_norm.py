"""RMS norm and gated group norm against their references."""

import pytest
import torch

from hymoe.kernels import launch
from hymoe.kernels.norm import gated_rms_norm, gated_rms_norm_ref, rms_norm, rms_norm_ref
from tests.kernel_check import DTYPE_IDS, DTYPES, check, normal

EPS = 1e-5
SIZES = {"one-token": (1, 24), "odd": (63, 40), "wide": (7, 333), "many": (1031, 8)}


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize(("tokens", "width"), SIZES.values(), ids=SIZES)
def test_rms_norm(tokens: int, width: int, dtype: torch.dtype) -> None:
    inputs = normal(1, x=(tokens, width), weight=(width,))
    check(
        lambda x, weight: rms_norm(x, weight, EPS),
        lambda x, weight: rms_norm_ref(x, weight, EPS),
        inputs,
        dtype,
        small=("weight",),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("tokens", [1, 63, 1031])
def test_gated_rms_norm_with_a_strided_gate(tokens: int, groups: int, dtype: torch.dtype) -> None:
    """The gate is a column slice of the projection in the model."""
    width = 24
    inputs = normal(2, x=(tokens, width), wide=(tokens, width + 37), weight=(width,))

    def with_slice(function):
        return lambda x, wide, weight: function(x, wide[:, 5 : 5 + width], weight, groups, EPS)

    check(with_slice(gated_rms_norm), with_slice(gated_rms_norm_ref), inputs, dtype, ("weight",))


def test_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in many tiles, the last one short."""
    monkeypatch.setattr(launch, "TILE_ELEMENTS", 24 * 10)
    inputs = normal(5, x=(63, 24), z=(63, 24), weight=(24,))
    check(
        lambda x, z, weight: gated_rms_norm(rms_norm(x, weight, EPS), z, weight, 3, EPS),
        lambda x, z, weight: gated_rms_norm_ref(rms_norm_ref(x, weight, EPS), z, weight, 3, EPS),
        inputs,
        torch.float64,
    )


def test_eps_rules_where_the_input_is_tiny_or_zero() -> None:
    inputs = normal(3, x=(5, 16), weight=(16,))
    inputs["x"] *= 1e-4  # mean square 1e-8, far below eps
    inputs["x"][2] = 0
    check(
        lambda x, weight: rms_norm(x, weight, EPS),
        lambda x, weight: rms_norm_ref(x, weight, EPS),
        inputs,
        torch.float32,
    )


def test_the_gate_is_saturated() -> None:
    inputs = normal(4, x=(6, 16), z=(6, 16), weight=(16,))
    inputs["z"] *= 60  # silu' is 0 or 1 to the last bit
    check(
        lambda x, z, weight: gated_rms_norm(x, z, weight, 2, EPS),
        lambda x, z, weight: gated_rms_norm_ref(x, z, weight, 2, EPS),
        inputs,
        torch.float32,
    )


def test_shapes_that_do_not_fit_are_refused() -> None:
    x = torch.ones(3, 8)
    with pytest.raises(ValueError, match=r"rms_norm weight: expected shape \(8\), found \(7,\)"):
        rms_norm(x, torch.ones(7), EPS)
    with pytest.raises(ValueError, match=r"gated_rms_norm z: expected shape \(3, 8\)"):
        gated_rms_norm(x, torch.ones(3, 7), torch.ones(8), 2, EPS)
    with pytest.raises(ValueError, match="width 8 does not divide into 3 groups"):
        gated_rms_norm(x, x, torch.ones(8), 3, EPS)
