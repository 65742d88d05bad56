"""Squared ReLU against its reference."""

import pytest
import torch

from hymoe.kernels.relu2 import relu2, relu2_ref
from tests.kernel_check import DTYPE_IDS, DTYPES, check, normal


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("shape", [(1,), (63, 17), (2, 3, 5)])
def test_relu2(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs = normal(1, x=shape)
    inputs["x"].flatten()[::7] = 0  # the gradient at 0 is 0
    check(relu2, relu2_ref, inputs, dtype)
