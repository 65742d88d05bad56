"""One token a sequence through the causal convolution of `conv1d.py`, and what it remembers of the tokens before.

Math: y[s, c] = silu(bias[c] + sum_w weight[c, w] * window[s, w, c]), the window being a sequence's last W-1 inputs and
the new one; a sequence that is younger than W-1 tokens has zeros in front.
Dtypes: arithmetic in float32, tails and output in x's dtype. Memory: the window, (S, W, C) in float32.
"""

import torch
from torch import Tensor
from torch.nn import functional

from hymoe.kernels.launch import arithmetic_dtype, check_shape
from hymoe.kernels.packed import Packed


def conv1d_tails(x: Tensor, packed: Packed, taps: int) -> Tensor:
    """The last inputs of each document, zeros in front of one that is shorter.

    Args:
        x: (T, C) inputs of the convolution.
        packed: boundaries of the S documents in the T tokens.
        taps: W.

    Returns:
        tails: (S, W-1, C) in x's dtype.
    """
    check_shape("conv1d_tails x", x, (packed.num_tokens, None))
    tails = x.new_zeros(len(packed.lengths), taps - 1, x.shape[1])
    for tail, document in zip(tails, x.split(packed.lengths), strict=True):
        kept = min(taps - 1, len(document))
        tail[taps - 1 - kept :] = document[len(document) - kept :]
    return tails


def conv1d_step(x: Tensor, weight: Tensor, bias: Tensor | None, tails: Tensor) -> Tensor:
    """The convolution and SiLU of one more token of each sequence.

    Args:
        x: (S, C) the new token's input of each sequence.
        weight: (C, W), the last tap is the token itself.
        bias: (C,) or None.
        tails: (S, W-1, C) the inputs before it; gets the new one.

    Returns:
        y: (S, C) in x's dtype.

    Raises:
        ValueError: shapes that do not fit.
    """
    channels, taps = weight.shape
    check_shape("conv1d_step x", x, (None, channels))
    check_shape("conv1d_step tails", tails, (x.shape[0], taps - 1, channels))
    window = torch.cat([tails, x[:, None]], 1)  # (S, W, C)
    tails.copy_(window[:, 1:])
    wide = arithmetic_dtype(x)
    pre = window.to(wide).mul_(weight.T).sum(1)
    if bias is not None:
        pre += bias
    return functional.silu(pre, inplace=True).to(x.dtype)
