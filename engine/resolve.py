"""From a recipe to a decision: every `auto` settled, everything checked that can be without reading weights."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from hymoe.engine import budget, parallel, resume
from hymoe.engine.devices import Machine, World, machine_here
from hymoe.engine.errors import UserError
from hymoe.engine.hf_checkpoint import Checkpoint, read_config
from hymoe.engine.hf_index import INDEX, SINGLE
from hymoe.engine.optim import schedule
from hymoe.engine.recipe import Recipe, check
from hymoe.engine.relabel import Orders, resolve_orders
from hymoe.kernels.launch import backends, summary
from hymoe.model.config import HybridConfig
from hymoe.model.cost import count_parameters


@dataclass(frozen=True)
class Resolved:
    """A recipe whose every `auto` is decided, with what was found on the way."""

    recipe: Recipe
    config: HybridConfig
    checkpoint: Checkpoint | None  # None: a dry run without the weights
    dtype: torch.dtype
    micro_steps: int
    machine: Machine
    needs: budget.Job
    estimate: budget.Budget
    notes: tuple[str, ...]
    orders: Orders = field(default_factory=dict)  # of experts on their ranks; empty: as they are

    @property
    def verdict(self) -> str:
        """Whether it fits, in one line."""
        machine = self.machine
        return budget.verdict(
            self.estimate, self.needs, machine.memory, on_gpu=machine.kind == "cuda"
        )

    @property
    def fits(self) -> bool:
        """By the estimate."""
        return self.estimate.peak <= self.machine.memory


def resolve(recipe: Recipe, here: World, machine: Machine | None = None) -> Resolved:
    """Validates the recipe and the base checkpoint without reading weights; the same on every rank.

    Args:
        recipe: what is asked.
        here: this process.
        machine: what a dry run plans for, and then shards may be missing; None: the ranks that are here train.

    Raises:
        UserError: what is wrong, in one line.
    """
    is_dry = machine is not None
    machine = machine or machine_here(here)
    micro_steps = check(recipe, machine.ranks)
    config = read_config(recipe.model.path)
    try:
        backends(recipe.run.kernels, machine.kind)
    except ValueError as error:
        raise UserError(str(error)) from None
    checkpoint, notes = _checkpoint(recipe.model.path, config, is_dry)
    dtype, why = _dtype(recipe, checkpoint)
    notes += why
    experts = config.n_routed_experts if "E" in config.pattern else 0
    size, exchange, why = parallel.resolve_experts(recipe.parallel, machine.ranks, experts)
    notes += why
    orders, why = resolve_orders(recipe.parallel.expert_order, config, size)
    notes += why
    is_fused = machine.kind == "cuda" and recipe.run.kernels != "torch"
    needs = budget.Job(
        config=config,
        world_size=machine.ranks,
        micro_tokens=recipe.data.micro_tokens,
        micro_steps=micro_steps,
        dtype=dtype,
        rounding="exact",
        keep="inputs",
        expert_parallel=size,
        exchange=exchange,
        replicas=recipe.parallel.replicas,
        together=recipe.train.micro_steps_together,
        implementation="fused" if is_fused else "torch",
    )
    needs, why = _fill_memory(recipe, needs, machine, is_dry)
    notes += why
    recipe = replace(
        recipe,
        model=replace(recipe.model, dtype=dtype),
        optim=replace(recipe.optim, rounding=needs.rounding),
        train=replace(recipe.train, keep=needs.keep),
        parallel=replace(recipe.parallel, expert_parallel=str(size), exchange=exchange),
    )
    estimate = budget.estimate(needs, on_gpu=machine.kind == "cuda")
    torch_dtype = getattr(torch, dtype)
    return Resolved(
        *(recipe, config, checkpoint, torch_dtype, micro_steps, machine, needs, estimate),
        *(tuple(notes), orders),
    )


def _checkpoint(
    path: str, config: HybridConfig, is_dry: bool
) -> tuple[Checkpoint | None, list[str]]:
    """The base, checked; in a dry run None where not all of its shards are here."""
    if is_dry and (said := missing_weights(path)) is not None:
        return None, [said]
    checkpoint = Checkpoint.open(path)
    checkpoint.check_against(config)
    return checkpoint, []


def missing_weights(path: str) -> str | None:
    """What to say of a folder that has a config.json but not all of its shards.

    None where all are there, and where something is wrong that `Checkpoint.open` names better.
    """
    folder = Path(path)
    if not (folder / "config.json").is_file() or (folder / SINGLE).is_file():
        return None
    said = f"{folder}: weights are not here; their headers were not checked"
    if not (folder / INDEX).is_file():
        others = [file for file in folder.iterdir() if file.suffix in (".bin", ".safetensors")]
        return None if others else said
    try:
        wanted = set(json.loads((folder / INDEX).read_bytes())["weight_map"].values())
        gone = [name for name in wanted if not (folder / name).is_file()]
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    if not gone:
        return None
    return (
        said if len(gone) == len(wanted) else f"{said} ({len(gone)} of {len(wanted)} are missing)"
    )


def _dtype(recipe: Recipe, checkpoint: Checkpoint | None) -> tuple[str, list[str]]:
    dtype = recipe.model.dtype
    if dtype != "auto":
        return dtype, []
    if checkpoint is None:
        about = json.loads((Path(recipe.model.path) / "config.json").read_text(encoding="utf-8"))
        found = about.get("dtype") or about.get("torch_dtype") or "float32"
    else:
        found = str(checkpoint.dtype([f"{checkpoint.prefix}embeddings.weight"]))
    found = str(found).removeprefix("torch.")
    if found == "float16":
        return "bfloat16", ["model.dtype: the checkpoint is float16, training is in bfloat16"]
    return found, []


def _fill_memory(
    recipe: Recipe, needs: budget.Job, machine: Machine, is_dry: bool
) -> tuple[budget.Job, list[str]]:
    """Decides what memory decides: how weights are rounded, then how much the backward pass keeps."""
    notes, on_gpu, rounding, keep = (
        [],
        machine.kind == "cuda",
        recipe.optim.rounding,
        recipe.train.keep,
    )
    if rounding == "auto" and not is_dry and (saved := resume.saved_rounding(recipe)) is not None:
        rounding = saved
        notes.append(f"optim.rounding = {rounding}: as in the saved state")
    needs = replace(needs, keep="inputs" if keep == "auto" else keep)
    if rounding == "auto":
        rounding, reason = budget.choose_rounding(needs, machine.memory, on_gpu=on_gpu)
        notes.append(f"optim.rounding = {rounding}: {reason}")
    needs = replace(needs, rounding=rounding)
    if keep == "auto":
        keep, reason = budget.choose_keep(needs, machine.memory, on_gpu=on_gpu)
        notes.append(f"train.keep = {keep}: {reason}")
    return replace(needs, keep=keep), notes


def describe(resolved: Resolved, steps: int) -> list[str]:
    """Lines for a person: model, parallel plan, schedule, memory."""
    recipe, machine, counts = resolved.recipe, resolved.machine, count_parameters(resolved.config)
    optim, train_ = recipe.optim, recipe.train
    chosen = backends(recipe.run.kernels, machine.kind)
    files = ""
    if resolved.checkpoint is not None:
        files = f", {len({entry.file for entry in resolved.checkpoint.entries.values()})} files"
    lines = [
        f"model   {recipe.model.path}: {counts.total:,} parameters, {counts.active:,} active a token, "
        f"{len(resolved.config.pattern)} layers {resolved.config.pattern}, {recipe.model.dtype}{files}",
        f"plan    {machine.ranks} x {machine.name}; a step: {train_.step_tokens:,} tokens = {machine.ranks} ranks x "
        f"{resolved.micro_steps} micro-steps x {recipe.data.micro_tokens:,} tokens",
        *(f"kernels {line}" for line in summary(chosen)),
    ]
    shape = {
        "lr": optim.lr,
        "min_lr_ratio": optim.min_lr_ratio,
        "warmup_steps": optim.warmup_steps,
        "steps": steps,
    }
    at = (
        sorted({1, min(max(optim.warmup_steps, 1), steps), (steps + 1) // 2, steps} - {0})
        if steps
        else []
    )
    rates = ", ".join(f"{n}: {schedule(n, **shape):.2e}" for n in at)
    lines.append(f"steps   {steps:,}; learning rate by step {rates or 'none'}")
    lines += [f"auto    {note}" for note in resolved.notes]
    lines.append(f"memory  {resolved.verdict}")
    return lines
