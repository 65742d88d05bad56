"""Causal depthwise convolution with SiLU over packed documents; no tap crosses a document's start.

Math: pre[t, c] = bias[c] + sum_{s=0}^{W-1} weight[c, W-1-s] * x[t-s, c], a term being absent where t-s lies in an
earlier document; y = pre * sigmoid(pre). Backward, with dpre = dy * silu'(pre): dx[t] = sum_s weight[W-1-s] * dpre[t+s]
over the same pairs, dweight[W-1-s] = sum_t dpre[t] * x[t-s], dbias = sum_t dpre.

Dtypes: arithmetic in float32, output in x's dtype. Memory: the inputs; pre is computed again in the backward pass.
The Triton kernels are in `conv1d_triton.py`.
Source: Dao and Gu 2024, section 7.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hymoe.kernels.conv1d_triton import MAX_TAPS, TritonConv1d
from hymoe.kernels.launch import (
    INSTALL,
    arithmetic_dtype,
    check_shape,
    choose,
    row_tiles,
)
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


class _PackageConv1d(torch.autograd.Function):
    """causal-conv1d's CUDA kernels, with what they take for granted made so."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, packed: Packed) -> Tensor:
        x = _channels_last(x)
        # Before 1.7 the kernel reads the ids of a whole tile of 64 rows, past the end of the row.
        ids = functional.pad(packed.seq_idx, (0, 64))[: x.shape[2]][None]
        y = _package().causal_conv1d_fwd_function(x, weight, bias, ids, None, None, True)
        ctx.save_for_backward(x, weight, bias, ids)
        return y[0].T

    @staticmethod
    def backward(ctx, dy: Tensor):
        x, weight, bias, ids = ctx.saved_tensors
        given = (x, weight, bias, _channels_last(dy), ids, None, None, None, False, True)
        with _deterministic():
            dx, dweight, dbias, _ = _package().causal_conv1d_bwd_function(*given)
        return dx[0].T, dweight, dbias, None


def _package() -> Any:
    try:
        from causal_conv1d import cpp_functions
    except ImportError as reason:
        raise ImportError(
            "causal-conv1d or its CUDA extension is missing: pip install --no-build-isolation "
            f"'{INSTALL['causal_conv1d']}', or use kernels = 'triton'"
        ) from reason
    return cpp_functions


def _channels_last(x: Tensor) -> Tensor:
    """(T, C) -> (1, C, T) whose rows begin at multiples of 8 elements and end within 32-bit offsets, else a copy."""
    rows, channels = x.shape
    is_aligned = x.stride(0) % 8 == 0 and x.storage_offset() % 8 == 0
    if x.stride(1) != 1 or not is_aligned or rows * x.stride(0) >= 2**31:
        x = x.clone(memory_format=torch.contiguous_format)
    return x.T[None]


@contextmanager
def _deterministic() -> Iterator[None]:
    """The package adds up dweight and dbias in one order under torch's switch, which is for the whole process."""
    on, warns = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False  # it would write dx twice
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(on, warn_only=warns)
        torch.utils.deterministic.fill_uninitialized_memory = fills


def _check_package(x: Tensor, weight: Tensor) -> None:
    """Raises ValueError for what causal-conv1d does not take or would get wrong."""
    channels, taps = weight.shape
    for wrong, what in (
        (channels % 8 != 0, f"{channels} channels, not a multiple of 8"),
        (not 2 <= taps <= 4, f"{taps} taps, not 2 to 4"),
        (x.numel() >= 2**31, f"{x.numel()} values, too many for its 32-bit offsets"),
    ):
        if wrong:
            raise ValueError(
                f"causal_conv1d: causal-conv1d does not take {what}; kernels = 'triton' may"
            )


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, packed: Packed, kernels: str = "auto"
) -> Tensor:
    """Causal depthwise convolution and SiLU along each document.

    Args:
        x: (T, C) channels; a column slice of a wider tensor is fine.
        weight: (C, W), the last tap is the token itself.
        bias: (C,) or None.
        packed: boundaries of the documents in the T tokens.
        kernels: which implementation, see `launch.choose`.

    Returns:
        y: (T, C) in x's dtype.

    Raises:
        ValueError: shapes that do not fit, or that the implementation does not take.
    """
    check_shape("causal_conv1d x", x, (packed.num_tokens, weight.shape[0]))
    if bias is not None:
        check_shape("causal_conv1d bias", bias, (weight.shape[0],))
    chosen = choose("causal_conv1d", kernels, x.device.type, x.dtype).name
    if chosen == "causal_conv1d":
        _check_package(x, weight)
        # It wants one dtype for weight and bias; these casts are autograd's, and so are the gradients'.
        bias = None if bias is None else bias.float().contiguous()
        return _PackageConv1d.apply(x, weight.float(), bias, packed)
    if chosen == "triton":
        if weight.shape[1] > MAX_TAPS:
            raise ValueError(
                f"causal_conv1d: {weight.shape[1]} taps, the Triton kernels have at most {MAX_TAPS}; "
                "kernels = 'torch' takes any number"
            )
        return TritonConv1d.apply(x, weight, bias, packed)
    return _CausalConv1d.apply(x, weight, bias, packed)
