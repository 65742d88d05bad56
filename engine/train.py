"""The loop: batch -> loss -> step -> log -> evaluate -> save -> stop.

On a GPU the screen and the files are one step behind: the numbers of step n are read while step n+1 is already under
way, so that reading them never makes the device wait.
"""

import math
import resource
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hymoe.engine.balance import ExpertLoads, Record
from hymoe.engine.data.loader import Loader, MicroBatch, StepBatch, eval_batches
from hymoe.engine.data.rows import Rows
from hymoe.engine.errors import UserError
from hymoe.engine.log import RunLog, Stopwatch
from hymoe.engine.optim import Optimizer, StepReport, schedule
from hymoe.engine.parallel import Alone
from hymoe.engine.recipe import Recipe
from hymoe.engine.relabel import order_of
from hymoe.engine.saver import Saver
from hymoe.engine.stop import StopFlag
from hymoe.model.moe import MoE
from hymoe.model.net import HybridLM

POLL_EVERY = (
    8  # micro-batches of an evaluation between questions for a signal: seconds at the real size
)


@dataclass(kw_only=True)
class Outcome:
    """What a run did, over all its resumes."""

    steps: int = 0  # the last one that was taken
    applied: int = 0
    skipped_in_a_row: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    seconds: float = 0.0
    expert_loads: Record = field(default_factory=dict)
    first_eval_loss: float | None = None
    last_eval_loss: float | None = None
    pending: dict[str, Any] | None = (
        None  # metrics of the last step, whose evaluation a signal has cut short
    )
    stopped_by: str | None = None  # name of the signal

    def progress(self) -> dict[str, Any]:
        """What a resumed run needs of it, in JSON types."""
        return {key: value for key, value in asdict(self).items() if key != "stopped_by"}


@dataclass(kw_only=True)
class Job:
    """Everything that the loop works with; `engine/run.py` puts it together."""

    recipe: Recipe
    plan: Alone
    lm: HybridLM
    optimizer: Optimizer
    loader: Loader
    eval_rows: Rows | None
    steps: int
    log: RunLog
    stop: StopFlag
    flops_per_token: float
    peak_flops: float | None  # of one device; None where there is no such figure, as on a CPU
    saver: Saver | None = None  # None: nothing is saved
    outcome: Outcome = field(default_factory=Outcome)  # what is done already
    doing: str = "starting"  # for whoever reports an error


@dataclass(kw_only=True)
class Taken:
    """A step that the device may still be working on."""

    number: int
    lr: float
    batch: StepBatch
    report: StepReport
    sums: Tensor  # float64, summed over ranks: loss, stop flags, failed saves, then rows by layer and expert
    faulty: (
        Tensor | None
    )  # (parameters,) ranks whose gradient is not finite; None where nobody has asked


def train(job: Job) -> Outcome:
    """Runs the recipe's steps that are left, or fewer where a signal asks for it.

    Raises:
        UserError: `optim.max_skipped` steps in a row had a gradient that is not finite, or a state cannot be saved.
    """
    outcome = job.outcome
    _evaluate_first(job)
    job.log.start_steps()
    settle = Settle(job)
    under_way: list[Taken] = []
    for number in range(outcome.steps + 1, job.steps + 1):
        if outcome.stopped_by is not None:
            break
        under_way.append(take_step(job, number))
        evaluates, saves = _evaluates(job, number), _saves(job, number)
        # A GPU has its next step before it is asked about the last one; a CPU has finished when it returns.
        is_ahead = job.plan.device.type == "cuda" and number < job.steps
        behind = 1 if is_ahead and not (evaluates or saves) else 0
        while len(under_way) > behind and outcome.stopped_by is None:
            settle(under_way.pop(0), evaluates=evaluates and not under_way)
        if saves and outcome.stopped_by is None:
            save(job)
    while under_way:
        settle(under_way.pop(0))
    if outcome.expert_loads:
        write_loads(job)
        job.log.event("balance", loads_of(job).summary(), step=outcome.steps)
    if outcome.stopped_by is not None:
        _leave(job)
    return outcome


def save(job: Job) -> None:
    """Saves the state as it is after the last step; collective."""
    job.doing = f"step {job.outcome.steps}: saving the state"
    write_loads(job)
    job.saver.save(job.outcome.steps, job.outcome.progress() | {"count": int(job.optimizer.count)})


def _evaluate_first(job: Job) -> None:
    """The evaluation before training, or the one that a signal has cut short before this resume."""
    outcome = job.outcome
    if outcome.pending is None and (outcome.steps or job.eval_rows is None):
        return
    loss = evaluate(job)
    if loss is None:
        outcome.stopped_by = job.stop.reason
    elif outcome.pending is not None:
        outcome.last_eval_loss = loss
        job.log.step({**outcome.pending, "eval_loss": loss})
        outcome.pending = None
    else:
        outcome.first_eval_loss = outcome.last_eval_loss = loss
        job.log.event("eval", f"eval loss {loss:.4f} before training", step=0)


def _leave(job: Job) -> None:
    """After a signal: the state is saved, whole and on disk, before anyone leaves."""
    step, by, saver = job.outcome.steps, job.outcome.stopped_by, job.saver
    if saver is not None and step and saver.last_step != step:
        save(job)
    if saver is not None:
        saver.wait()
    if not step:
        said = "nothing to save before the first step, leaving"
    else:
        said = f"stopped after step {step}" + ("" if saver is None else ": saved, leaving")
    job.log.event("stop", f"{by}: {said}", step=step)


def take_step(job: Job, number: int) -> Taken:
    """Forward and backward over this rank's micro-batches, then one optimiser step; waits for nothing.

    The micro-batches pass each block together, so that it is gathered and reduced once, or in several passes.
    """
    batch = job.loader.step(number - 1)
    device = job.plan.device
    loss = torch.zeros((), dtype=torch.float64, device=device)
    micro_batches = batch.micro_batches
    together = job.recipe.train.micro_steps_together or len(micro_batches)
    for first in range(0, len(micro_batches), together):
        some = micro_batches[first : first + together]
        last = first + len(some)
        which = f"{last}" if len(some) == 1 else f"{first + 1} to {last}"
        job.doing = (
            f"step {number}: forward and backward pass, micro-step {which} of {len(micro_batches)}"
        )
        rows = zip(*((micro.input_ids, micro.labels, micro.packed) for micro in some), strict=True)
        loss_sum, _ = job.lm.loss(*rows)
        loss_sum.backward()
        loss += loss_sum.detach()
        job.plan.collect_gradients(job.lm, last=last == len(micro_batches))
    job.doing = f"step {number}: optimiser step"
    optim = job.recipe.optim
    lr = schedule(
        number,
        lr=optim.lr,
        min_lr_ratio=optim.min_lr_ratio,
        warmup_steps=optim.warmup_steps,
        steps=job.steps,
    )
    grads = job.plan.gradients(job.lm)
    flags = [bool(job.stop), job.saver is not None and job.saver.has_failed]
    flags = torch.tensor(flags, dtype=torch.float64, device=device)
    sums = job.plan.sum_over_ranks(torch.cat([loss[None], flags, take_loads(job.lm)]))
    faulty = job.plan.sum_over_ranks(_not_finite(grads)) if _asks_for_faults(job) else None
    # Without a supervised token in the whole step there is no mean loss: the optimiser skips at a scale of NaN, and
    # so it does for a loss that is not finite, whatever its gradient.
    scale = 1 / batch.supervised_tokens if batch.supervised_tokens else math.nan
    scale = torch.where(torch.isfinite(sums[0]), scale, math.nan)
    if job.saver is not None:
        job.saver.before_update()
    report = job.optimizer.step(grads, lr=lr, scale=scale)
    return Taken(number=number, lr=lr, batch=batch, report=report, sums=sums, faulty=faulty)


def _asks_for_faults(job: Job) -> bool:
    """Whether this step may be the one at which the run stops for skipped steps; on a GPU the count is one behind."""
    return job.outcome.skipped_in_a_row + 2 >= job.recipe.optim.max_skipped


def _not_finite(grads: list[Tensor]) -> Tensor:
    """1.0 for each gradient with a NaN or an infinity in this rank's rows, else 0.0; (parameters,) float64."""
    bounds = [
        torch.stack([x.double() for x in torch.aminmax(grad)])
        if grad.numel()
        else torch.zeros(2, dtype=torch.float64, device=grad.device)
        for grad in grads
    ]
    return (~torch.isfinite(torch.stack(bounds)).all(dim=1)).double()


class Settle:
    """Reads what a step came to, writes it down, and notes whether the run goes on."""

    def __init__(self, job: Job) -> None:
        """The time of the first step starts now."""
        self._job, self._outcome = job, job.outcome
        self._watch = Stopwatch()
        self._loads = loads_of(job)

    def __call__(self, taken: Taken, evaluates: bool = False) -> None:
        """Waits for the step, evaluates where asked, and writes the step's metrics.

        Raises:
            UserError: too many steps in a row were skipped.
        """
        job, batch, outcome = self._job, taken.batch, self._outcome
        sums = taken.sums.cpu()
        loss_sum, stops, failed_saves = sums[:3].tolist()
        skipped = not bool(taken.report.is_applied)
        seconds = self._watch.lap()
        metrics: dict[str, Any] = {
            "step": taken.number,
            "loss": loss_sum / batch.supervised_tokens if batch.supervised_tokens else 0.0,
            "lr": taken.lr,
            "grad_norm": float(taken.report.grad_norm),
            "tokens": batch.num_tokens,
            "supervised_tokens": batch.supervised_tokens,
            "tokens_per_second": batch.num_tokens / seconds,
            "step_seconds": seconds,
            "mfu": self._mfu(batch.num_tokens / seconds),
            "peak_memory_bytes": peak_memory_bytes(job.plan.device),
            **self._loads.add(sums[3:]),
            "epoch": batch.epoch,
            "skipped": skipped,
        }
        outcome.steps = taken.number
        outcome.expert_loads = self._loads.record()
        outcome.applied += not skipped
        outcome.tokens += batch.num_tokens
        outcome.supervised_tokens += batch.supervised_tokens
        outcome.seconds += seconds
        if stops and outcome.stopped_by is None:
            outcome.stopped_by = job.stop.reason
        if evaluates:
            self._evaluate(metrics)
        if outcome.pending is None:
            job.log.step(metrics)
        self._check_skips(taken, skipped)
        if failed_saves:
            job.saver.wait()  # raises what went wrong, on every rank
        if job.saver is not None:
            job.saver.poll()
        self._watch.lap()  # an evaluation is not part of the next step

    def _evaluate(self, metrics: dict[str, Any]) -> None:
        loss = evaluate(self._job)
        if loss is None:
            self._outcome.pending = metrics
            self._outcome.stopped_by = self._outcome.stopped_by or self._job.stop.reason
        else:
            metrics["eval_loss"] = self._outcome.last_eval_loss = loss

    def _check_skips(self, taken: Taken, skipped: bool) -> None:
        job, outcome, number = self._job, self._outcome, taken.number
        if skipped and not taken.batch.supervised_tokens:
            message = f"step {number}: no supervised token on any rank; nothing changed"
            job.log.event("skip", message, step=number)
            return
        outcome.skipped_in_a_row = outcome.skipped_in_a_row + 1 if skipped else 0
        most = job.recipe.optim.max_skipped
        if outcome.skipped_in_a_row >= most:
            rows = job.loader.row_indices(number - 1)
            message = (
                f"step {number}: loss or gradient norm was not finite {most} steps in a row (optim.max_skipped); "
                f"gradients not finite: {_first_few(self._faulty_names(taken))}; "
                f"data rows of this step: {_first_few(rows)}; weights are those of the last good step"
            )
            job.log.event(
                "not_finite", step=number, rows=rows, parameters=self._faulty_names(taken)
            )
            raise UserError(message)

    def _faulty_names(self, taken: Taken) -> list[str]:
        names = self._job.optimizer.names
        return [name for name, ranks in zip(names, taken.faulty.tolist(), strict=True) if ranks]

    def _mfu(self, tokens_per_second: float) -> float | None:
        if self._job.peak_flops is None:
            return None
        return (
            tokens_per_second
            * self._job.flops_per_token
            / (self._job.peak_flops * self._job.plan.world_size)
        )


def _first_few(values: list[Any], most: int = 8) -> str:
    shown = ", ".join(map(str, values[:most])) or "none"
    return shown if len(values) <= most else f"{shown} and {len(values) - most} more"


def evaluate(job: Job) -> float | None:
    """Mean loss over all supervised tokens of the held-out rows, each counted once; None for a signal; collective."""
    job.doing = f"step {job.outcome.steps}: evaluating"
    data = job.recipe.data
    batches: Iterator[MicroBatch] = eval_batches(
        job.eval_rows,
        data.micro_tokens,
        data.seq_len,
        job.plan.rank,
        job.plan.world_size,
        job.plan.device,
    )
    sums = torch.zeros(2, dtype=torch.float64, device=job.plan.device)
    with torch.no_grad():
        for i, micro in enumerate(batches):
            if i % POLL_EVERY == 0 and stop_asked(job):
                sums = None
                break
            loss_sum, count = job.lm.loss(micro.input_ids, micro.labels, micro.packed)
            sums += torch.stack(
                [loss_sum.double(), torch.as_tensor(count, device=sums.device).double()]
            )
    job.plan.reshard(job.lm)
    take_loads(job.lm)  # of held-out rows: not the training's
    if sums is None:
        return None
    loss_sum, count = job.plan.sum_over_ranks(sums).tolist()
    return loss_sum / count


def stop_asked(job: Job) -> bool:
    """Whether a signal has come on any rank; the same answer on all; collective."""
    flag = torch.tensor([float(bool(job.stop))], device=job.plan.device)
    return bool(job.plan.sum_over_ranks(flag))


def take_loads(lm: HybridLM) -> Tensor:
    """Rows of each expert since the last call, (L_moe * E,) float64; resets the counters."""
    mixers = [layer.mixer for layer in lm.layers if isinstance(layer.mixer, MoE)]
    device = lm.norm_f.weight.device
    loads = [
        torch.zeros(lm.config.n_routed_experts, dtype=torch.int64, device=device)
        if m.load is None
        else m.load
        for m in mixers
    ]
    for mixer in mixers:
        mixer.load = None
    if not loads:
        return torch.zeros(0, dtype=torch.float64, device=device)
    return torch.cat(loads).double()


def loads_of(job: Job) -> ExpertLoads:
    """The rows of the run's experts so far."""
    lm = job.lm
    layers = [n for n, layer in enumerate(lm.layers) if isinstance(layer.mixer, MoE)]
    orders = [order_of(lm.layers[n].mixer.experts.up_proj) for n in layers]
    return ExpertLoads(
        layers,
        lm.config.n_routed_experts,
        job.plan.group_size,
        None if None in orders or not orders else torch.tensor(orders),
        job.outcome.expert_loads,
    )


def write_loads(job: Job) -> None:
    """Leaves the rows of the run's experts so far in the run folder, where a later run may look for an order."""
    if job.plan.rank == 0:
        loads_of(job).write(Path(job.recipe.run.dir), job.outcome.steps)


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory that this rank's device has held; on a CPU the largest resident size of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _evaluates(job: Job, number: int) -> bool:
    if job.eval_rows is None:
        return False
    every = job.recipe.train.eval_every
    return number == job.steps or (every > 0 and number % every == 0)


def _saves(job: Job, number: int) -> bool:
    every = job.recipe.run.save_every
    return job.saver is not None and (number == job.steps or number % every == 0)
