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

from hymoe.kernels.launch import arithmetic_dtype, check_shape
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
        return functional.silu(_convolve(x, weight, bias, packed)).to(x.dtype)

    @staticmethod
    def backward(ctx, dy: Tensor):
        x, weight, bias = ctx.saved_tensors
        pre = _convolve(x, weight, bias, ctx.packed)
        s = torch.sigmoid(pre)
        dpre = (1 - s).mul_(pre).add_(1).mul_(s).mul_(dy)
        wide = x.to(dpre.dtype)
        w = weight.to(dpre.dtype)
        dw = torch.empty_like(w)
        dx = torch.zeros_like(dpre)
        taps, tokens = w.shape[1], x.shape[0]
        for back in range(min(taps, tokens)):
            late = _drop_crossing(
                dpre, back, ctx.packed
            )  # (T-s, C): dpre[t] where t-s is in the same document
            dx[: tokens - back].addcmul_(late, w[:, taps - 1 - back])
            dw[:, taps - 1 - back] = (late * wide[: tokens - back]).sum(0)
        dw[:, : max(0, taps - tokens)] = 0
        db = None if bias is None else dpre.sum(0).to(bias.dtype)
        return dx.to(x.dtype), dw.to(weight.dtype), db, None


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, packed: Packed) -> Tensor:
    """The convolution before SiLU, (T, C) in float32."""
    wide = x.to(arithmetic_dtype(x))
    w = weight.to(wide.dtype)
    tokens, taps = x.shape[0], w.shape[1]
    out = wide * w[:, taps - 1]
    if bias is not None:
        out += bias
    for back in range(1, min(taps, tokens)):
        early = wide[: tokens - back]
        term = early * w[:, taps - 1 - back]  # lands on t = s, s+1, ...
        out[back:] += _zero_crossing(term, back, packed)
    return out


def _drop_crossing(x: Tensor, back: int, packed: Packed) -> Tensor:
    """x[s:], (T-s, C), with zeros where the token s before lies in another document; x itself for s = 0."""
    return _zero_crossing(x[back:].clone(), back, packed) if back else x


def _zero_crossing(landed: Tensor, back: int, packed: Packed) -> Tensor:
    """Zeroes in place the rows of a tensor over t = s..T-1 where t-s lies in another document."""
    if len(packed.lengths) == 1:
        return landed
    return landed.index_fill_(0, packed.crossings(back), 0)


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
