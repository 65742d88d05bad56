"""The Mamba-2 scan as its recurrence, one token after another: the specification of `op.ssd_scan`.

Math, for head h of group g, with dt = clamp(softplus(dt_raw + dt_bias), low, high) and a = -exp(a_log):
    state[t] = exp(dt[t] * a) * state[t-1] + dt[t] * outer(x[t], b[t]),   state = 0 before a document's first token
    y[t] = state[t] @ c[t] + skip * x[t]
Source: Dao and Gu 2024, sections 3 and 6.
"""

import torch
from torch import Tensor
from torch.nn import functional

from hymoe.kernels.launch import arithmetic_dtype
from hymoe.kernels.packed import Packed


def ssd_scan_ref(
    x: Tensor,
    dt: Tensor,
    a_log: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
    packed: Packed,
) -> Tensor:
    """See `hymoe.kernels.ssd.op.ssd_scan`; differentiable by autograd."""
    wide = arithmetic_dtype(x)
    repeat = x.shape[1] // b.shape[1]
    out = x.dtype
    x, dt, a_log, b, c, skip, dt_bias = (t.to(wide) for t in (x, dt, a_log, b, c, skip, dt_bias))
    b, c = (t.repeat_interleave(repeat, dim=1) for t in (b, c))  # (T, H, N)
    step = functional.softplus(dt + dt_bias).clamp(*dt_limit)  # (T, H)
    decay = torch.exp(-torch.exp(a_log) * step)
    rows, start = [], 0
    for length in packed.lengths:
        state = x.new_zeros(x.shape[1], x.shape[2], b.shape[2])  # (H, P, N)
        for t in range(start, start + length):
            entering = (step[t, :, None] * x[t])[..., None] * b[t, :, None]
            state = decay[t, :, None, None] * state + entering
            rows.append((state * c[t, :, None]).sum(-1) + skip[:, None] * x[t])
        start += length
    return torch.stack(rows).to(out)
