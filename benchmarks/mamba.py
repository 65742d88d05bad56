"""Causal convolution and SSD scan (to be filled in)."""

import torch

from benchmarks.shapes import CONV, DOCUMENTS, PROJECTED, G, H, N, P, T, W
from hymoe.kernels.conv1d import causal_conv1d
from hymoe.kernels.packed import Packed
from hymoe.kernels.ssd.op import ssd_scan


def record() -> None:
    """Both operations forward and backward on meta tensors of the real shapes."""
    record_conv()
    record_ssd()


def record_conv() -> None:
    """The convolution on a column slice of the projection, as in the model."""
    packed = Packed.from_lengths(DOCUMENTS, "meta")
    meta = {"device": "meta", "requires_grad": True}
    projected = torch.empty(T, PROJECTED, dtype=torch.bfloat16, **meta)
    x = projected[:, H * P : H * P + CONV]
    weight = torch.empty(CONV, W, dtype=torch.bfloat16, **meta)
    y = causal_conv1d(x, weight, torch.empty(CONV, **meta), packed, kernels="triton")
    y.backward(torch.empty_like(y))


def record_ssd() -> None:
    """The scan on column slices, as in the model: x, b and c of the convolution's output, dt of the projection."""
    packed = Packed.from_lengths(DOCUMENTS, "meta")
    meta = {"device": "meta", "requires_grad": True}
    projected = torch.empty(T, PROJECTED, dtype=torch.bfloat16, **meta)
    xbc = torch.empty(T, CONV, dtype=torch.bfloat16, **meta)
    x, b, c = xbc.split([H * P, G * N, G * N], dim=-1)
    head = lambda: torch.empty(H, **meta)  # noqa: E731
    y = ssd_scan(
        x.unflatten(-1, (H, P)),
        projected[:, -H:],
        head(),
        b.unflatten(-1, (G, N)),
        c.unflatten(-1, (G, N)),
        head(),
        head(),
        (0.0, float("inf")),
        packed,
        128,
        kernels="triton",
    )
    y.backward(torch.empty_like(y))
