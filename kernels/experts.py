"""The routed experts: gather rows into expert order, up, squared ReLU, down, combine.

Math, for row r of token t and expert e with routing weight w[r]: z = up[e] @ x[t]; a = relu(z)^2;
out[t] += down[e] @ (w[r] a). The weight is folded into a before the down product (F is narrower than D), so that
combining is a plain sum.
Backward, with da = down[e]^T @ dout[t]: dw[r] = <da, a>; dz = 2 relu(z) w[r] da; ddown[e] += outer(dout[t], w[r] a);
dup[e] += outer(dz, x[t]); dx[t] += up[e]^T @ dz.

Dtypes: products in the weights' dtype, sums over a token's K rows in float32.
Memory: saved are the inputs, the tables of the routing and relu(z), (R, F); nothing of (R, D) is kept.
Empty experts get zero gradients. Combining is a gather through the inverse permutation, so it is deterministic.
"""

import torch
from torch import Tensor

from hymoe.kernels.launch import check_shape
from hymoe.kernels.route import Routing


def grouped_gemm_ref(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """The specification of `grouped_gemm`, differentiable by autograd."""
    spans = offsets.tolist()
    pairs = zip(spans[:-1], spans[1:], strict=True)
    return torch.cat([x[a:b] @ w.T for (a, b), w in zip(pairs, weight, strict=True)])


def grouped_gemm(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Each expert's rows times its matrix: y[r] = weight[e] @ x[r] for offsets[e] <= r < offsets[e+1].

    Args:
        x: (R, I) rows in expert order.
        weight: (E, O, I).
        offsets: (E+1,) int64, first row of each expert; the last entry is R.

    Returns:
        y: (R, O) in x's dtype. Not differentiable: `expert_mlp` has its own backward pass.

    Raises:
        ValueError: shapes that do not fit.
    """
    check_shape("grouped_gemm weight", weight, (None, None, x.shape[1]))
    check_shape("grouped_gemm offsets", offsets, (weight.shape[0] + 1,))
    y = x.new_empty(x.shape[0], weight.shape[1])
    for e, rows in _spans(offsets):
        torch.mm(x[rows], weight[e].T, out=y[rows])
    return y


def _grouped_outer(left: Tensor, right: Tensor, offsets: Tensor, like: Tensor) -> Tensor:
    """Weight gradients: (R, O) and (R, I) -> (E, O, I), the sum of outer products of each expert's rows."""
    out = torch.zeros_like(like)
    for e, rows in _spans(offsets):
        torch.mm(left[rows].T, right[rows], out=out[e])
    return out


def _spans(offsets: Tensor) -> list[tuple[int, slice]]:
    """Experts that have rows, and which; asks the device once where the offsets are not on the host."""
    bounds = offsets.tolist()
    return [
        (e, slice(a, b))
        for e, (a, b) in enumerate(zip(bounds[:-1], bounds[1:], strict=True))
        if b > a
    ]


def _combine(rows: Tensor, routing: Routing, dtype: torch.dtype) -> Tensor:
    """Sums the K rows of each token, (R, D) -> (T, D), in float32 and in the order of its choices."""
    wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
    return (
        rows.index_select(0, routing.inverse.flatten())
        .unflatten(0, routing.ids.shape)
        .sum(1, dtype=wide)
        .to(dtype)
    )


def expert_mlp_ref(
    x: Tensor, weights: Tensor, up: Tensor, down: Tensor, routing: Routing
) -> Tensor:
    """The specification of `expert_mlp`: every expert on every token, differentiable by autograd."""
    out = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
    for e in range(up.shape[0]):
        share = (weights * (routing.ids == e)).sum(
            -1, keepdim=True
        )  # (T, 1), 0 where e was not chosen
        out = out + share * (torch.relu(x @ up[e].T).square() @ down[e].T)
    return out.to(x.dtype)


class _ExpertMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x: Tensor, weights: Tensor, up: Tensor, down: Tensor, routing: Routing
    ) -> Tensor:
        token = routing.order // routing.ids.shape[1]
        rows = x.index_select(0, token)  # (R, D)
        relu = grouped_gemm(rows, up, routing.offsets).relu_()  # (R, F)
        w = weights.flatten().index_select(0, routing.order)[:, None]  # (R, 1)
        a = (relu.square() * w).to(x.dtype)
        out = _combine(grouped_gemm(a, down, routing.offsets), routing, x.dtype)
        ctx.save_for_backward(x, weights, up, down, relu)
        ctx.routing = routing
        return out

    @staticmethod
    def backward(ctx, dout: Tensor):
        x, weights, up, down, relu = ctx.saved_tensors
        routing = ctx.routing
        token = routing.order // routing.ids.shape[1]
        w = weights.flatten().index_select(0, routing.order)[:, None]
        a = relu.square()
        drows = dout.index_select(0, token)  # (R, D)
        da = grouped_gemm(
            drows, down.transpose(1, 2), routing.offsets
        )  # (R, F), before the routing weight
        dw = (da * a).sum(-1, dtype=weights.dtype)
        ddown = _grouped_outer(drows, (a * w).to(x.dtype), routing.offsets, down)
        dz = (
            da.mul_(relu).mul_((2 * w).to(da.dtype))
            if da.dtype == w.dtype
            else (da * relu * (2 * w)).to(x.dtype)
        )
        dup = _grouped_outer(dz, x.index_select(0, token), routing.offsets, up)
        dx = _combine(grouped_gemm(dz, up.transpose(1, 2), routing.offsets), routing, x.dtype)
        dweights = dw.index_select(0, routing.inverse.flatten()).view_as(weights)
        return dx, dweights, dup, ddown, None


def expert_mlp(x: Tensor, weights: Tensor, up: Tensor, down: Tensor, routing: Routing) -> Tensor:
    """Sum over each token's experts of weight * down(relu(up(x))^2).

    Args:
        x: (T, D) inputs; D is the latent size where the model has one.
        weights: (T, K) float32 routing weights.
        up: (E, F, D) in x's dtype.
        down: (E, D, F) in x's dtype.
        routing: choices and expert order of the T tokens.

    Returns:
        out: (T, D) in x's dtype.

    Raises:
        ValueError: shapes that do not fit.
    """
    check_shape("expert_mlp routing", routing.ids, (x.shape[0], weights.shape[1]))
    check_shape("expert_mlp up", up, (routing.offsets.shape[0] - 1, None, x.shape[1]))
    check_shape("expert_mlp down", down, (up.shape[0], x.shape[1], up.shape[1]))
    return _ExpertMLP.apply(x, weights, up, down, routing)
