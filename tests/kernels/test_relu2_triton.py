"""The squared ReLU's Triton kernels: in the interpreter, or on a GPU where there is one."""

import pytest
import torch

from hymoe.kernels.launch import KNOWN_TARGETS, recording
from hymoe.kernels.relu2 import BLOCK, relu2, relu2_ref
from tests.kernel_check import check, normal

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.bfloat16)
SHAPES = {"one": (1,), "odd": (63, 17), "three": (2, 3, 5), "block": (BLOCK,), "two": (BLOCK + 1,)}


def on_device(x: torch.Tensor) -> torch.Tensor:
    return relu2(x.to(DEVICE), "triton").to(x.device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_relu2(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs = normal(1, x=shape)
    inputs["x"].flatten()[::7] = 0  # the gradient at 0 is 0
    check(on_device, relu2_ref, inputs, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_input_and_gradient(dtype: torch.dtype) -> None:
    check(
        lambda x: on_device(x.T[3:, ::2]).T,
        lambda x: relu2_ref(x.T[3:, ::2]).T,
        normal(2, x=(11, 70)),
        dtype,
    )


def test_no_values() -> None:
    x = torch.ones(0, 7, device=DEVICE, requires_grad=True)
    y = relu2(x, "triton")
    y.sum().backward()
    assert y.shape == x.grad.shape == (0, 7)


@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_the_gradient_from_the_output_is_that_of_the_input(kernels: str) -> None:
    """Every finite bfloat16 whose square is one: the root gives back the bits of the input."""
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    square = x.float().square()
    x = x[(square >= torch.finfo(torch.bfloat16).smallest_normal) & square.bfloat16().isfinite()]
    assert len(x) > 32_000
    upstream = torch.randn(len(x), generator=torch.Generator().manual_seed(0)).bfloat16()
    given = x.to(DEVICE).requires_grad_()
    relu2(given, kernels).backward(upstream.to(DEVICE))
    want = upstream.double() * 2 * torch.relu(x).double()
    if kernels == "torch":  # rounds before it doubles, which shows where the gradient is subnormal
        want[want.abs() < 4 * torch.finfo(torch.bfloat16).smallest_normal] = 0
        given.grad[given.grad.abs() < 4 * torch.finfo(torch.bfloat16).smallest_normal] = 0
    assert torch.equal(given.grad.cpu(), want.bfloat16())


def test_what_is_not_finite() -> None:
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, -1.0, 2.0], device=DEVICE)
    x.requires_grad_()
    y = relu2(x, "triton")
    y.backward(torch.ones_like(y))
    want = torch.tensor([torch.nan, torch.inf, 0, 0, 4.0])
    torch.testing.assert_close(y.detach().cpu(), want, equal_nan=True, rtol=0, atol=0)
    want = torch.tensor([torch.nan, torch.inf, 0, 0, 4.0])
    torch.testing.assert_close(x.grad.cpu(), want, equal_nan=True, rtol=0, atol=0)


def test_only_the_output_is_kept() -> None:
    """The product behind keeps it too: the operation costs no memory."""
    for kernels in ("torch", "triton"):
        x = torch.ones(4, device=DEVICE, requires_grad=True)
        y = relu2(x, kernels)
        kept = y.grad_fn.saved_tensors
        assert [t.data_ptr() for t in kept] == [y.data_ptr()]


def test_it_is_launched_once_a_pass() -> None:
    with recording(KNOWN_TARGETS[90]) as launches:
        x = torch.ones(1000, 5, device="meta", requires_grad=True)
        relu2(x, "triton").backward(torch.ones(1000, 5, device="meta"))
    assert [one.grid for one in launches] == [(3,), (3,)]
