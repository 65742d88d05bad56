"""One token a sequence through the Mamba-2 recurrence, and the state that a document leaves behind.

Math (letters of `ref.py`, whose recurrence this is):
    step:   state = exp(dt * a) * state + outer(dt * x, b);   y = state @ c + skip * x
    final:  state[last] = sum_t exp(s[last] - s[t]) * outer(dt[t] * x[t], b[t]),   s the running sum of dt * a,
which is one product of (H*P, T) and (T, N) a document and group: no exponent is positive, so it needs no chunks.

Dtypes: state and arithmetic in float32 (float64 for float64), s in float64 because its differences cancel.
Bytes of a step: the state read and written, S*H*P*N*8; at H = 64, P = 64, N = 128 and S = 16: 67 MB a layer.
Source: Dao and Gu 2024, sections 3 and 6.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

from hymoe.kernels.launch import arithmetic_dtype, check_shape
from hymoe.kernels.packed import Packed


def ssd_step(
    x: Tensor,
    dt: Tensor,
    a_log: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
    states: Tensor,
) -> Tensor:
    """The scan of one more token of each sequence.

    Args:
        x: (S, H, P) the new token's inputs of each sequence.
        dt: (S, H) raw time steps, before bias and softplus.
        a_log: (H,) log of the decay rate.
        b: (S, G, N) input projections; a group serves H/G heads.
        c: (S, G, N) output projections.
        skip: (H,) weight of x in the output.
        dt_bias: (H,) added to dt.
        dt_limit: lowest and highest time step after softplus.
        states: (S, H, P, N) float32, contiguous: the states before the token; become those behind it.

    Returns:
        y: (S, H, P) in x's dtype.

    Raises:
        ValueError: shapes that do not fit.
    """
    rows, heads, width = x.shape
    check_shape("ssd_step dt", dt, (rows, heads))
    check_shape("ssd_step b", b, (rows, None, None))
    check_shape("ssd_step c", c, tuple(b.shape))
    check_shape("ssd_step states", states, (rows, heads, width, b.shape[2]))
    groups, size = b.shape[1:]
    wide = states.dtype
    step = _time_steps(dt, dt_bias, dt_limit, wide)  # (S, H)
    decay = torch.exp(step * -torch.exp(a_log.to(wide)))
    x_wide = x.to(wide)
    entering = (x_wide * step[..., None]).view(rows, groups, -1, 1)  # (S, G, H/G*P, 1)
    by_group = states.view(rows, groups, -1, size)
    states.mul_(decay[..., None, None])
    by_group.addcmul_(entering, b.to(wide)[:, :, None])
    # A row times a matrix: the other way round, torch's batched product is seven times slower on a CPU.
    reading = c.to(wide).reshape(rows * groups, 1, size)
    y = torch.bmm(reading, by_group.flatten(0, 1).transpose(1, 2))  # (S*G, 1, H/G*P)
    return torch.addcmul(y.view(rows, heads, width), x_wide, skip.to(wide)[:, None]).to(x.dtype)


def ssd_final_states(
    x: Tensor,
    dt: Tensor,
    a_log: Tensor,
    b: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
    packed: Packed,
) -> Tensor:
    """The state behind the last token of each document.

    Args:
        x: (T, H, P) inputs of the heads.
        dt: (T, H) raw time steps, before bias and softplus.
        a_log: (H,) log of the decay rate.
        b: (T, G, N) input projections; a group serves H/G heads.
        dt_bias: (H,) added to dt.
        dt_limit: lowest and highest time step after softplus.
        packed: boundaries of the S documents in the T tokens.

    Returns:
        states: (S, H, P, N) float32.

    Raises:
        ValueError: shapes that do not fit.
    """
    tokens, heads, width = x.shape
    groups, size = b.shape[1:]
    check_shape("ssd_final_states x", x, (packed.num_tokens, None, None))
    check_shape("ssd_final_states dt", dt, (tokens, heads))
    check_shape("ssd_final_states b", b, (tokens, None, None))
    wide = arithmetic_dtype(x)
    step = _time_steps(dt, dt_bias, dt_limit, wide)
    rate = step.double() * -torch.exp(a_log.double())
    states = x.new_empty(len(packed.lengths), heads, width, size, dtype=wide)
    parts = (t.split(packed.lengths) for t in (x, step, rate, b))
    for state, x_part, step_part, rate_part, b_part in zip(states, *parts, strict=True):
        # Summed from the end, exclusive: what a token's share still decays until the last one.
        after = rate_part.flip(0).cumsum(0).flip(0) - rate_part
        weight = torch.exp(after).to(wide).mul_(step_part)
        weighted = (x_part.to(wide) * weight[..., None]).unflatten(1, (groups, -1))  # (t, G, R, P)
        left = weighted.permute(1, 2, 3, 0).flatten(1, 2)  # (G, R*P, t)
        right = b_part.to(wide).transpose(0, 1)  # (G, t, N)
        torch.bmm(left, right, out=state.view(groups, -1, size))
    return states


def _time_steps(
    dt: Tensor, dt_bias: Tensor, dt_limit: tuple[float, float], wide: torch.dtype
) -> Tensor:
    step = functional.softplus(dt.to(wide) + dt_bias.to(wide))
    return step if dt_limit == (0.0, math.inf) else step.clamp(*dt_limit)
