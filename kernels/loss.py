"""Linear layer and cross-entropy in one, over supervised rows only, without the logits.

Math: for a supervised row t with target y: logits z = weight @ hidden[t]; loss = logsumexp(z) - z[y];
dz = softmax(z) - onehot(y); dhidden[t] = weight^T @ dz; dweight += outer(dz, hidden[t]).
Rows without a target are taken out before the first product. The rest goes in chunks of rows: a chunk's dz replaces
its logits in a buffer that all chunks share. For a sum or a mean both gradients are ready when the forward pass ends:
three products. Where each row has an upstream gradient of its own, it is not known then: the backward pass forms the
logits again, four products.

Dtypes: log-sum-exp, loss and p - 1 in float32 (float64 for float64), dz rounded once to the weight's dtype for the
products; dweight is summed in float32 over chunks. Memory: one chunk, one float32 dweight, the hidden gradient of the
supervised rows. A CPU has no product of BF16 matrices with a float32 result, so its logits are BF16, as in plain
torch; on a GPU they stay in float32.
A target that is no word makes its row NaN, and with it the sum and the gradients; `per_token_loss` shows which.
On a GPU: the kernels of `loss_triton.py`; the remaining product, dz @ weight, is cuBLAS's.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from hymoe.kernels import loss_triton
from hymoe.kernels.launch import arithmetic_dtype, check_shape, uses_triton

IGNORE = -100  # label of a token without supervision
REDUCTIONS = ("sum", "mean", "none")
CHUNK_BYTES = 1 << 30  # of one chunk: 4,096 rows of a 131,072-word vocabulary in BF16
CPU_CHUNK_BYTES = (
    1 << 26
)  # fresh memory costs a CPU as much as a pass over it; smaller gains nothing
# Of float32 that a CPU works on in one go, logits or dweight: less than its last cache. Tiles of an L2 cache are no
# faster, and on a busy machine their many barriers of threads cost half the time again.
CPU_TILE_BYTES = 1 << 22


def linear_cross_entropy_ref(
    hidden: Tensor, weight: Tensor, labels: Tensor, reduction: str = "sum"
) -> Tensor:
    """The specification of `linear_cross_entropy`: all logits at once."""
    wide = arithmetic_dtype(hidden)
    logits = hidden.to(wide) @ weight.to(wide).T
    return functional.cross_entropy(logits, labels, ignore_index=IGNORE, reduction=reduction)


class _Arithmetic(NamedTuple):
    """What a chunk needs; torch's and Triton's are interchangeable.

    Attributes:
        row_losses: hidden (n, D), weight (V, D), target (n,), dz (n, V) or None, factor (n,) or None -> (n,) losses;
            dz is overwritten with the gradient of factor * loss by the logits.
        add_outer: dweight (V, D), dz (n, V), hidden (n, D), first: dweight += dz^T @ hidden, or = for the first.
        align: rows of the buffer start at multiples of so many elements.
    """

    row_losses: Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None], Tensor]
    add_outer: Callable[[Tensor, Tensor, Tensor, bool], None]
    align: int


def _torch_row_losses(
    hidden: Tensor, weight: Tensor, target: Tensor, dz: Tensor | None, factor: Tensor | None
) -> Tensor:
    logits = _logits(hidden, weight, dz)
    target = target[:, None]
    wide = arithmetic_dtype(hidden)
    losses = torch.empty(target.shape, dtype=wide, device=hidden.device)
    for rows in _tiles(logits):
        z = logits[rows].to(wide)
        largest, picked = z.amax(-1, keepdim=True), z.gather(1, target[rows])
        # Not exp: a CPU's is five times slower. The largest p is 1 / sum exp(z - largest).
        p = torch.softmax(z, -1, out=z)
        losses[rows] = (largest - picked).sub_(p.amax(-1, keepdim=True).log_())
        if dz is None:
            continue
        p.scatter_add_(1, target[rows], p.new_full((p.shape[0], 1), -1))
        dz[rows] = p if factor is None else p.mul_(factor[rows, None])
    return losses[:, 0]


def _tiles(x: Tensor) -> list[slice]:
    """Rows of x to work on together; on a GPU all of them."""
    rows = x.shape[0]
    most = CPU_TILE_BYTES // (4 * x.shape[1])
    step = rows if x.is_cuda else max(most, torch.get_num_threads())
    return [slice(start, min(start + step, rows)) for start in range(0, rows, max(1, step))]


def _logits(hidden: Tensor, weight: Tensor, buffer: Tensor | None) -> Tensor:
    """(n, V). On a GPU the product keeps its float32 accumulator; a CPU has no such product."""
    wide = arithmetic_dtype(hidden)
    if hidden.dtype != wide and hidden.is_cuda:
        return torch.mm(hidden, weight.T, out_dtype=wide)
    return torch.mm(hidden, weight.T, out=buffer)


def _torch_add_outer(dweight: Tensor, dz: Tensor, hidden: Tensor, first: bool) -> None:
    if dweight.dtype == dz.dtype:
        torch.addmm(dweight, dz.T, hidden, beta=float(not first), out=dweight)
        return
    for words in _tiles(dweight):
        part = dz[:, words].T @ hidden
        if first:
            dweight[words] = part
        else:
            dweight[words] += part


TORCH = _Arithmetic(_torch_row_losses, _torch_add_outer, align=1)
TRITON = _Arithmetic(loss_triton.row_losses, loss_triton.add_outer, align=loss_triton.ALIGN)


class _Chunk(NamedTuple):
    """Supervised rows that are worked on together: where they lie among all of them, hidden (n, D), target (n,)."""

    rows: slice
    hidden: Tensor
    target: Tensor


def _chunks(hidden: Tensor, weight: Tensor, rows: Tensor, targets: Tensor) -> Iterator[_Chunk]:
    """Targets are 0..V-1 in a chunk; the hidden row of a target that was not is NaN, and so is all that follows."""
    words = weight.shape[0]
    for part in _row_slices(rows, weight):
        wanted = targets[part]
        valid = (wanted >= 0) & (wanted < words)
        h = hidden.index_select(0, rows[part]).masked_fill_(~valid[:, None], torch.nan)
        yield _Chunk(part, h, wanted.clamp(0, words - 1))


def _row_slices(rows: Tensor, weight: Tensor) -> list[slice]:
    """As few chunks as fit, of nearly equal size: what one of them needs is the least."""
    count, most = rows.shape[0], chunk_rows(weight)
    chunks = -(-count // most)
    step = -(-count // max(1, chunks))
    return [slice(i * step, min((i + 1) * step, count)) for i in range(chunks)]


def chunk_rows(weight: Tensor) -> int:
    """Rows of logits that exist at a time."""
    most = CPU_CHUNK_BYTES if weight.device.type == "cpu" else CHUNK_BYTES
    return max(1, most // (weight.element_size() * weight.shape[0]))


def _buffer(rows: Tensor, weight: Tensor, align: int) -> Tensor:
    """(largest chunk, V) in the weight's dtype."""
    words = weight.shape[0]
    longest = max((part.stop - part.start for part in _row_slices(rows, weight)), default=0)
    return weight.new_empty(longest, -(-words // align) * align)[:, :words]


class _Gradients:
    """Collects the gradients of factor * loss over chunks."""

    def __init__(
        self,
        arithmetic: _Arithmetic,
        weight: Tensor,
        rows: Tensor,
        factor: Tensor | None,
        wanted: tuple[bool, bool],
    ) -> None:
        """Rows: of all chunks; factor: (n,) or None; wanted: for hidden, for weight."""
        self.arithmetic, self.weight, self.factor = arithmetic, weight, factor
        self.buffer = _buffer(rows, weight, arithmetic.align)
        wide, device = arithmetic_dtype(weight), weight.device
        one_chunk = arithmetic is TORCH and self.buffer.shape[0] == rows.shape[0]
        make = torch.empty if rows.shape[0] else torch.zeros
        self.drows = self.dweight = None
        if wanted[0]:
            self.drows = weight.new_empty(rows.shape[0], weight.shape[1])
        if wanted[1]:
            # Torch's product of a single chunk is rounded already: float32 would keep nothing.
            dtype = weight.dtype if one_chunk else wide
            self.dweight = make(weight.shape, dtype=dtype, device=device)

    def add(self, chunk: _Chunk) -> Tensor:
        """Losses of the chunk, (n,)."""
        part, h, target = chunk
        dz = self.buffer[: h.shape[0]]
        factor = None if self.factor is None else self.factor[part]
        losses = self.arithmetic.row_losses(h, self.weight, target, dz, factor)
        if self.drows is not None:
            torch.mm(dz, self.weight, out=self.drows[part])
        if self.dweight is not None:
            self.arithmetic.add_outer(self.dweight, dz, h, part.start == 0)
        return losses


class _Sum(torch.autograd.Function):
    """Sum of losses over `scale`; the gradients are made along with it."""

    @staticmethod
    def forward(ctx, hidden, weight, rows, targets, scale, arithmetic):
        wide = arithmetic_dtype(hidden)
        factor = None if scale is None else (1 / scale.to(wide)).repeat(rows.shape[0])
        sums = _Gradients(arithmetic, weight, rows, factor, ctx.needs_input_grad[:2])
        parts = [hidden.new_zeros(0, dtype=wide)]
        parts += [sums.add(chunk) for chunk in _chunks(hidden, weight, rows, targets)]
        ctx.save_for_backward(rows, sums.drows, sums.dweight)
        ctx.shape, ctx.dtype = hidden.shape, hidden.dtype
        return _total(torch.cat(parts), scale)

    @staticmethod
    def backward(ctx, dloss: Tensor):
        rows, drows, dweight = ctx.saved_tensors
        if drows is not None:
            drows = _scatter(_scaled(drows, dloss, ctx.dtype), rows, ctx.shape)
        if dweight is not None:
            dweight = _scaled(dweight, dloss, ctx.dtype)
        return drows, dweight, None, None, None, None


class _EachRow(torch.autograd.Function):
    """Losses of the supervised rows, each with its own upstream gradient."""

    @staticmethod
    def forward(ctx, hidden, weight, rows, targets, arithmetic):
        ctx.save_for_backward(hidden, weight, rows, targets)
        ctx.arithmetic = arithmetic
        return _losses(hidden, weight, rows, targets, arithmetic)

    @staticmethod
    def backward(ctx, dlosses: Tensor):
        hidden, weight, rows, targets = ctx.saved_tensors
        dlosses = dlosses.contiguous()
        sums = _Gradients(ctx.arithmetic, weight, rows, dlosses, ctx.needs_input_grad[:2])
        for chunk in _chunks(hidden, weight, rows, targets):
            sums.add(chunk)
        drows, dweight = sums.drows, sums.dweight
        if drows is not None:
            drows = _scatter(drows, rows, hidden.shape)
        return drows, None if dweight is None else dweight.to(weight.dtype), None, None, None


def _losses(
    hidden: Tensor, weight: Tensor, rows: Tensor, targets: Tensor, arithmetic: _Arithmetic
) -> Tensor:
    """Cross-entropy of the supervised rows, (n,)."""
    parts = [hidden.new_zeros(0, dtype=arithmetic_dtype(hidden))]
    parts += [
        arithmetic.row_losses(chunk.hidden, weight, chunk.target, None, None)
        for chunk in _chunks(hidden, weight, rows, targets)
    ]
    return torch.cat(parts)


def _total(losses: Tensor, scale: Tensor | None) -> Tensor:
    """Nothing is 0 whatever the scale, which may then be 0 itself."""
    total = losses.sum()
    return total if scale is None or not losses.numel() else total / scale.to(total.dtype)


def _scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """X times a () tensor that keeps its precision (on a GPU torch would round it to x's dtype), rounded once."""
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    for rows in _tiles(x):
        torch.mul(x[rows], factor.reshape(1, 1), out=out[rows])
    return out


def _scatter(x: Tensor, rows: Tensor, shape: torch.Size) -> Tensor:
    """Rows of x where they belong, zeros elsewhere."""
    return x.new_zeros((shape[0], *x.shape[1:])).index_copy_(0, rows, x)


def supervised_rows(labels: Tensor, count: int | None) -> tuple[Tensor, Tensor]:
    """Indices and targets of the supervised rows; with the host's count of them the device need not be asked.

    Raises:
        ValueError: the count is not the labels', on a CPU.
    """
    if count is not None and labels.device.type != "cpu":
        return counted_rows(labels, count)
    rows = torch.nonzero(labels != IGNORE)[:, 0]
    if count not in (None, rows.numel()):
        raise ValueError(
            f"supervised rows: {rows.numel()} labels are not {IGNORE}, the host counted {count}"
        )
    return rows, labels.index_select(0, rows)


def counted_rows(labels: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The same without asking the device; where the count is not the labels' every target is -1, which is no word."""
    is_supervised = labels != IGNORE
    rows = torch.nonzero_static(is_supervised, size=count, fill_value=0)[:, 0]
    targets = labels.index_select(0, rows)
    return rows, targets.masked_fill_(is_supervised.sum() != count, -1)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    count: int | None = None,
    kernels: str = "auto",
    *,
    reduction: str = "sum",
    scale: Tensor | None = None,
) -> Tensor:
    """Cross-entropies of the supervised rows of a linear layer's output.

    Args:
        hidden: (T, D) final hidden states.
        weight: (V, D) output projection, in hidden's dtype.
        labels: (T,) int64 targets, -100 where a row is not supervised.
        count: number of supervised rows where the host knows it.
        kernels: which implementation, see `launch.choose`.
        reduction: sum | mean over the supervised rows | none.
        scale: () on hidden's device; loss and gradients are divided by it (a count of tokens over all ranks).

    Returns:
        loss: () float32, in nats; 0 (still connected to both inputs) where nothing is supervised. For "none" (T,),
            0 where not supervised. NaN where a target is no word, see `per_token_loss`; NaN where the count is not
            the labels' on a device that is not asked.

    Raises:
        ValueError: shapes or dtypes that do not fit, an unknown reduction, a mean with a scale, or a count that is
            not the labels' (found on a CPU only).
    """
    check_shape("linear_cross_entropy weight", weight, (None, hidden.shape[1]))
    check_shape("linear_cross_entropy labels", labels, (hidden.shape[0],))
    if weight.dtype != hidden.dtype:
        raise ValueError(
            f"linear_cross_entropy: hidden is {hidden.dtype} and weight is {weight.dtype}"
        )
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction = {reduction!r}; expected one of {', '.join(REDUCTIONS)}")
    if reduction == "mean" and scale is not None:
        raise ValueError("a mean has its own divisor: give a scale to the sum")
    if scale is not None:
        check_shape("linear_cross_entropy scale", scale, ())
    arithmetic = TRITON if uses_triton("linear_cross_entropy", kernels, hidden) else TORCH
    rows, targets = supervised_rows(labels, count)
    if reduction == "none":
        losses = _EachRow.apply(hidden, weight, rows, targets, arithmetic)
        losses = losses if scale is None else losses / scale
        return losses.new_zeros(labels.shape).index_copy(0, rows, losses)
    if reduction == "mean" and rows.numel():
        scale = torch.full((), rows.numel(), dtype=torch.float32, device=hidden.device)
    # Asked here, because inside a Function's forward pass the answer is always no.
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return _Sum.apply(hidden, weight, rows, targets, scale, arithmetic)
    return _total(_losses(hidden, weight, rows, targets, arithmetic), scale)


@torch.no_grad()
def per_token_loss(hidden: Tensor, weight: Tensor, labels: Tensor, kernels: str = "auto") -> Tensor:
    """(T,) float32 cross-entropy of each row, 0 where not supervised, NaN where the target is no word."""
    return linear_cross_entropy(hidden, weight, labels, None, kernels, reduction="none")
