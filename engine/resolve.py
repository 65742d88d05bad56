"""From a recipe to a decision: every `auto` settled, everything checked that can be without reading weights."""

from dataclasses import dataclass, replace

import torch

from hymoe.engine import budget, parallel, resume
from hymoe.engine.devices import World, device_memory_bytes
from hymoe.engine.errors import UserError
from hymoe.engine.hf_checkpoint import Checkpoint
from hymoe.engine.optim import schedule
from hymoe.engine.recipe import Recipe, check
from hymoe.kernels.launch import backends, summary
from hymoe.model.config import HybridConfig
from hymoe.model.cost import count_parameters


@dataclass(frozen=True)
class Resolved:
    """A recipe whose every `auto` is decided, with what was found on the way."""

    recipe: Recipe
    config: HybridConfig
    checkpoint: Checkpoint
    dtype: torch.dtype
    micro_steps: int
    estimate: budget.Budget
    notes: tuple[str, ...]


def resolve(recipe: Recipe, here: World) -> Resolved:
    """Validates the recipe and the base checkpoint without reading weights; the same on every rank.

    Raises:
        UserError: what is wrong, in one line.
    """
    micro_steps = check(recipe, here.size)
    checkpoint = Checkpoint.open(recipe.model.path)
    try:
        config = HybridConfig.from_pretrained(recipe.model.path)
        backends(recipe.run.kernels, here.device.type)
    except ValueError as error:
        raise UserError(str(error)) from None
    checkpoint.check_against(config)
    notes = []
    dtype = recipe.model.dtype
    if dtype == "auto":
        dtype = str(checkpoint.dtype([f"{checkpoint.prefix}embeddings.weight"])).removeprefix(
            "torch."
        )
        if dtype == "float16":
            dtype = "bfloat16"
            notes.append("model.dtype: the checkpoint is float16, training is in bfloat16")
    memory = device_memory_bytes(here)
    common = {
        "world_size": here.size,
        "micro_tokens": recipe.data.micro_tokens,
        "micro_steps": micro_steps,
        "dtype": dtype,
        "on_gpu": here.device.type == "cuda",
    }
    rounding = recipe.optim.rounding
    if rounding == "auto" and (saved := resume.saved_rounding(recipe)) is not None:
        rounding = saved
        notes.append(f"optim.rounding = {rounding}: as in the saved state")
    if rounding == "auto":
        rounding, reason = budget.choose_rounding(
            config, memory, recompute=recipe.train.keep != "all", **common
        )
        notes.append(f"optim.rounding = {rounding}: {reason}")
    keep = recipe.train.keep
    if keep == "auto":
        needs = budget.estimate(config, rounding=rounding, recompute=False, **common).peak
        keep = "all" if needs <= memory else "inputs"
        fits = "fits" if keep == "all" else "does not fit"
        notes.append(
            f"train.keep = {keep}: keeping everything needs {needs / budget.GIB:.1f} GiB, which {fits}"
        )
    estimate = budget.estimate(config, rounding=rounding, recompute=keep == "inputs", **common)
    experts = config.n_routed_experts if "E" in config.pattern else 0
    size, exchange, why = parallel.resolve_experts(recipe.parallel, here.size, experts)
    notes += why
    recipe = replace(
        recipe,
        model=replace(recipe.model, dtype=dtype),
        optim=replace(recipe.optim, rounding=rounding),
        train=replace(recipe.train, keep=keep),
        parallel=replace(recipe.parallel, expert_parallel=str(size), exchange=exchange),
    )
    return Resolved(
        recipe, config, checkpoint, getattr(torch, dtype), micro_steps, estimate, tuple(notes)
    )


def describe(resolved: Resolved, here: World, steps: int) -> list[str]:
    """Lines for a person: model, parallel plan, schedule, memory."""
    recipe, counts = resolved.recipe, count_parameters(resolved.config)
    optim, train_ = recipe.optim, recipe.train
    chosen = backends(recipe.run.kernels, here.device.type)
    files = len({entry.file for entry in resolved.checkpoint.entries.values()})
    lines = [
        f"model   {recipe.model.path}: {counts.total:,} parameters, {counts.active:,} active a token, "
        f"{len(resolved.config.pattern)} layers {resolved.config.pattern}, {recipe.model.dtype}, {files} files",
        f"plan    {here.size} x {here.device.type}; a step: {train_.step_tokens:,} tokens = {here.size} ranks x "
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
    lines.append(
        f"memory  {resolved.estimate.peak / budget.GIB:.2f} GiB a rank estimated at the most "
        f"({resolved.estimate.peak_phase}), {device_memory_bytes(here) / budget.GIB:.1f} GiB there"
    )
    return lines
