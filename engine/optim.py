"""The optimiser of a run: which tensors decay, the global gradient norm, clipping, the step, the schedule.

**Order of a step.** All ranks add the squares of their local gradients (float64), replicated tensors on one
rank only, in ONE all-reduce. From the same sum every rank derives the same factor

    grad_norm = scale * sqrt(sum of squares)             scale: 1 / supervised tokens of the step
    factor    = scale * min(1, clip_norm / grad_norm)

and hands it to `adamw_step`, which multiplies the gradients by it. Where grad_norm is not finite, or scale is
not finite and positive (a step without supervised tokens), factor is NaN and all ranks skip the step together:
weights, moments, remainders and the count of applied steps keep their bits. Nothing here waits for the device.

**Sharding.** Each rank updates its own rows of dimension 0; the random bits of rounding depend on (seed, applied
steps, key of the name, element index in the whole tensor). Where the experts of a stack are spread anew
(`relabel.py`), that is the index in the base's order, and each run of neighbouring experts is an entry of its own in
the step's table. Equal gradients and an equal factor give equal bits on
any number of ranks. The factor itself depends on the order of a float64 sum; rounded to float32 it is the same
number but for about one step in ten million.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import EllipsisType

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from hymoe.engine.relabel import order_of, runs_of
from hymoe.kernels.adamw import ROUNDINGS, adamw_step
from hymoe.kernels.rounding import slice_length, slices
from hymoe.model import names


@dataclass(frozen=True, slots=True)
class LocalShard:
    """Where a rank's tensor lies in the whole parameter: whole rows of dimension 0.

    Attributes:
        shape: of the whole parameter.
        first_row: index of the first local row.
        is_counted: this rank adds the tensor's gradient to the global norm; of the ranks that hold the
            same rows, exactly one does.
        order: of a stack whose experts are spread anew, the expert in each row's place.
    """

    shape: tuple[int, ...]
    first_row: int
    is_counted: bool
    order: tuple[int, ...] | None = None

    @property
    def offset(self) -> int:
        """Index of the first local element in the whole parameter, where the rows have no other order."""
        return self.first_row * math.prod(self.shape[1:])

    def pieces(self, rows: int) -> list[tuple[EllipsisType | slice, int]]:
        """Local rows whose elements follow each other in the whole parameter, and the index of the first element."""
        if self.order is None:
            return [(..., self.offset)]
        row = math.prod(self.shape[1:])
        runs = runs_of(self.first_row, rows, self.order)
        return [(slice(run.at, run.at + run.count), run.begin * row) for run in runs]


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a step did; () tensors on the device, to be read when it suits.

    Attributes:
        grad_norm: float64, global norm of the scaled gradient before clipping.
        clip_factor: float32, what the summed gradients were multiplied by; NaN where the step was skipped.
        is_applied: bool.
    """

    grad_norm: Tensor
    clip_factor: Tensor
    is_applied: Tensor


class Optimizer:
    """BF16 AdamW with global clipping over sharded, replicated and plain tensors.

    Attributes:
        names: our parameter names, in the order of the gradients that `step` takes.
        shards: name -> where the local tensor lies.
        keys: name -> key of the parameter's random bits.
        count: () int64 on the device, applied steps.
        exp_avg, exp_avg_sq: local moments, in the order and dtype of the parameters.
        remainders: int16 for BF16 parameters where rounding is exact, otherwise None.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, Tensor]],
        *,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        clip_norm: float,
        rounding: str,
        seed: int,
        shards: Mapping[str, LocalShard] | None = None,
        decays: Callable[[str], bool] = names.decays,
        group: dist.ProcessGroup | None = None,
        kernels: str = "auto",
    ) -> None:
        """Moments and remainders start at zero, so exact masters start at the weights.

        Args:
            parameters: (name, parameter), in a fixed order; a parameter is a bf16 or float32 tensor or an
                FSDP2 DTensor that is sharded by rows.
            beta1: decay of the first moment.
            beta2: decay of the second moment.
            eps: added to the root of the second moment.
            weight_decay: of the parameters for which `decays(name)`.
            clip_norm: largest global gradient norm; math.inf for no clipping.
            rounding: exact, stochastic or nearest.
            seed: of the random bits of rounding.
            shards: for plain tensors that are a part of a parameter, such as the experts of a rank;
                other plain tensors are whole and replicated over the group.
            decays: whether weight decay applies to a name.
            group: the ranks that train together; None is all.
            kernels: which implementation of the step, see `hymoe.kernels.launch.choose`.

        Raises:
            ValueError: for an unknown rounding, a clip_norm that is not positive, a parameter sharded otherwise
                than by rows, two names with one key.
        """
        if rounding not in ROUNDINGS:
            raise ValueError(f"optim.rounding is {rounding!r}, expected one of {ROUNDINGS}")
        if not clip_norm > 0:
            raise ValueError(f"optim.clip_norm is {clip_norm}, expected a positive number")
        pairs = list(parameters)
        if not pairs:
            raise ValueError("no parameter to train")
        self.names = [name for name, _ in pairs]
        self._parameters = [parameter for _, parameter in pairs]
        self.keys = parameter_keys(self.names)
        given = shards or {}
        self.shards = {
            name: _checked(name, parameter, given.get(name) or _shard_of(name, parameter, group))
            for name, parameter in pairs
        }
        self._betas = {"beta1": beta1, "beta2": beta2, "eps": eps}
        self._weight_decays = [weight_decay if decays(name) else 0.0 for name in self.names]
        self._clip_norm, self._rounding, self.seed, self._group = clip_norm, rounding, seed, group
        self._kernels = kernels

        weights = self._locals()
        self._pieces = [
            (index, rows, offset)
            for index, (name, weight) in enumerate(zip(self.names, weights, strict=True))
            for rows, offset in self.shards[name].pieces(len(weight) if weight.dim() else 1)
        ]
        self.count = torch.zeros((), dtype=torch.int64, device=weights[0].device)
        self.exp_avg = [torch.zeros_like(w) for w in weights]
        self.exp_avg_sq = [torch.zeros_like(w) for w in weights]
        self.remainders = [
            torch.zeros_like(w, dtype=torch.int16)
            if rounding == "exact" and w.dtype == torch.bfloat16
            else None
            for w in weights
        ]

    @torch.no_grad()
    def step(
        self, grads: Sequence[Tensor | None], *, lr: float | Tensor, scale: float | Tensor
    ) -> StepReport:
        """Clips and applies one step, or skips it on all ranks.

        Args:
            grads: local gradients, bf16 or float32, in the order of `names`: sums over the step's supervised
                tokens of all ranks. A parameter that no token reached has a gradient of zeros, never None.
            lr: learning rate; a tensor is ().
            scale: multiplies every gradient: 1 / supervised tokens of the step; a tensor is ().

        Raises:
            ValueError: if a gradient is missing or has another shape than its parameter.
        """
        weights = self._locals()
        grads = self._checked_gradients(grads, weights)
        counted = [self.shards[name].is_counted for name in self.names]
        norm = grad_norm(grads, counted, group=self._group)
        norm, factor = clip(norm, scale, self._clip_norm)
        adamw_step(
            *(self._cut(part) for part in (weights, grads, self.exp_avg, self.exp_avg_sq)),
            remainders=self._cut(self.remainders) if self._rounding == "exact" else None,
            keys=[self.keys[self.names[index]] for index, _, _ in self._pieces],
            offsets=[offset for _, _, offset in self._pieces],
            weight_decays=[self._weight_decays[index] for index, _, _ in self._pieces],
            lr=lr,
            **self._betas,
            step=self.count,
            clip_factor=factor,
            seed=self.seed,
            rounding=self._rounding,
            kernels=self._kernels,
        )
        return StepReport(norm, factor, torch.isfinite(factor))

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Name -> the live local tensors exp_avg, exp_avg_sq and, for exact masters, remainder.

        Together with `count` and the weights this is the whole state; `shards` says where the rows lie.
        """
        columns = zip(self.names, self.exp_avg, self.exp_avg_sq, self.remainders, strict=True)
        return {
            name: {"exp_avg": m, "exp_avg_sq": v} | ({} if r is None else {"remainder": r})
            for name, m, v, r in columns
        }

    def _cut(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Tensors of the parameters -> of their pieces."""
        found = ((tensors[index], rows) for index, rows, _ in self._pieces)
        return [None if tensor is None else tensor[rows] for tensor, rows in found]

    def _locals(self) -> list[Tensor]:
        # Asked for at each step: FSDP2 may put new storage under a parameter at its first forward.
        return [_local(parameter) for parameter in self._parameters]

    def _checked_gradients(
        self, grads: Sequence[Tensor | None], weights: list[Tensor]
    ) -> list[Tensor]:
        if len(grads) != len(weights):
            raise ValueError(f"{len(grads)} gradients for {len(weights)} parameters")
        for name, grad, weight in zip(self.names, grads, weights, strict=True):
            if grad is None:
                raise ValueError(
                    f"gradient of {name} is None; expected zeros where no token reached it"
                )
            if _local(grad).shape != weight.shape:
                raise ValueError(
                    f"gradient of {name} has local shape {tuple(_local(grad).shape)}, its parameter"
                    f" {tuple(weight.shape)}"
                )
        return [_local(grad) for grad in grads]


def parameter_keys(parameter_names: Iterable[str]) -> dict[str, int]:
    """Name -> 32-bit key of its random bits: a hash of the name alone, so stable across runs and plans.

    Raises:
        ValueError: if a name is given twice, or two names have one key (one chance in fifty thousand for 400 names).
    """
    owner: dict[int, str] = {}
    for name in parameter_names:
        key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little")
        if owner.get(key) == name:
            raise ValueError(f"parameter {name} is given twice")
        if key in owner:
            raise ValueError(f"parameters {owner[key]} and {name} have the same key {key:#010x}")
        owner[key] = name
    return {name: key for key, name in owner.items()}


@torch.no_grad()
def grad_norm(
    grads: Sequence[Tensor], counted: Sequence[bool], *, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Euclidean norm over all ranks: one float64 sum of squares, one all-reduce, no wait.

    Args:
        grads: local gradients, any float dtype; at least one.
        counted: for each, whether this rank adds it (one rank does for a replicated tensor).
        group: the ranks to sum over; None is all. Without a process group the local sum is the whole.

    Returns:
        () float64 on the gradients' device; NaN or inf where a counted gradient has one.
    """
    total = torch.zeros((), dtype=torch.float64, device=grads[0].device)
    for grad, is_counted in zip(grads, counted, strict=True):
        if not is_counted:
            continue
        flat = grad.reshape(-1)
        for start, stop in slices(flat.numel(), slice_length(flat.device)):
            total += flat[start:stop].to(torch.float64, copy=True).square_().sum()
    if dist.is_initialized():
        dist.all_reduce(total, group=group)
    return total.sqrt_()


def clip(norm: Tensor, scale: float | Tensor, clip_norm: float) -> tuple[Tensor, Tensor]:
    """Norm of the scaled gradient, and the factor that scales and clips it.

    Args:
        norm: () float64, of the unscaled gradient.
        scale: multiplies the gradient; a tensor is ().
        clip_norm: largest norm of the scaled gradient.

    Returns:
        norm: () float64. factor: () float32; NaN where the norm is not finite or the scale not finite and
        positive.
    """
    if not isinstance(scale, Tensor):
        scale = torch.full((), scale, dtype=torch.float64, device=norm.device)
    scale = scale.to(torch.float64)
    norm = norm * scale
    factor = scale * (clip_norm / norm).clamp(max=1.0)
    is_usable = torch.isfinite(norm) & torch.isfinite(scale) & (scale > 0)
    return norm, torch.where(is_usable, factor, math.nan).float()


def schedule(step: int, *, lr: float, min_lr_ratio: float, warmup_steps: int, steps: int) -> float:
    """Learning rate of one step: linear warm-up, then a half cosine down to a share of the peak.

    For step = 1 .. steps, with w = warmup_steps and r = min_lr_ratio:

        step <= w:  lr * step / w                                        first step lr / w, step w the peak
        step >  w:  lr * (r + (1 - r) * (1 + cos(pi * (step - w) / (steps - w))) / 2)     last step lr * r

    A run of w steps or fewer ends within its warm-up and never comes down. The rate depends on these numbers
    alone, so a resumed run continues on the same values.

    Args:
        step: number of the step, from 1.
        lr: peak.
        min_lr_ratio: last rate over the peak, in [0, 1].
        warmup_steps: 0 for none.
        steps: number of the last step.

    Raises:
        ValueError: if step is not in 1 .. steps, or another value is out of range.
    """
    if not 1 <= step <= steps:
        raise ValueError(f"schedule: step {step} is not in 1 .. {steps}")
    if not (0 <= min_lr_ratio <= 1 and warmup_steps >= 0):
        raise ValueError(
            f"schedule: min_lr_ratio {min_lr_ratio}, warmup_steps {warmup_steps}: expected a ratio in"
            " [0, 1] and a number of steps"
        )
    if step <= warmup_steps:
        return lr * step / warmup_steps
    progress = (step - warmup_steps) / (steps - warmup_steps)
    return lr * (min_lr_ratio + (1 - min_lr_ratio) * (1 + math.cos(math.pi * progress)) / 2)


def _local(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _shard_of(name: str, parameter: Tensor, group: dist.ProcessGroup | None) -> LocalShard:
    """The place of a DTensor's local rows, or of a whole replicated tensor."""
    if not isinstance(parameter, DTensor):
        is_first = not dist.is_initialized() or dist.get_rank(group) == 0
        return LocalShard(tuple(parameter.shape), 0, is_first, order_of(parameter))
    for placement in parameter.placements:
        is_by_rows = type(placement) is Shard and placement.dim == 0
        if not (is_by_rows or type(placement) is Replicate):
            raise ValueError(
                f"{name} is placed as {placement}; expected rows of dimension 0 or a replica"
            )
    mesh = parameter.device_mesh
    local_shape, starts = compute_local_shape_and_global_offset(
        parameter.shape, mesh, parameter.placements
    )
    coordinates = mesh.get_coordinate()
    if coordinates is None:
        raise ValueError(f"{name}: this rank is not in the parameter's mesh")
    # Copies of the same rows differ in their coordinates along replicated mesh dimensions alone.
    is_counted = all(
        coordinate == 0
        for coordinate, placement in zip(coordinates, parameter.placements, strict=True)
        if type(placement) is Replicate
    )
    first_row = starts[0] if math.prod(local_shape) else 0
    return LocalShard(tuple(parameter.shape), first_row, is_counted, order_of(parameter))


def _checked(name: str, parameter: Tensor, shard: LocalShard) -> LocalShard:
    shape = tuple(_local(parameter).shape)
    rows = shape[0] if shape else 1
    has_room = not shape or shard.first_row + rows <= shard.shape[0]
    if shape[1:] != tuple(shard.shape[1:]) or not has_room:
        raise ValueError(
            f"{name}: a local tensor {shape} from row {shard.first_row} is not made of whole rows of"
            f" {shard.shape}"
        )
    return shard
