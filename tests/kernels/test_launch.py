"""The choice of an implementation: all or an error, never another one in silence."""

import pytest
import torch

from hymoe.kernels.launch import OPERATIONS, arithmetic_dtype, backends, check_shape


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_every_operation_has_an_implementation(kernels: str) -> None:
    assert backends(kernels) == dict.fromkeys(OPERATIONS, "torch")


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"kernels = 'cuda'; expected one of auto, torch, triton"):
        backends("cuda")


def test_arithmetic_is_float32_or_wider() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert arithmetic_dtype(torch.ones(1, dtype=dtype)) == torch.float32
    assert arithmetic_dtype(torch.ones(1, dtype=torch.float64)) == torch.float64


def test_shapes() -> None:
    check_shape("x", torch.ones(2, 3), (2, None))
    for shape in ((2,), (2, 3, 1), (3, 3)):
        with pytest.raises(ValueError, match=r"x: expected shape .*, found \(2, 3\)"):
            check_shape("x", torch.ones(2, 3), shape)
