"""The Mamba-2 scan over packed documents, chunk by chunk with matrix products: torch version and dispatch.

Math (letters of `model/config.py`; `ref.py` has the recurrence): with s[i] the running sum of dt*a within a chunk,
1. inside a chunk: y[i] += sum_{j<=i} (c[i] . b[j]) exp(s[i] - s[j]) dt[j] x[j]; c . b once a group, not once a head;
2. what a chunk adds to the state: sum_j exp(s[Q-1] - s[j]) b[j] outer dt[j] x[j];
3. from chunk to chunk of a document: enter[k] = exp(s_{k-1}[Q-1]) enter[k-1] + added[k-1], enter of the first being 0;
4. what a chunk reads of it: y[i] += exp(s[i]) c[i] . enter.
Backward, with m[i,j] = (c[i] . b[j]) exp(s[i] - s[j]) of step 1 and dm[i,j] = dy[i] . dt[j] x[j]: each product's two
gradients, and ds[i] = sum_j (dm*m)[i,j] - sum_j (dm*m)[j,i] + what the exponentials of steps 2 to 4 give; the gradient
of dt*a is the sum of ds over the rest of the chunk.
Chunks begin anew with each document (`Packed.blocks`), so nothing can cross a boundary. They are worked on in blocks
whose temporaries fit a core's cache; a document's results depend on where it lies in the row by rounding at most.

Shapes inside a block of n chunks: R = H/G heads of a group, J = n*G pairs of a chunk and a group.
Dtypes: arithmetic in float32; s, its differences and its gradient in float64, because they cancel; y in x's dtype.
Memory: saved are the inputs and the states between chunks, about (C, N, H, P) float32; the rest is computed again.
Source: Dao and Gu 2024, section 6.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from hymoe.kernels.launch import arithmetic_dtype, check_shape, choose
from hymoe.kernels.packed import Block, Packed
from hymoe.kernels.ssd.package import package_scan
from hymoe.kernels.ssd.scan import triton_scan

CPU_CHUNK = 64  # tokens: half the work inside of a chunk of 128, twice the states
CPU_BLOCK = 1 << 19  # elements a thread: a temporary of each shape fills an L2 of 2 MB


@dataclass
class _Chunks:
    """The inputs of a block as the products want them; unused slots are zeros."""

    x: Tensor  # (n, Q, G, R, P)
    step: Tensor  # (n, Q, G, R, 1)
    b: Tensor  # (J, Q, N)
    c: Tensor  # (J, Q, N)
    scores: Tensor  # (J, 1, Q, Q), c . b
    decay: Tensor  # (J, R, Q, Q), exp(s[i] - s[j]) for j <= i, else 0
    from_start: Tensor  # (n, Q, G, R, 1), exp(s[i])
    to_end: Tensor  # (n, Q, G, R, 1), exp(s[Q-1] - s[j])
    through: Tensor  # (n, G, 1, R, 1), exp(s[Q-1])

    @classmethod
    def load(
        cls, block: Block, size: int, x: Tensor, step: Tensor, rate: Tensor, b: Tensor, c: Tensor
    ) -> "_Chunks":
        """Reads the rows of a block, whatever their dtype and strides."""
        groups = b.shape[1]
        split = lambda t: t.unflatten(2, (groups, -1))  # noqa: E731  (n, Q, H, ...) -> (n, Q, G, R, ...)
        cut = lambda t: _into_slots(t, block, size, step.dtype)  # noqa: E731
        wide = lambda t: torch.exp(t).to(step.dtype)[..., None]  # noqa: E731
        s = split(_into_slots(rate, block, size, torch.float64).cumsum(1))  # (n, Q, G, R)
        last = s[:, -1:]
        by_head = s.permute(0, 2, 3, 1).flatten(0, 1).contiguous()  # (J, R, Q)
        # exp of all differences, then zeros above the diagonal, where it may have become infinite.
        decay = (by_head[..., :, None] - by_head[..., None, :]).to(step.dtype).exp_().tril_()
        b, c = (cut(t).transpose(1, 2).contiguous().flatten(0, 1) for t in (b, c))
        return cls(
            x=split(cut(x)),
            step=split(cut(step))[..., None],
            b=b,
            c=c,
            scores=torch.bmm(c, b.transpose(1, 2))[:, None],
            decay=decay,
            from_start=wide(s),
            to_end=wide(last - s),
            through=wide(last).transpose(1, 2),
        )

    def by_head(self, left: Tensor, right: Tensor) -> Tensor:
        """Product of two (n, Q, G, R, P) or (n, Q, G, R, 1), laid out as (J, R, Q, P)."""
        return _product(left, right, (0, 2, 3, 1, 4)).flatten(0, 1)

    def by_token(self, left: Tensor, right: Tensor) -> Tensor:
        """Product of two (n, Q, G, R, P) or (n, Q, G, R, 1), laid out as (J, Q, R*P)."""
        return _product(left, right, (0, 2, 1, 3, 4)).flatten(0, 1).flatten(2)

    def tokens(self, rows: Tensor) -> Tensor:
        """(J, Q, R*P) or (J, R, Q, P) seen as (n, Q, G, R, P)."""
        groups, heads = self.x.shape[2:4]
        if rows.dim() == 4:
            return rows.unflatten(0, (-1, groups)).permute(0, 3, 1, 2, 4)
        return rows.unflatten(0, (-1, groups)).unflatten(3, (heads, -1)).transpose(1, 2)


def _product(left: Tensor, right: Tensor, order: tuple[int, ...]) -> Tensor:
    """The product, contiguous in another order of dimensions, in one pass."""
    left, right = left.permute(order), right.permute(order)
    out = torch.empty(left.shape, dtype=left.dtype, device=left.device)
    return torch.mul(left, right, out=out)


def _into_slots(x: Tensor, block: Block, size: int, dtype: torch.dtype) -> Tensor:
    """Rows of the block, (t, ...) -> (n, Q, ...), zeros where a chunk has no token."""
    rows = x[block.rows].to(dtype)
    if block.slots is not None:
        empty = rows.new_zeros(block.chunks * size, *rows.shape[1:])
        rows = empty.index_copy_(0, block.slots, rows)
    return rows.unflatten(0, (block.chunks, size))


def _from_slots(out: Tensor, block: Block, slots: Tensor) -> None:
    """Writes (n, Q, G, ...) to the block's rows of `out`, (T, G*..., ...), in its dtype."""
    rows = out[block.rows]
    if block.slots is None:
        rows.view(slots.shape).copy_(slots)
    else:
        rows.copy_(slots.flatten(0, 1).index_select(0, block.slots).view(rows.shape))


def _pass_on(states: Tensor, through: Tensor, block: Block) -> None:
    """Step 3, in place.

    Args:
        states: (n+1, G, N, R, P); number 0 is the state before the block, the others what the chunks add. They become
            the states before each chunk and behind the last one, zeros where a document begins.
        through: (n, G, 1, R, 1).
        block: says which chunks continue a document.
    """
    for k in range(block.chunks):
        if k + 1 in block.continued:
            states[k + 1].addcmul_(through[k], states[k])
        else:
            states[k + 1] = 0


def _pass_back(dstates: Tensor, through: Tensor, block: Block) -> None:
    """The backward pass of step 3, in place.

    Args:
        dstates: (n+1, G, N, R, P), gradients through what each chunk reads, and of the state behind the block. They
            become the whole gradients of those states; number k+1 is that of what chunk k adds, too.
        through: (n, G, 1, R, 1).
        block: says which chunks continue a document.
    """
    for k in reversed(range(block.chunks)):
        if k in block.continued:
            dstates[k].addcmul_(through[k], dstates[k + 1])
        else:
            dstates[k] = 0


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        step: Tensor,
        rate: Tensor,
        b: Tensor,
        c: Tensor,
        skip: Tensor,
        blocks: tuple[Block, ...],
        size: int,
        has_backward: bool,
    ) -> Tensor:
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        saved: list[Tensor | None] = []
        weight = skip.view(b.shape[1], -1, 1)  # (G, R, 1)
        last = None  # the states of the block before
        for block in blocks:
            k = _Chunks.load(block, size, x, step, rate, b, c)
            out = k.tokens((k.scores * k.decay) @ k.by_head(k.x, k.step))  # (n, Q, G, R, P)
            states = None
            if block.continued:
                states = _states_like(k)
                states[0] = last[-1] if 0 in block.continued else 0
                kept = k.by_token(k.x, k.step * k.to_end)
                torch.bmm(k.b.transpose(1, 2), kept, out=_by_group(states[1:]))
                _pass_on(states, k.through, block)
                out.addcmul_(k.tokens(torch.bmm(k.c, _by_group(states[:-1]))), k.from_start)
            _from_slots(y, block, out.addcmul_(k.x, weight))
            saved.append(states if has_backward else None)
            last = states
        ctx.save_for_backward(x, step, rate, b, c, skip, *saved)
        ctx.blocks, ctx.size = blocks, size
        return y

    @staticmethod
    def backward(ctx, dy: Tensor):
        x, step, rate, b, c, skip, *saved = ctx.saved_tensors
        dx, db, dc = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (x, b, c))
        dstep, drate, dskip = torch.empty_like(step), torch.empty_like(rate), 0
        weight = skip.view(b.shape[1], -1, 1)
        dlast = None  # of the states before the block behind
        for block, states in zip(reversed(ctx.blocks), reversed(saved), strict=True):
            k = _Chunks.load(block, ctx.size, x, step, rate, b, c)
            dy_block = _into_slots(dy, block, ctx.size, step.dtype).view(k.x.shape)
            dxdt, ds, db_block, dc_block = _inside_backward(k, dy_block)
            if states is not None:
                more, dlast = _states_backward(k, dy_block, states, block, dlast)
                for one, other in zip((dxdt, ds, db_block, dc_block), more, strict=True):
                    one.add_(other)
            split = lambda t: t.unflatten(0, (-1, b.shape[1])).transpose(1, 2)  # noqa: E731
            dskip = dskip + (dy_block * k.x).sum((0, 1, 4)).flatten()
            _from_slots(dstep, block, (dxdt * k.x).sum(-1))
            # Backwards running sum: s[i] holds the rate of every token up to i.
            _from_slots(drate, block, ds.sum(1, keepdim=True) - ds.cumsum(1) + ds)
            _from_slots(dx, block, dxdt.mul_(k.step).addcmul_(dy_block, weight))
            _from_slots(db, block, split(db_block))
            _from_slots(dc, block, split(dc_block))
        return dx, dstep, drate, db, dc, dskip, None, None, None


def _states_like(k: _Chunks) -> Tensor:
    """(n+1, G, N, R, P), not yet written."""
    chunks, _, groups, heads, width = k.x.shape
    return k.x.new_empty(chunks + 1, groups, k.b.shape[-1], heads, width)


def _by_group(states: Tensor) -> Tensor:
    """(n, G, N, R, P) -> (J, N, R*P), a view."""
    return states.flatten(0, 1).flatten(2)


def _inside_backward(k: _Chunks, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Step 1: gradients of dt x (n, Q, G, R, P), s (n, Q, G, R) float64, b and c (J, Q, N)."""
    dy = k.by_head(dy, torch.ones_like(k.step))  # (J, R, Q, P)
    dxdt = k.tokens((k.scores * k.decay).transpose(2, 3) @ dy)
    dm = (dy @ k.by_head(k.x, k.step).transpose(2, 3)).mul_(k.decay)  # (J, R, Q, Q)
    dscores = dm.sum(1)
    both = dm.mul_(k.scores).double()
    ds = (both.sum(3) - both.sum(2))[..., None]  # (J, R, Q, 1)
    return (
        dxdt,
        k.tokens(ds)[..., 0],
        torch.bmm(dscores.transpose(1, 2), k.c),
        torch.bmm(dscores, k.b),
    )


def _states_backward(
    k: _Chunks, dy: Tensor, states: Tensor, block: Block, dlast: Tensor | None
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Steps 2 to 4: the same gradients as step 1's, and that of the state that entered the block."""
    enter = _by_group(states[:-1])
    dread = k.by_token(dy, k.from_start)  # (J, Q, R*P)
    read = torch.bmm(k.c, enter)
    ds = k.tokens(read.mul_(dread)).sum(-1).double()
    dc = torch.bmm(dread, enter.transpose(1, 2))
    dstates = torch.empty_like(states)
    dstates[-1] = dlast if block.chunks in block.continued else 0
    torch.bmm(k.c.transpose(1, 2), dread, out=_by_group(dstates[:-1]))
    _pass_back(dstates, k.through, block)

    dadded = _by_group(dstates[1:])
    db = torch.bmm(k.by_token(k.x, k.step * k.to_end), dadded.transpose(1, 2))
    dxdt = k.tokens(torch.bmm(k.b, dadded)).mul_(k.to_end)
    # What decays towards the end counts at its own s and, with the other sign, at the last one.
    share = ((dxdt * k.x).sum(-1, keepdim=True) * k.step)[..., 0].double()
    ds -= share
    through = (dstates[1:] * states[:-1]).sum((2, 4)) * k.through[:, :, 0, :, 0]  # (n, G, R)
    ds[:, -1] += share.sum(1) + through
    return (dxdt, ds, db, dc), dstates[0]


def ssd_scan(
    x: Tensor,
    dt: Tensor,
    a_log: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
    packed: Packed,
    chunk_size: int = 128,
    kernels: str = "auto",
) -> Tensor:
    """Selective state-space scan along each document.

    Args:
        x: (T, H, P) inputs of the heads.
        dt: (T, H) raw time steps, before bias and softplus.
        a_log: (H,) log of the decay rate.
        b: (T, G, N) input projections; a group serves H/G heads.
        c: (T, G, N) output projections.
        skip: (H,) weight of x in the output (`D` of the checkpoint).
        dt_bias: (H,) added to dt.
        dt_limit: lowest and highest time step after softplus.
        packed: boundaries of the documents in the T tokens.
        chunk_size: Q at most; a row of short documents uses shorter chunks, which changes rounding only.
        kernels: which implementation, see `launch.choose`.

    Returns:
        y: (T, H, P) in x's dtype.

    Raises:
        ValueError: shapes that do not fit.
    """
    tokens, heads, width = x.shape
    groups, states = b.shape[1:]
    check_shape("ssd_scan x", x, (packed.num_tokens, None, None))
    check_shape("ssd_scan dt", dt, (tokens, heads))
    check_shape("ssd_scan b", b, (tokens, None, None))
    check_shape("ssd_scan c", c, tuple(b.shape))
    for name, vector in (("a_log", a_log), ("skip", skip), ("dt_bias", dt_bias)):
        check_shape(f"ssd_scan {name}", vector, (heads,))
    if heads % groups:
        raise ValueError(f"ssd_scan: {heads} heads do not divide by {groups} groups")

    chosen = choose("ssd_scan", kernels, x.device.type, x.dtype).name
    if chosen != "torch":
        run = triton_scan if chosen == "triton" else package_scan
        return run(x, dt, a_log, b, c, skip, dt_bias, dt_limit, packed, chunk_size)
    wide = arithmetic_dtype(x)
    size, most = _chunking(packed, chunk_size, x, states)
    step = functional.softplus(dt.to(wide) + dt_bias.to(wide)).clamp(*dt_limit)  # (T, H)
    rate = step * -torch.exp(a_log.to(wide))
    blocks = packed.blocks(size, most)
    return _Scan.apply(x, step, rate, b, c, skip.to(wide), blocks, size, torch.is_grad_enabled())


def _chunking(packed: Packed, chunk_size: int, x: Tensor, states: int) -> tuple[int, int]:
    """Tokens a chunk, and chunks a block."""
    size = min(chunk_size, max(16, 1 << (packed.max_len - 1).bit_length()))
    if x.is_cuda:
        return size, packed.num_tokens  # no cache to fit, and launches cost
    size = min(size, CPU_CHUNK)
    heads, width = x.shape[1:]
    chunk = heads * (size * size + size * width + states * width)  # elements
    return size, max(1, CPU_BLOCK * torch.get_num_threads() // chunk)
