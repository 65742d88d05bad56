"""The comparison helpers must be able to fail."""

import pytest
import torch

from tests.close import assert_close_rel, assert_twice_as_close, relative_error


def test_error_is_relative_to_the_reference_norm():
    expected = torch.tensor([3.0, 4.0])
    assert relative_error(expected + torch.tensor([0.0, 0.05]), expected) == pytest.approx(
        0.01, rel=1e-4
    )
    tiny = expected * 1e-12  # an absolute tolerance would pass zeros here
    assert relative_error(torch.zeros(2), tiny) == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize(
    ("actual", "expected", "message"),
    [
        ([1.0, 2.0], [1.0, 2.5], "worst at \\(1,\\)"),
        ([1.0, float("nan")], [1.0, 2.0], "1 of 2 values are not finite"),
        ([1.0, 2.0], [1.0, float("inf")], "reference has 1 values"),
        ([1.0, 2.0], [[1.0, 2.0]], "shape"),  # would broadcast
        ([0.0, 1e-30], [0.0, 0.0], "all zeros"),
    ],
)
def test_assert_refuses(actual, expected, message):
    with pytest.raises(AssertionError, match=f"dx: .*{message}"):
        assert_close_rel(torch.tensor(actual), torch.tensor(expected), 1e-5, "dx")


def test_assert_accepts_equal_zeros_and_close_values():
    assert_close_rel(torch.zeros(3), torch.zeros(3), 0.0)
    assert_close_rel(torch.tensor([1.0, 2.000001]), torch.tensor([1.0, 2.0]), 1e-5)


def test_kernel_rule_follows_the_error_of_plain_torch():
    reference = torch.linspace(1, 2, 50, dtype=torch.float64)
    plain = reference.to(torch.bfloat16)
    assert_twice_as_close(plain, plain, reference)
    with pytest.raises(AssertionError, match="kernel"):
        assert_twice_as_close((reference * 1.05).to(torch.bfloat16), plain, reference, "kernel")
