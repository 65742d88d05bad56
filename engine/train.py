"""The loop: batch -> loss -> step -> log -> evaluate -> stop.

On a GPU the screen and the files are one step behind: the numbers of step n are read while step n+1 is already under
way, so that reading them never makes the device wait.
"""

import math
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hymoe.engine.data.loader import Loader, MicroBatch, StepBatch, eval_batches
from hymoe.engine.data.rows import Rows
from hymoe.engine.errors import UserError
from hymoe.engine.log import RunLog, Stopwatch
from hymoe.engine.optim import Optimizer, StepReport, schedule
from hymoe.engine.parallel import Alone
from hymoe.engine.recipe import Recipe
from hymoe.engine.stop import StopFlag
from hymoe.model.moe import MoE
from hymoe.model.net import HybridLM


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


@dataclass(kw_only=True)
class Outcome:
    """What a run did."""

    steps: int = 0  # the last one that was taken
    applied: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    seconds: float = 0.0
    first_eval_loss: float | None = None
    last_eval_loss: float | None = None
    stopped_by: str | None = None  # name of the signal


@dataclass(kw_only=True)
class Taken:
    """A step that the device may still be working on."""

    number: int
    lr: float
    batch: StepBatch
    report: StepReport
    sums: Tensor  # float64, summed over ranks: loss, stop flags, then rows by layer and expert


def train(job: Job) -> Outcome:
    """Runs the recipe's steps, or fewer where a signal asks for it.

    Raises:
        UserError: `optim.max_skipped` steps in a row had a gradient that is not finite.
    """
    outcome = Outcome()
    if job.eval_rows is not None:
        outcome.first_eval_loss = outcome.last_eval_loss = evaluate(job)
        job.log.event("eval", f"eval loss {outcome.first_eval_loss:.4f} before training", step=0)
    job.log.start_steps()
    settle = Settle(job, outcome)
    under_way: list[Taken] = []
    for number in range(1, job.steps + 1):
        under_way.append(take_step(job, number))
        evaluates = _evaluates(job, number)
        # A GPU has its next step before it is asked about the last one; a CPU has finished when it returns.
        behind = 1 if job.plan.device.type == "cuda" and not evaluates and number < job.steps else 0
        while len(under_way) > behind and outcome.stopped_by is None:
            settle(under_way.pop(0), evaluates=evaluates and not under_way)
        if outcome.stopped_by is not None:
            break
    while under_way:
        settle(under_way.pop(0))
    if outcome.stopped_by is not None:
        job.log.event(
            "stop", f"{outcome.stopped_by}: stopped after step {outcome.steps}", step=outcome.steps
        )
    return outcome


def take_step(job: Job, number: int) -> Taken:
    """Forward and backward over this rank's micro-batches, then one optimiser step; waits for nothing."""
    batch = job.loader.step(number - 1)
    device = job.plan.device
    loss = torch.zeros((), dtype=torch.float64, device=device)
    micro_batches = batch.micro_batches
    for i, micro in enumerate(micro_batches):
        loss_sum, _ = job.lm.loss(micro.input_ids, micro.labels, micro.packed)
        loss_sum.backward()
        loss += loss_sum.detach()
        job.plan.collect_gradients(job.lm, last=i == len(micro_batches) - 1)
    optim = job.recipe.optim
    lr = schedule(
        number,
        lr=optim.lr,
        min_lr_ratio=optim.min_lr_ratio,
        warmup_steps=optim.warmup_steps,
        steps=job.steps,
    )
    # Without a supervised token in the whole step there is no mean loss: the optimiser skips at a scale of NaN.
    scale = 1 / batch.supervised_tokens if batch.supervised_tokens else math.nan
    report = job.optimizer.step(job.plan.gradients(job.lm), lr=lr, scale=scale)
    stop = torch.full((), float(bool(job.stop)), dtype=torch.float64, device=device)
    sums = job.plan.sum_over_ranks(torch.cat([loss[None], stop[None], take_loads(job.lm)]))
    return Taken(number=number, lr=lr, batch=batch, report=report, sums=sums)


class Settle:
    """Reads what a step came to, writes it down, and notes whether the run goes on."""

    def __init__(self, job: Job, outcome: Outcome) -> None:
        """Counts skipped steps from none; the time of the first step starts now."""
        self._job, self._outcome = job, outcome
        self._skipped_in_a_row = 0
        self._watch = Stopwatch()

    def __call__(self, taken: Taken, evaluates: bool = False) -> None:
        """Waits for the step, evaluates where asked, and writes the step's metrics.

        Raises:
            UserError: too many steps in a row were skipped.
        """
        job, batch, outcome = self._job, taken.batch, self._outcome
        loss_sum, stops, *loads = taken.sums.tolist()
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
            "expert_load_max_over_mean": load_imbalance(loads, job.lm),
            "epoch": batch.epoch,
            "skipped": skipped,
        }
        if evaluates:
            metrics["eval_loss"] = outcome.last_eval_loss = evaluate(job)
        job.log.step(metrics)
        outcome.steps = taken.number
        outcome.applied += not skipped
        outcome.tokens += batch.num_tokens
        outcome.supervised_tokens += batch.supervised_tokens
        outcome.seconds += seconds
        if stops and outcome.stopped_by is None:
            outcome.stopped_by = job.stop.signal or "a signal on another rank"
        self._check_skips(taken.number, skipped, batch.supervised_tokens)
        self._watch.lap()  # an evaluation is not part of the next step

    def _check_skips(self, number: int, skipped: bool, supervised: int) -> None:
        if skipped and not supervised:
            self._job.log.event(
                "skip",
                f"step {number}: no supervised token on any rank; nothing changed",
                step=number,
            )
            return
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        most = self._job.recipe.optim.max_skipped
        if self._skipped_in_a_row >= most:
            raise UserError(
                f"step {number}: the gradient norm was not finite {most} steps in a row (optim.max_skipped); "
                "weights are those of the last good step"
            )

    def _mfu(self, tokens_per_second: float) -> float | None:
        if self._job.peak_flops is None:
            return None
        return (
            tokens_per_second
            * self._job.flops_per_token
            / (self._job.peak_flops * self._job.plan.world_size)
        )


def evaluate(job: Job) -> float:
    """Mean loss over all supervised tokens of the held-out rows, each counted once; collective."""
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
        for micro in batches:
            loss_sum, count = job.lm.loss(micro.input_ids, micro.labels, micro.packed)
            sums += torch.stack(
                [loss_sum.double(), torch.as_tensor(count, device=sums.device).double()]
            )
    job.plan.reshard(job.lm)
    take_loads(job.lm)  # of held-out rows: not the training's
    loss_sum, count = job.plan.sum_over_ranks(sums).tolist()
    return loss_sum / count


def take_loads(lm: HybridLM) -> Tensor:
    """Rows of each expert since the last call, (L_moe * E,) float64; resets the counters."""
    mixers = [layer.mixer for layer in lm.layers if isinstance(layer.mixer, MoE)]
    device = lm.norm_f.weight.device
    loads = [
        torch.zeros(lm.config.n_routed_experts, device=device) if m.load is None else m.load
        for m in mixers
    ]
    for mixer in mixers:
        mixer.load = None
    if not loads:
        return torch.zeros(0, dtype=torch.float64, device=device)
    return torch.cat(loads).double()


def load_imbalance(loads: list[float], lm: HybridLM) -> float | None:
    """Rows of the busiest expert over the mean, in the layer where that is worst; None without experts."""
    if not loads or not sum(loads):
        return None
    size = lm.config.n_routed_experts
    layers = [loads[i : i + size] for i in range(0, len(loads), size)]
    return max(max(layer) * size / sum(layer) for layer in layers)


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
