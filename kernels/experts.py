"""The routed experts: for each one gather its tokens, up, squared ReLU, down, add to the tokens' sums.

Math, for row r of token t and expert e with routing weight w[r]: z = up[e] @ x[t]; a = relu(z)^2;
out[t] += down[e] @ (w[r] a). The weight is folded into a before the down product (F is narrower than D), so that
combining is a plain sum. Backward, with da = down[e]^T @ dout[t]: dw[r] = <da, a>; dz = 2 relu(z) w[r] da;
ddown[e] += outer(dout[t], w[r] a); dup[e] += outer(dz, x[t]); dx[t] += up[e]^T @ dz.

Dtypes: products in the weights' dtype; what lies between them, and the sums over a token's K rows, in float32.
Memory: saved are the inputs, the routing's tables and relu(z), (R, F); of (R, D) one expert's rows exist at a time.
Recomputation: what is saved is complete before the down product, so a pass whose result nobody reads leaves it out.
On a GPU: `experts_triton.py`, all experts in one launch a product, without asking the device.
Empty experts get zero gradients. A token is at most once among an expert's rows and experts take turns, so sums have
one order.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from hymoe.kernels import experts_triton, grouped_gemm_triton
from hymoe.kernels.launch import arithmetic_dtype, check_shape, uses_triton
from hymoe.kernels.route import Routing

# A CPU's bfloat16 product is compiled when its shape is first seen (2.8 ms, against 0.2 ms for 384 rows), and row
# counts change with every batch: rounded up, they are few. Float32 products are not compiled.
CPU_BF16_ROWS = 32


def grouped_gemm_ref(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """The specification of `grouped_gemm`, differentiable by autograd."""
    spans = offsets.tolist()
    pairs = zip(spans[:-1], spans[1:], strict=True)
    return torch.cat([x[a:b] @ w.T for (a, b), w in zip(pairs, weight, strict=True)])


def grouped_gemm(x: Tensor, weight: Tensor, offsets: Tensor, kernels: str = "auto") -> Tensor:
    """Each expert's rows times its matrix: y[r] = weight[e] @ x[r] for offsets[e] <= r < offsets[e+1].

    Args:
        x: (R, I) rows in expert order.
        weight: (E, O, I).
        offsets: (E+1,) int64, first row of each expert; the last entry is R.
        kernels: which implementation, see `launch.choose`.

    Returns:
        y: (R, O) in x's dtype. Not differentiable: `expert_mlp` has its own backward pass.

    Raises:
        ValueError: shapes that do not fit.
    """
    check_shape("grouped_gemm weight", weight, (None, None, x.shape[1]))
    check_shape("grouped_gemm offsets", offsets, (weight.shape[0] + 1,))
    if uses_triton("expert_mlp", kernels, x):
        rows = grouped_gemm_triton.Rows(x.shape[0], offsets)
        return grouped_gemm_triton.rows_product("down", x, weight, rows)
    y = x.new_empty(x.shape[0], weight.shape[1])
    for e, rows in _spans(offsets):
        torch.mm(x[rows], weight[e].T, out=y[rows])
    return y


def _spans(offsets: Tensor) -> list[tuple[int, slice]]:
    """Experts that have rows, and which; asks the device once where the offsets are not on the host."""
    bounds = offsets.tolist()
    return [
        (e, slice(a, b))
        for e, (a, b) in enumerate(zip(bounds[:-1], bounds[1:], strict=True))
        if b > a
    ]


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


@dataclass(frozen=True)
class _Rows:
    """Rows in expert order, each expert's rounded up with rows that have no weight.

    Attributes:
        token: (R',) int64.
        weight: (R', 1) float32 routing weight, 0 for what was added.
        place: (T*K,) int64, where each choice stands.
        spans: experts that have rows, and which.
    """

    token: Tensor
    weight: Tensor
    place: Tensor
    spans: list[tuple[int, slice]]

    @classmethod
    def of(cls, routing: Routing, weights: Tensor, multiple: int) -> "_Rows":
        token = routing.order // routing.ids.shape[1]
        weight = weights.flatten().index_select(0, routing.order)
        place = routing.inverse.flatten()
        if multiple == 1:
            return cls(token, weight[:, None], place, _spans(routing.offsets))
        starts, counts = routing.offsets[:-1], routing.counts
        room = (counts + multiple - 1) // multiple * multiple
        offsets = functional.pad(room.cumsum(0), (1, 0))
        slots = torch.arange(token.numel(), device=token.device)
        slots += (offsets[:-1] - starts).repeat_interleave(counts)
        # What is added repeats the expert's first token: its numbers, times 0, bring in nothing foreign.
        first = token[starts.clamp(max=token.numel() - 1)]
        return cls(
            first.repeat_interleave(room).index_copy_(0, slots, token),
            weight.new_zeros(int(offsets[-1])).index_copy_(0, slots, weight)[:, None],
            slots.index_select(0, place),
            _spans(offsets),
        )


class _ExpertMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        weights: Tensor,
        up: Tensor,
        down: Tensor,
        routing: Routing,
        is_read: bool,
    ) -> Tensor:
        shapes_cost = x.dtype == torch.bfloat16 and not x.is_cuda
        table = _Rows.of(routing, weights, CPU_BF16_ROWS if shapes_cost else 1)
        relu = x.new_empty(table.token.numel(), up.shape[1])  # (R', F)
        out = torch.zeros(x.shape if is_read else 0, dtype=arithmetic_dtype(x), device=x.device)
        for e, rows in table.spans:
            token = table.token[rows]
            torch.mm(x.index_select(0, token), up[e].T, out=relu[rows]).relu_()
            if not is_read:
                continue
            z = relu[rows].to(out.dtype)
            a = (z * z).mul_(table.weight[rows]).to(x.dtype)
            out.index_add_(0, token, torch.mm(a, down[e].T).to(out.dtype))
        ctx.save_for_backward(x, weights, up, down, relu)
        ctx.table = table
        return out.to(x.dtype) if is_read else torch.empty_like(x)

    @staticmethod
    def backward(ctx, dout: Tensor):
        x, weights, up, down, relu = ctx.saved_tensors
        table = ctx.table
        dw = torch.empty(table.token.numel(), dtype=weights.dtype, device=x.device)
        dup, ddown = torch.empty_like(up), torch.empty_like(down)
        dx = torch.zeros(x.shape, dtype=arithmetic_dtype(x), device=x.device)
        for e in set(range(up.shape[0])) - {e for e, _ in table.spans}:
            dup[e], ddown[e] = 0, 0
        for e, rows in table.spans:
            token, w = table.token[rows], table.weight[rows]
            d = dout.index_select(0, token)
            z = relu[rows].to(dx.dtype)
            half = (
                torch.mm(d, down[e]).to(dx.dtype).mul_(z)
            )  # relu(z) da; without the weight half of dz
            dw[rows] = (half * z).sum(-1)
            torch.mm(d.T, (z * z).mul_(w).to(x.dtype), out=ddown[e])
            dz = half.mul_(2 * w).to(x.dtype)
            torch.mm(dz.T, x.index_select(0, token), out=dup[e])
            dx.index_add_(0, token, torch.mm(dz, up[e]).to(dx.dtype))
        dweights = dw.index_select(0, table.place).view_as(weights)
        return dx.to(x.dtype), dweights, dup, ddown, None, None


def expert_mlp(
    x: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    routing: Routing,
    kernels: str = "auto",
    is_read: bool = True,
) -> Tensor:
    """Sum over each token's experts of weight * down(relu(up(x))^2).

    Args:
        x: (T, D) inputs; D is the latent size where the model has one.
        weights: (T, K) float32 routing weights.
        up: (E, F, D) in x's dtype.
        down: (E, D, F) in x's dtype.
        routing: choices and expert order of the T tokens.
        kernels: which implementation, see `launch.choose`.
        is_read: whether anybody reads the result. False in a recomputation that is there for the backward pass alone:
            gradients are the same, the down product is not made.

    Returns:
        out: (T, D) in x's dtype; fresh memory where it is not read.

    Raises:
        ValueError: shapes that do not fit.
    """
    check_shape("expert_mlp routing", routing.ids, (x.shape[0], weights.shape[1]))
    check_shape("expert_mlp up", up, (routing.offsets.shape[0] - 1, None, x.shape[1]))
    check_shape("expert_mlp down", down, (up.shape[0], x.shape[1], up.shape[1]))
    if uses_triton("expert_mlp", kernels, x):
        return experts_triton.TritonExpertMLP.apply(x, weights, up, down, routing, is_read)
    return _ExpertMLP.apply(x, weights, up, down, routing, is_read)
