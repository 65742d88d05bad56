"""Linear layer and cross-entropy in one, over supervised rows only, without the logits.

Math: for a supervised row t with target y: logits z = weight @ hidden[t]; loss = logsumexp(z) - z[y];
dz = softmax(z) - onehot(y); dhidden[t] = weight^T @ dz; dweight += outer(dz, hidden[t]).
Rows without a target are taken out before the first product. The rest goes in chunks: a chunk's logits become its
dz in the same buffer, and both gradients are ready when the forward pass ends (times the gradient of the sum, a
scalar, in the backward pass).

Dtypes: logits, log-sum-exp and p - 1 in float32, dz rounded once to the weight's dtype for the products; dweight is
summed in float32 over chunks. Memory: one chunk of logits, one float32 dweight, the hidden gradient of the supervised
rows. A target outside 0..V-1 gives NaN for its row, and so for the sum and the gradients; `per_token_loss` shows which.
"""

import torch
from torch import Tensor
from torch.nn import functional

from hymoe.kernels.launch import arithmetic_dtype, check_shape

IGNORE = -100  # label of a token without supervision
CHUNK_BYTES = 1 << 30  # of float32 logits at most: 2,048 rows of a 131,072-word vocabulary
CPU_CHUNK_ROWS = 512  # more would leave a CPU's cache (4,096 words: 20 % slower in one chunk)


def linear_cross_entropy_ref(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The specification of `linear_cross_entropy`: all logits at once, the sum over supervised rows."""
    wide = arithmetic_dtype(hidden)
    logits = hidden.to(wide) @ weight.to(wide).T
    return functional.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, labels: Tensor, rows: Tensor) -> Tensor:
        wide = arithmetic_dtype(hidden)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        dweight = torch.zeros(weight.shape, dtype=wide, device=weight.device)
        drows = hidden.new_empty(rows.numel(), hidden.shape[1])
        for chunk, dchunk in zip(
            rows.split(chunk_rows(weight)), drows.split(chunk_rows(weight)), strict=True
        ):
            h = hidden.index_select(0, chunk)
            target = labels.index_select(0, chunk)
            dz = _logits(h, weight)
            picked, valid = _pick(dz, target)
            largest = dz.amax(-1, keepdim=True)
            total_exp = dz.sub_(largest).exp_().sum(-1, keepdim=True)
            lse = total_exp.log().add_(largest)[:, 0]
            total += torch.where(valid, lse - picked, torch.nan).sum()
            # softmax - onehot, or NaN in the whole row
            dz.mul_(torch.where(valid[:, None], 1 / total_exp, torch.nan))
            dz.scatter_add_(1, _clamped(target, weight), dz.new_full((len(chunk), 1), -1))
            dz = dz.to(hidden.dtype)
            torch.mm(dz, weight, out=dchunk)
            if dweight.dtype == dz.dtype:
                dweight.addmm_(dz.T, h)
            else:
                dweight += dz.T @ h
        ctx.save_for_backward(rows, drows, dweight)
        ctx.tokens, ctx.dtype = hidden.shape[0], weight.dtype
        return total

    @staticmethod
    def backward(ctx, dloss: Tensor):
        rows, drows, dweight = ctx.saved_tensors
        dhidden = torch.zeros(ctx.tokens, drows.shape[1], dtype=drows.dtype, device=drows.device)
        dhidden.index_copy_(0, rows, (drows * dloss).to(drows.dtype))
        return dhidden, (dweight * dloss).to(ctx.dtype), None, None


def chunk_rows(weight: Tensor) -> int:
    """Rows of logits that exist at a time."""
    rows = max(1, CHUNK_BYTES // (4 * weight.shape[0]))
    return rows if weight.is_cuda else min(CPU_CHUNK_ROWS, rows)


def _logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """(rows, V) in float32. On a GPU the product keeps its float32 accumulator; a CPU has no such product."""
    wide = arithmetic_dtype(hidden)
    if hidden.dtype != wide and hidden.is_cuda:
        return torch.mm(hidden, weight.T, out_dtype=wide)
    return (hidden @ weight.T).to(wide)


def _clamped(target: Tensor, weight: Tensor) -> Tensor:
    """(rows, 1), every target a word of the vocabulary."""
    return target.clamp(0, weight.shape[0] - 1)[:, None]


def _pick(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Logit of each row's target, and whether the target is a word of the vocabulary."""
    valid = (target >= 0) & (target < logits.shape[1])
    return logits.gather(1, _clamped(target, logits.T))[:, 0], valid


def supervised_rows(labels: Tensor, count: int | None) -> Tensor:
    """Indices of the supervised rows; with the host's count of them the device need not be asked."""
    if count is None or not labels.is_cuda:
        rows = torch.nonzero(labels != IGNORE)[:, 0]
        if count not in (None, rows.numel()):
            raise ValueError(
                f"supervised rows: {rows.numel()} labels are not {IGNORE}, the host counted {count}"
            )
        return rows
    return torch.nonzero_static(labels != IGNORE, size=count)[:, 0]


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, count: int | None = None
) -> Tensor:
    """Sum of the cross-entropies of the supervised rows.

    Args:
        hidden: (T, D) final hidden states.
        weight: (V, D) output projection, in hidden's dtype.
        labels: (T,) int64 targets, -100 where a row is not supervised.
        count: number of supervised rows where the host knows it.

    Returns:
        loss: () float32, in nats; 0 (still connected to both inputs) where nothing is supervised.

    Raises:
        ValueError: shapes that do not fit, or a count that is not the labels' (found on a CPU only).
    """
    check_shape("linear_cross_entropy weight", weight, (None, hidden.shape[1]))
    check_shape("linear_cross_entropy labels", labels, (hidden.shape[0],))
    rows = supervised_rows(labels, count)
    # Asked here, because inside a Function's forward pass the answer is always no.
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return _LinearCrossEntropy.apply(hidden, weight, labels, rows)
    return _losses(hidden, weight, labels, rows).sum()


@torch.no_grad()
def per_token_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """(T,) float32 cross-entropy of each row, 0 where not supervised, NaN where the target is no word."""
    rows = supervised_rows(labels, None)
    losses = _losses(hidden, weight, labels, rows)
    return losses.new_zeros(hidden.shape[0]).index_copy_(0, rows, losses)


def _losses(hidden: Tensor, weight: Tensor, labels: Tensor, rows: Tensor) -> Tensor:
    """Cross-entropy of the given rows, float32."""
    parts = [hidden.new_zeros(0, dtype=arithmetic_dtype(hidden))]
    for chunk in rows.split(chunk_rows(weight)):
        logits = _logits(hidden.index_select(0, chunk), weight)
        picked, valid = _pick(logits, labels.index_select(0, chunk))
        parts.append(torch.where(valid, torch.logsumexp(logits, -1) - picked, torch.nan))
    return torch.cat(parts)
