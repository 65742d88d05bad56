"""The Mamba-2 scan over packed documents, chunk by chunk with matrix products.

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

Shapes inside a block of n chunks: (n, G, R, Q, P) and (n, G, Q, R, P) with R = H/G heads in a group.
Dtypes: arithmetic in float32; s, its differences and its gradient in float64, because they cancel; y in x's dtype.
Memory: saved are the inputs and the states that enter the chunks, (C, G, N, R, P) float32; the rest is computed again.
Source: Dao and Gu 2024, section 6.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from hymoe.kernels.launch import arithmetic_dtype, check_shape
from hymoe.kernels.packed import Block, Packed

CPU_CHUNK = 64  # tokens: half the work inside of a chunk of 128, twice the states
CPU_BLOCK = 1 << 19  # elements of one temporary of each shape, (H, Q, Q), (H, Q, P) and (H, N, P): about an L2 of 2 MB


@dataclass
class _Chunks:
    """The inputs of a block as the products want them; unused slots are zeros."""

    x: Tensor  # (n, Q, G, R, P)
    step: Tensor  # (n, Q, G, R)
    s: Tensor  # (n, Q, G, R) float64
    b: Tensor  # (n, G, Q, N)
    c: Tensor  # (n, G, Q, N)
    decay: Tensor  # (n, G, R, Q, Q), exp(s[i] - s[j]) for j <= i, else 0
    scores: Tensor  # (n, G, Q, Q), c . b
    from_start: Tensor  # (n, Q, G, R, 1), exp(s[i])
    to_end: Tensor  # (n, Q, G, R, 1), exp(s[Q-1] - s[j])
    through: Tensor  # (n, G, 1, R, 1), exp(s[Q-1])

    @property
    def xdt(self) -> Tensor:
        """(n, G, R, Q, P) contiguous."""
        return _contiguous_product(
            self.x.permute(0, 2, 3, 1, 4), self.step.permute(0, 2, 3, 1)[..., None]
        )

    @property
    def kept(self) -> Tensor:
        """(n, G, Q, R*P) contiguous: dt x as it stands at the chunk's end."""
        weight = self.to_end * self.step[..., None]
        return _contiguous_product(self.x.transpose(1, 2), weight.transpose(1, 2)).flatten(3)


def _contiguous_product(left: Tensor, right: Tensor) -> Tensor:
    """left * right, broadcast to left's shape and laid out in its order of dimensions."""
    out = torch.empty(left.shape, dtype=left.dtype, device=left.device)
    return torch.mul(left, right, out=out)


def _load(
    block: Block, size: int, x: Tensor, step: Tensor, rate: Tensor, b: Tensor, c: Tensor
) -> _Chunks:
    """Reads the rows of a block, whatever their dtype and strides, and derives what both passes need."""
    groups = b.shape[1]
    split = lambda t: t.unflatten(2, (groups, -1))  # noqa: E731  (n, Q, H, ...) -> (n, Q, G, R, ...)
    cut = lambda t: _into_slots(t, block, size, step.dtype)  # noqa: E731
    s = split(_into_slots(rate, block, size, torch.float64).cumsum(1))
    by_head = s.permute(0, 2, 3, 1).contiguous()  # (n, G, R, Q)
    # exp of all differences, then zeros above the diagonal, where it may have become infinite.
    decay = (by_head[..., :, None] - by_head[..., None, :]).to(step.dtype).exp_()
    decay.flatten(0, 2).tril_()
    b, c = (cut(t).transpose(1, 2) for t in (b, c))
    last = s[:, -1:]
    wide = lambda t: torch.exp(t).to(step.dtype)[..., None]  # noqa: E731
    return _Chunks(
        x=split(cut(x)),
        step=split(cut(step)),
        s=s,
        b=b,
        c=c,
        decay=decay,
        scores=c @ b.transpose(2, 3),
        from_start=wide(s),
        to_end=wide(last - s),
        through=wide(last).transpose(1, 2),
    )


def _into_slots(x: Tensor, block: Block, size: int, dtype: torch.dtype) -> Tensor:
    """Rows of the block, (t, ...) -> (n, Q, ...), zeros where a chunk has no token."""
    rows = x[block.rows].to(dtype)
    if block.slots is not None:
        empty = rows.new_zeros(block.chunks * size, *rows.shape[1:])
        rows = empty.index_copy_(0, block.slots, rows)
    return rows.unflatten(0, (block.chunks, size))


def _from_slots(out: Tensor, block: Block, slots: Tensor) -> None:
    """Writes (n, Q, ...) to the block's rows of `out`, (T, ...), in its dtype."""
    rows = slots.flatten(0, 1)
    if block.slots is not None:
        rows = rows.index_select(0, block.slots)
    out[block.rows] = rows.view(out[block.rows].shape)


def _pass_on(
    added: Tensor, through: Tensor, block: Block, state: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Step 3: the states that enter each chunk, (n, G, N, R, P), and the one that leaves the block."""
    enter = torch.empty_like(added)
    for k in range(block.chunks):
        if k in block.followers:
            torch.addcmul(added[k - 1], through[k - 1], enter[k - 1], out=enter[k])
        else:
            enter[k] = state if k == 0 and block.enters else 0
    return enter, torch.addcmul(added[-1], through[-1], enter[-1]) if block.leaves else None


def _pass_back(
    denter: Tensor, through: Tensor, block: Block, dstate: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Gradients of what each chunk adds, and of the state that entered the block; spoils `denter`."""
    dadded = torch.empty_like(denter)
    for k in reversed(range(block.chunks)):
        if k + 1 in block.followers:
            dadded[k] = denter[k + 1]
        else:
            dadded[k] = dstate if k == block.chunks - 1 and block.leaves else 0
        denter[k].addcmul_(through[k], dadded[k])
    return dadded, denter[0] if block.enters else None


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
    ) -> Tensor:
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        entered, state = [], None
        weight = skip.view(b.shape[1], -1, 1)  # (G, R, 1)
        split = (weight.shape[1], x.shape[2])
        for block in blocks:
            k = _load(block, size, x, step, rate, b, c)
            inside = (k.scores[:, :, None] * k.decay) @ k.xdt  # (n, G, R, Q, P)
            out = inside.permute(0, 3, 1, 2, 4)  # (n, Q, G, R, P)
            enter = None
            if block.has_states:
                added = (k.b.transpose(2, 3) @ k.kept).unflatten(3, split)  # (n, G, N, R, P)
                enter, state = _pass_on(added, k.through, block, state)
                read = (k.c @ enter.flatten(3)).unflatten(3, split).transpose(1, 2)
                out.addcmul_(read, k.from_start)
            _from_slots(y, block, out.addcmul_(k.x, weight))
            entered.append(enter)
        ctx.save_for_backward(x, step, rate, b, c, skip, *entered)
        ctx.blocks, ctx.size = blocks, size
        return y

    @staticmethod
    def backward(ctx, dy: Tensor):
        x, step, rate, b, c, skip, *entered = ctx.saved_tensors
        dx, db, dc = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (x, b, c))
        dstep, drate = torch.empty_like(step), torch.empty_like(rate)
        dskip, dstate = torch.zeros_like(skip), None
        weight = skip.view(b.shape[1], -1, 1)
        for block, enter in zip(reversed(ctx.blocks), reversed(entered), strict=True):
            k = _load(block, ctx.size, x, step, rate, b, c)
            dy_block = _into_slots(dy, block, ctx.size, step.dtype).view(k.x.shape)
            dxdt, ds, db_block, dc_block = _inside_backward(k, dy_block)
            if enter is not None:
                more, dstate = _states_backward(k, dy_block, enter, block, dstate)
                dxdt, ds, db_block, dc_block = (
                    one.add_(other)
                    for one, other in zip((dxdt, ds, db_block, dc_block), more, strict=True)
                )
            # Backwards running sum: s[i] holds the rate of every token up to i.
            drate_block = ds.sum(1, keepdim=True) - ds.cumsum(1) + ds
            dstep_block = (dxdt * k.x).sum(-1)
            dskip += (dy_block * k.x).sum((0, 1, 4)).flatten()
            dx_block = dxdt.mul_(k.step[..., None]).addcmul_(dy_block, weight)
            _from_slots(dx, block, dx_block)
            _from_slots(dstep, block, dstep_block)
            _from_slots(drate, block, drate_block)
            _from_slots(db, block, db_block.transpose(1, 2))
            _from_slots(dc, block, dc_block.transpose(1, 2))
        return dx, dstep, drate, db, dc, dskip, None, None


def _inside_backward(k: _Chunks, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Step 1: gradients of dt x (n, Q, G, R, P), s (n, Q, G, R) float64, b and c (n, G, Q, N)."""
    dy = dy.permute(0, 2, 3, 1, 4).contiguous()  # (n, G, R, Q, P)
    m = k.scores[:, :, None] * k.decay
    dxdt = m.transpose(3, 4) @ dy
    dm = (dy @ k.xdt.transpose(3, 4)).mul_(k.decay)  # (n, G, R, Q, Q)
    dscores = dm.sum(2)
    dm.mul_(k.scores[:, :, None])
    dm = dm.double()
    ds = dm.sum(4) - dm.sum(3)  # (n, G, R, Q)
    db, dc = dscores.transpose(2, 3) @ k.c, dscores @ k.b
    return dxdt.permute(0, 3, 1, 2, 4), ds.permute(0, 3, 1, 2), db, dc


def _states_backward(
    k: _Chunks, dy: Tensor, enter: Tensor, block: Block, dstate: Tensor | None
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Tensor | None]:
    """Steps 2 to 4: the same gradients as step 1's, and that of the state that entered the block."""
    dread = _contiguous_product(dy.transpose(1, 2), k.from_start.transpose(1, 2))
    flat = enter.flatten(3)  # (n, G, N, R*P)
    read = (k.c @ flat).view(dread.shape)  # (n, G, Q, R, P)
    ds = read.mul_(dread).sum(4).transpose(1, 2).double()
    dread = dread.flatten(3)
    dc = dread @ flat.transpose(2, 3)
    denter = (k.c.transpose(2, 3) @ dread).view(enter.shape)
    dadded, dstate = _pass_back(denter, k.through, block, dstate)

    dthrough = (dadded * enter).sum((2, 4)) * k.through[:, :, 0, :, 0]  # (n, G, R)
    dadded = dadded.flatten(3)
    db = k.kept @ dadded.transpose(2, 3)
    dkept = (k.b @ dadded).view(read.shape).transpose(1, 2) * k.to_end  # (n, Q, G, R, P)
    # What decays towards the end: each token's share counts at its own s and, with the other sign, at the last one.
    share = ((dkept * k.x).sum(4) * k.step).double()
    ds -= share
    ds[:, -1] += share.sum(1) + dthrough
    return (dkept, ds, db, dc), dstate


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

    wide = arithmetic_dtype(x)
    size, most = _chunking(packed, chunk_size, x, states)
    step = functional.softplus(dt.to(wide) + dt_bias.to(wide)).clamp(*dt_limit)  # (T, H)
    rate = step * -torch.exp(a_log.to(wide))
    return _Scan.apply(x, step, rate, b, c, skip.to(wide), packed.blocks(size, most), size)


def _chunking(packed: Packed, chunk_size: int, x: Tensor, states: int) -> tuple[int, int]:
    """Tokens a chunk, and chunks a block."""
    size = min(chunk_size, max(16, 1 << (packed.max_len - 1).bit_length()))
    if x.is_cuda:
        return size, packed.num_tokens  # no cache to fit, and launches cost
    size = min(size, CPU_CHUNK)
    heads, width = x.shape[1:]
    return size, max(1, CPU_BLOCK // (heads * (size * size + size * width + states * width)))
