"""What every kernel file shares: the choice of an implementation and the dtype of its arithmetic."""

from collections.abc import Iterator

import torch

OPERATIONS = (
    "rms_norm",
    "gated_rms_norm",
    "causal_conv1d",
    "ssd_scan",
    "varlen_attention",
    "route",
    "expert_mlp",
    "linear_cross_entropy",
    "adamw_step",
)
CHOICES = ("auto", "torch", "triton", "packages")
TILE_ELEMENTS = 1 << 16  # a thread: 256 KB of float32, an eighth of a 2 MB L2; see `row_tiles`


def backends(kernels: str) -> dict[str, str]:
    """Operation -> implementation for the recipe's `run.kernels`; the caller logs the table.

    Raises:
        ValueError: an unknown choice, or one that this version does not have: nothing falls back in silence.
    """
    if kernels not in CHOICES:
        raise ValueError(f"kernels = {kernels!r}; expected one of {', '.join(CHOICES)}")
    if kernels in ("triton", "packages"):
        raise ValueError(
            f"kernels = {kernels!r}: this version has the torch implementations only; use 'auto'"
        )
    return dict.fromkeys(OPERATIONS, "torch")


def arithmetic_dtype(x: torch.Tensor) -> torch.dtype:
    """float32 for every training dtype; float64 stays float64, so that gradients can be checked in it."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def check_shape(name: str, x: torch.Tensor, shape: tuple[int | None, ...]) -> None:
    """Raises ValueError unless `x` has the shape; None stands for any size."""
    fits = x.dim() == len(shape) and all(
        want in (None, have) for want, have in zip(shape, x.shape, strict=True)
    )
    if not fits:
        want = ", ".join("*" if n is None else str(n) for n in shape)
        raise ValueError(f"{name}: expected shape ({want}), found {tuple(x.shape)}")


def row_tiles(x: torch.Tensor) -> Iterator[slice]:
    """Rows of (T, D) to work on together: on a CPU few enough that a chain of temporaries stays in the L2 caches."""
    rows = x.shape[0]
    step = rows if x.is_cuda else max(1, TILE_ELEMENTS * torch.get_num_threads() // x.shape[1])
    for start in range(0, rows, max(1, step)):
        yield slice(start, min(start + step, rows))
