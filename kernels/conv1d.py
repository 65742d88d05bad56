"""Causal depthwise convolution with SiLU over packed documents; no tap crosses a document's start.

Math: pre[t, c] = bias[c] + sum_{s=0}^{W-1} weight[c, W-1-s] * x[t-s, c], a term being absent where t-s lies in an
earlier document; y = pre * sigmoid(pre). Backward, with dpre = dy * silu'(pre): dx[t] = sum_s weight[W-1-s] * dpre[t+s]
over the same pairs, dweight[W-1-s] = sum_t dpre[t] * x[t-s], dbias = sum_t dpre.

Dtypes: arithmetic in float32, output in x's dtype. Memory: the inputs; pre is computed again in the backward pass.
Source: Dao and Gu 2024, section 7.
"""

import torch
from torch import Tensor
from torch.nn import functional

from hymoe.kernels.launch import arithmetic_dtype, check_shape, row_tiles
from hymoe.kernels.packed import Packed


def causal_conv1d_ref(x: Tensor, weight: Tensor, bias: Tensor | None, packed: Packed) -> Tensor:
    """The specification of `causal_conv1d`: one document at a time, by torch's convolution."""
    wide = arithmetic_dtype(x)
    w = weight.to(wide)[:, None]  # (C, 1, W)
    b = None if bias is None else bias.to(wide)
    out = []
    for document in x.to(wide).split(packed.lengths):
        padded = functional.pad(document.T, (w.shape[-1] - 1, 0))  # (C, W-1+t)
        out.append(functional.silu(functional.conv1d(padded, w, b, groups=w.shape[0])).T)
    return torch.cat(out).to(x.dtype)


class _CausalConv1d(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, packed: Packed) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.packed = packed
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        w = _taps(weight, x)
        for rows in row_tiles(x):
            y[rows] = functional.silu(_convolve(x, w, bias, packed, rows), inplace=True)
        return y

    @staticmethod
    def backward(ctx, dy: Tensor):
        x, weight, bias = ctx.saved_tensors
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        w = _taps(weight, x)
        taps, channels = w.shape
        dw, db = torch.zeros_like(w), w.new_zeros(channels)
        after = w.new_zeros(taps - 1, channels)  # dpre of the tokens behind the tile
        for rows in reversed(list(row_tiles(x))):
            pre = _convolve(x, w, bias, ctx.packed, rows)
            part, grad = x[rows].to(w.dtype), dy[rows].to(w.dtype)
            dpre = torch.cat([torch.ops.aten.silu_backward(grad, pre), after])  # (t+W-1, C)
            size = part.shape[0]
            dx_part = dpre[:size] * w[0]
            dw[0] += (dpre[:size] * part).sum(0)
            db += dpre[:size].sum(0)
            for back in range(1, taps):
                # Row i meets the token that is `back` behind it, where that is of the same document.
                late = dpre[back : back + size]
                crossing = ctx.packed.crossings(back, rows.start, rows.stop)
                if crossing is not None:
                    late = late.index_fill(0, crossing, 0)
                dx_part.addcmul_(late, w[back])
                dw[back] += (late * part).sum(0)
            dx[rows] = dx_part
            after = dpre[: taps - 1].clone()
        db = None if bias is None else db.to(bias.dtype)
        return dx, dw.flip(0).T.to(weight.dtype), db, None


def _taps(weight: Tensor, x: Tensor) -> Tensor:
    """(C, W) -> (W, C) contiguous in float32, entry s being the weight of the token s before."""
    return weight.T.flip(0).to(arithmetic_dtype(x)).contiguous()


def _convolve(x: Tensor, w: Tensor, bias: Tensor | None, packed: Packed, rows: slice) -> Tensor:
    """The convolution before SiLU for some rows, (t, C) in float32; w as `_taps` gives it."""
    taps = w.shape[0]
    first = max(0, rows.start - taps + 1)
    wide = x[first : rows.stop].to(w.dtype)  # the rows, and the taps before them
    out = wide[rows.start - first :] * w[0]
    if bias is not None:
        out += bias
    for back in range(1, min(taps, rows.stop)):
        start = max(rows.start, back)  # the first row that has a token `back` before it
        early = wide[start - back - first : rows.stop - back - first]
        landed = out[start - rows.start :]
        crossing = packed.crossings(back, start - back, rows.stop - back)
        if crossing is None:
            landed.addcmul_(early, w[back])
        else:
            landed += (early * w[back]).index_fill_(0, crossing, 0)
    return out


def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, packed: Packed) -> Tensor:
    """Causal depthwise convolution and SiLU along each document.

    Args:
        x: (T, C) channels; a column slice of a wider tensor is fine.
        weight: (C, W), the last tap is the token itself.
        bias: (C,) or None.
        packed: boundaries of the documents in the T tokens.

    Returns:
        y: (T, C) in x's dtype.

    Raises:
        ValueError: shapes that do not fit.
    """
    check_shape("causal_conv1d x", x, (packed.num_tokens, weight.shape[0]))
    if bias is not None:
        check_shape("causal_conv1d bias", bias, (weight.shape[0],))
    return _CausalConv1d.apply(x, weight, bias, packed)
