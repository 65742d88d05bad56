"""Norms (to be filled in)."""

import torch

from benchmarks.shapes import PROJECTED, D, G, H, P, T
from hymoe.kernels.norm import gated_rms_norm, rms_norm


def record() -> None:
    """Both norms forward and backward on meta tensors of the real shapes."""
    meta = {"device": "meta", "requires_grad": True}
    x = torch.empty(T, D, dtype=torch.bfloat16, **meta)
    rms_norm(x, torch.empty(D, **meta), 1e-5).backward(torch.empty_like(x))
    y = torch.empty(T, H * P, dtype=torch.bfloat16, **meta)
    projected = torch.empty(T, PROJECTED, dtype=torch.bfloat16, **meta)
    z = projected[:, : H * P]
    gated_rms_norm(y, z, torch.empty(H * P, **meta), G, 1e-5).backward(torch.empty_like(y))
