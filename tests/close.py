"""How tests compare numbers: relative to the norm of the reference, never by an absolute tolerance.

An absolute tolerance passes any output that is small enough; a norm does not.
"""

import torch


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of `expected`, in float64.

    Raises:
        AssertionError: the shapes differ, a value is not finite, or `expected` is all zeros while
            `actual` is not, so that no ratio exists.
    """
    assert actual.shape == expected.shape, (
        f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    )
    a = actual.detach().to("cpu", torch.float64)
    b = expected.detach().to("cpu", torch.float64)
    assert torch.isfinite(b).all(), (
        f"reference has {(~torch.isfinite(b)).sum()} values that are not finite"
    )
    assert torch.isfinite(a).all(), (
        f"{(~torch.isfinite(a)).sum()} of {a.numel()} values are not finite"
    )
    norm = torch.linalg.vector_norm(b).item()
    if norm == 0:
        assert not a.any(), f"reference is all zeros, result is not (largest {a.abs().max():.3g})"
        return 0.0
    return torch.linalg.vector_norm(a - b).item() / norm


def assert_close_rel(
    actual: torch.Tensor, expected: torch.Tensor, bound: float, what: str = "result"
) -> None:
    """Fails, naming `what` and the worst element, where the relative error is above `bound`."""
    try:
        error = relative_error(actual, expected)
    except AssertionError as reason:
        raise AssertionError(f"{what}: {reason}") from None
    if error <= bound:
        return
    difference = (actual.detach().cpu().double() - expected.detach().cpu().double()).abs()
    worst = int(difference.argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), difference.shape))
    raise AssertionError(
        f"{what}: relative error {error:.3g} is above {bound:.3g}; worst at {index}: "
        f"{actual.flatten()[worst].item():.8g}, expected {expected.flatten()[worst].item():.8g}"
    )


def assert_twice_as_close(
    actual: torch.Tensor,
    plain: torch.Tensor,
    reference: torch.Tensor,
    what: str = "result",
) -> None:
    """The rule for kernels: at most twice the error of plain torch in the same dtype, plus 4 eps.

    Args:
        actual: what the kernel computed.
        plain: the plain torch version in the kernel's dtype.
        reference: the same in float32 or float64.
        what: name for the message.
    """
    bound = 2 * relative_error(plain, reference) + 4 * torch.finfo(plain.dtype).eps
    assert_close_rel(actual, reference, bound, what)
