"""AdamW on BF16 or float32 tensors: float32 arithmetic, three ways to keep small updates of BF16 weights.

**Math**, for one element, every operation rounded by itself to float32 (no fused multiply-add; division
and square root correctly rounded), in this order and association:

    g  = float32(grad) * factor                         factor: clip factor and loss scale in one
    m' = m * beta1 + g * (1 - beta1)
    v' = v * beta2 + (g * g) * (1 - beta2)
    u  = m' / (sqrt(v') + eps_t) * step_size
    u  = u + w * decay                                  where weight_decay is not 0
    w' = w - u

beta1, 1 - beta1, beta2 and 1 - beta2 are computed in float64 and rounded to float32 once. The
rest is computed on the device, in float64, from t = step + 1 (see `Scalars`):

    root      = sqrt(1 - beta2^t)
    step_size = float32(lr * root / (1 - beta1^t))    eps_t = float32(eps * root)
    decay     = float32(lr * weight_decay)

With these u is m' / (1 - beta1^t) / (sqrt(v') / root + eps) * lr, and no sqrt(v') is divided: that division would be
one in six of the GPU kernel's instructions, which must hide behind its memory traffic.
The decay is part of the update because a factor 1 - lr * weight_decay is 1 in float32 at lr = 3e-7.
u uses m' and v' before they are stored.

**Dtypes.** Float32 parameters have float32 moments and are updated as above, without rounding. BF16
parameters have BF16 moments; m' is stored to nearest (even); v' likewise, or stochastically where
beta2 >= 0.99 (to nearest it could never decay: 1 - beta2 is less than half a unit in its last place).
The weight, by `rounding` (see `rounding.py` for both kinds of arithmetic):

    exact       w is the float32 master joined from weight and remainder; w' is split into them again
    stochastic  w = float32(weight); w' is rounded with the low 16 bits of the element's random word
    nearest     w = float32(weight); w' is rounded to nearest even; for comparison only

The second moment takes the high 16 bits of the same word: seed, t, the parameter's key and the element's
index in the whole tensor decide, so that any sharding gives the same bits.

**Skipped steps.** Where the factor is not finite, nothing changes: neither weights, moments, remainders nor
the count. The device decides (no host synchronisation).

**Memory.** In place; temporaries are a few slices (`rounding.slice_length`), whatever the tensor's size. On a GPU
there are none, see `adamw_triton.py`.

Sources: Kingma and Ba, "Adam", ICLR 2015, whose section 2 gives this order of the corrections; Loshchilov and
Hutter, "Decoupled weight decay regularization", ICLR 2019.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hymoe.kernels.adamw_triton import triton_step
from hymoe.kernels.launch import uses_triton
from hymoe.kernels.rounding import (
    high_bits,
    join_master,
    low_bits,
    random_words,
    round_with_bits,
    slice_length,
    slices,
    split_master,
)

ROUNDINGS = ("exact", "stochastic", "nearest")
STOCHASTIC_BETA2 = 0.99  # from here on a BF16 second moment is rounded stochastically


@dataclass(frozen=True, slots=True)
class Scalars:
    """What all elements of a step share; tensors are () and on the parameters' device.

    Attributes:
        applied: bool, the factor is finite.
        count: int64, t: applied steps, this one included.
        factor: float32, multiplies the gradient.
        lr: float64.
        step_size: float32, lr * sqrt(1 - beta2^t) / (1 - beta1^t).
        eps: float32, eps * sqrt(1 - beta2^t).
        beta1, beta2: as given.
    """

    applied: Tensor
    count: Tensor
    factor: Tensor
    lr: Tensor
    step_size: Tensor
    eps: Tensor
    beta1: float
    beta2: float

    @property
    def is_v_stochastic(self) -> bool:
        """Whether BF16 second moments are rounded stochastically."""
        return self.beta2 >= STOCHASTIC_BETA2

    def decay(self, weight_decay: float) -> Tensor:
        """() float32: lr * weight_decay."""
        return (self.lr * weight_decay).float()


def step_scalars(
    step: Tensor, factor: Tensor, lr: float | Tensor, beta1: float, beta2: float, eps: float
) -> Scalars:
    """Scalars of one step, computed on the device in float64; every implementation starts from these."""
    if not isinstance(lr, Tensor):
        lr = torch.full((), lr, dtype=torch.float64, device=step.device)  # a fill: no copy, no wait
    lr = lr.to(torch.float64)
    count = step + 1
    t = count.to(torch.float64)
    root = torch.sqrt(1 - torch.pow(beta2, t))
    return Scalars(
        applied=torch.isfinite(factor),
        count=count,
        factor=factor,
        lr=lr,
        step_size=(lr * root / (1 - torch.pow(beta1, t))).float(),
        eps=(eps * root).float(),
        beta1=beta1,
        beta2=beta2,
    )


@torch.no_grad()
def adamw_step_ref(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avg: Sequence[Tensor],
    exp_avg_sq: Sequence[Tensor],
    *,
    remainders: Sequence[Tensor | None] | None,
    keys: Sequence[int],
    offsets: Sequence[int],
    weight_decays: Sequence[float],
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    step: Tensor,
    clip_factor: Tensor,
    seed: int,
    rounding: str,
) -> None:
    """The specification of `adamw_step`: the module's formulas on whole tensors."""
    s = step_scalars(step, clip_factor, lr, beta1, beta2, eps)
    for i, (p, grad, m, v) in enumerate(zip(params, grads, exp_avg, exp_avg_sq, strict=True)):
        is_bf16 = p.dtype == torch.bfloat16
        is_exact = is_bf16 and rounding == "exact"
        words = random_words(
            offsets[i], p.numel(), seed=seed, key=keys[i], step=s.count, device=p.device
        ).view(p.shape)

        g = grad.float() * s.factor
        m_new = m.float() * beta1 + g * (1 - beta1)
        v_new = v.float() * beta2 + (g * g) * (1 - beta2)
        root = v_new.double().sqrt().float()  # correctly rounded, see `_sqrt`
        u = m_new / (root + s.eps) * s.step_size
        w = join_master(p, remainders[i]) if is_exact else p.float()
        if weight_decays[i]:
            u = u + w * s.decay(weight_decays[i])
        w_new = w - u

        if is_exact:
            w_new, remainder = split_master(w_new)
            remainders[i].copy_(torch.where(s.applied, remainder, remainders[i]))
        elif is_bf16 and rounding == "stochastic":
            w_new = round_with_bits(w_new, low_bits(words))
        if is_bf16 and s.is_v_stochastic:
            v_new = round_with_bits(v_new, high_bits(words))
        for old, new in ((p, w_new), (m, m_new), (v, v_new)):
            old.copy_(torch.where(s.applied, new.to(old.dtype), old))
    step.add_(s.applied)


@torch.no_grad()
def adamw_step(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avg: Sequence[Tensor],
    exp_avg_sq: Sequence[Tensor],
    *,
    remainders: Sequence[Tensor | None] | None,
    keys: Sequence[int],
    offsets: Sequence[int],
    weight_decays: Sequence[float],
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    step: Tensor,
    clip_factor: Tensor,
    seed: int,
    rounding: str,
    kernels: str = "auto",
) -> None:
    """One AdamW step on lists of local tensors, in place, with the bits of `adamw_step_ref`.

    Args:
        params: bf16 or float32, any shapes, contiguous; empty shards are fine.
        grads: bf16 or float32, whatever the parameter's dtype, same shapes, contiguous; not changed.
        exp_avg: first moments, dtype and shape of their parameter.
        exp_avg_sq: second moments, likewise.
        remainders: where `rounding` is exact: int16 of the parameter's shape for a bf16 parameter, None for a
            float32 one. Otherwise None.
        keys: a number in [0, 2^32) for each parameter, the same on every rank and in every run.
        offsets: index of each local tensor's first element in the whole tensor.
        weight_decays: for each parameter; 0 for none.
        lr: learning rate; a tensor is () float32 or float64.
        beta1: decay of the first moment, in [0, 1).
        beta2: decay of the second moment, in [0, 1).
        eps: added to the root of the second moment.
        step: () int64, count of applied steps so far; incremented where this step is applied.
        clip_factor: () float32, multiplies every gradient; not finite: nothing changes.
        seed: 0 <= seed < 2^64.
        rounding: exact, stochastic or nearest; how bf16 weights are kept.
        kernels: which implementation, see `launch.choose`.

    All tensors are on the device of `step`.

    Raises:
        ValueError: if a list, dtype, shape, device or option is not as above, with the index of the parameter.
    """
    _check_options(step, clip_factor, beta1, beta2, eps, seed, rounding)
    if remainders is None:
        remainders = [None] * len(params)
    columns = (params, grads, exp_avg, exp_avg_sq, remainders, keys, offsets, weight_decays)
    if len({len(column) for column in columns}) != 1:
        raise ValueError(f"adamw_step: lists of unequal lengths {[len(c) for c in columns]}")
    for i, (p, g, m, v, r, key, offset, _) in enumerate(zip(*columns, strict=True)):
        _check_tensors(i, p, g, m, v, r, rounding, step.device)
        if not (0 <= key < 1 << 32 and 0 <= offset < 1 << 63):
            raise ValueError(
                f"adamw_step: parameter {i} has key {key} and offset {offset}, expected"
                " 0 <= key < 2^32, 0 <= offset < 2^63"
            )

    scalars = step_scalars(step, clip_factor, lr, beta1, beta2, eps)
    run = triton_step if uses_triton("adamw_step", kernels, step) else _torch_step
    run(columns[:5], keys, offsets, weight_decays, scalars, seed, rounding)
    step.add_(scalars.applied)


def _torch_step(
    tensors: Sequence[Sequence[Tensor | None]],
    keys: Sequence[int],
    offsets: Sequence[int],
    weight_decays: Sequence[float],
    scalars: Scalars,
    seed: int,
    rounding: str,
) -> None:
    """As `triton_step`, slice by slice."""
    params, device = tensors[0], scalars.count.device
    decays = {wd: scalars.decay(wd) if wd else None for wd in set(weight_decays)}
    length = min(slice_length(device), max((p.numel() for p in params), default=0))
    # Made once: fresh memory costs a CPU as much as all the arithmetic.
    scratch = [torch.empty(length, device=device) for _ in range(4)]
    scratch.append(torch.empty(length, dtype=torch.float64, device=device))
    flags = {bits: scalars.applied.to(bits) for bits in (torch.int16, torch.int32)}
    for *one, key, offset, weight_decay in zip(*tensors, keys, offsets, weight_decays, strict=True):
        flat = [None if tensor is None else tensor.view(-1) for tensor in one]
        is_bf16 = flat[0].dtype == torch.bfloat16
        draws = is_bf16 and (rounding == "stochastic" or scalars.is_v_stochastic)
        for start, stop in slices(len(flat[0]), slice_length(device)):
            count = stop - start
            words = None
            if draws:
                words = random_words(
                    offset + start, count, seed=seed, key=key, step=scalars.count, device=device
                )
            part = [None if tensor is None else tensor[start:stop] for tensor in flat]
            decay = decays[weight_decay]
            _update(*part, words, decay, scalars, rounding, flags, [t[:count] for t in scratch])


def _update(
    p: Tensor,
    grad: Tensor,
    m: Tensor,
    v: Tensor,
    remainder: Tensor | None,
    words: Tensor | None,
    decay: Tensor | None,
    s: Scalars,
    rounding: str,
    flags: dict[torch.dtype, Tensor],
    scratch: list[Tensor],
) -> None:
    """One slice: the formulas of `adamw_step_ref`, in their order.

    `flags` is `s.applied` as integers, `scratch` four (n,) float32 tensors and a float64 one.
    """
    g, m_new, v_new, term, double = scratch
    torch.mul(_wide(grad, g), s.factor, out=g)
    torch.mul(_wide(m, m_new), s.beta1, out=m_new).add_(torch.mul(g, 1 - s.beta1, out=term))
    torch.mul(_wide(v, v_new), s.beta2, out=v_new).add_(g.mul_(g).mul_(1 - s.beta2))
    denominator = _sqrt(v_new, double, out=g).add_(s.eps)
    u = torch.div(m_new, denominator, out=g).mul_(s.step_size)
    _store(m, m_new, flags, term)
    w = _wide(p, term) if remainder is None else join_master(p, remainder)
    if decay is not None:
        u.add_(torch.mul(w, decay, out=m_new))
    w_new = torch.sub(w, u, out=u)

    if remainder is not None:
        w_new, remainder_new = split_master(w_new)
        _store(remainder, remainder_new, flags, term)
    elif p.dtype == torch.bfloat16 and rounding == "stochastic":
        w_new = round_with_bits(w_new, low_bits(words))
    if v.dtype == torch.bfloat16 and s.is_v_stochastic:
        v_new = round_with_bits(v_new, high_bits(words))
    _store(p, w_new, flags, term)
    _store(v, v_new, flags, term)


def _wide(x: Tensor, out: Tensor) -> Tensor:
    """Float32 values of x: x itself, or written to `out`."""
    return x if x.dtype == torch.float32 else out.copy_(x)


def _sqrt(x: Tensor, double: Tensor, out: Tensor) -> Tensor:
    """Correctly rounded float32 square root, written to `out`; `double` is scratch.

    Through float64, whose 53 bits make the second rounding harmless; torch's float32 root on a CPU
    (MKL) is one unit off in 6 of 1000 values, and slower.
    """
    return out.copy_(double.copy_(x).sqrt_())


def _store(old: Tensor, new: Tensor, flags: dict[torch.dtype, Tensor], scratch: Tensor) -> None:
    """Stores new in old, rounded to its dtype, where the step is applied.

    As old + (new - old) * (1 or 0) on the bits, because `where` costs four times as much on a CPU.
    """
    bits = torch.int32 if old.dtype == torch.float32 else torch.int16
    old, new = old.view(bits), new.to(old.dtype).view(bits)
    change = torch.sub(new, old, out=scratch.view(bits)[: old.numel()])
    old.addcmul_(change, flags[bits])


def _check_options(
    step: Tensor,
    clip_factor: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    seed: int,
    rounding: str,
) -> None:
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"adamw_step: seed {seed}, expected 0 <= seed < 2^64")
    if rounding not in ROUNDINGS:
        raise ValueError(f"adamw_step: rounding {rounding!r}, expected one of {ROUNDINGS}")
    if not (0 <= beta1 < 1 and 0 <= beta2 < 1 and eps >= 0):
        raise ValueError(
            f"adamw_step: beta1 {beta1}, beta2 {beta2}, eps {eps}: expected betas in [0, 1), eps >= 0"
        )
    for name, tensor, dtype in (
        ("step", step, torch.int64),
        ("clip_factor", clip_factor, torch.float32),
    ):
        if tensor.dtype != dtype or tensor.dim() != 0:
            raise ValueError(
                f"adamw_step: {name} is {tensor.dtype} {tuple(tensor.shape)}, expected () {dtype}"
            )
    if clip_factor.device != step.device:
        raise ValueError(
            f"adamw_step: clip_factor is on {clip_factor.device}, the count of steps on {step.device}"
        )


def _check_tensors(
    i: int,
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    r: Tensor | None,
    rounding: str,
    device: torch.device,
) -> None:
    if p.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"adamw_step: parameter {i} is {p.dtype}, expected bf16 or float32")
    if (r is not None) != (rounding == "exact" and p.dtype == torch.bfloat16):
        raise ValueError(
            f"adamw_step: parameter {i} ({p.dtype}, rounding {rounding}) has"
            f" {'a' if r is not None else 'no'} remainder; exact bf16 parameters have one, no others"
        )
    expected = {
        "gradient": (g, (torch.bfloat16, torch.float32)),
        "first moment": (m, (p.dtype,)),
        "second moment": (v, (p.dtype,)),
        "remainder": (r, (torch.int16,)),
    }
    for name, (tensor, dtypes) in expected.items():
        if tensor is not None and (tensor.dtype not in dtypes or tensor.shape != p.shape):
            raise ValueError(
                f"adamw_step: {name} of parameter {i} is {tensor.dtype} {tuple(tensor.shape)},"
                f" expected {' or '.join(map(str, dtypes))} {tuple(p.shape)}"
            )
    for name, tensor in (("parameter", p), *((name, pair[0]) for name, pair in expected.items())):
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(
                f"adamw_step: {name} of parameter {i} has stride {tensor.stride()}, expected contiguous"
            )
        if tensor is not None and tensor.device != device:
            raise ValueError(
                f"adamw_step: {name} of parameter {i} is on {tensor.device}, the count of steps on {device}"
            )
