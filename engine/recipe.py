"""The recipe of a run: frozen dataclasses, read from TOML, changed by command-line flags, checked as a whole."""

import dataclasses
import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hymoe.engine.errors import UserError
from hymoe.engine.typed_toml import from_table, nearest, read_toml, to_table


@dataclass(frozen=True, kw_only=True)
class Model:
    """Where the base model is."""

    path: str = ""
    """HF folder: shards, index, config.json, tokenizer."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Of weights and arithmetic; auto: what config.json says. Small tensors are float32 in any case."""
    check_hashes: bool = True
    """Whether the base's files are compared with the hashes that lie beside them, if any do, before they are loaded."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """What is trained on."""

    path: str = ""
    """JSONL file with one `messages` list a row."""
    eval: str | None = None
    """The same for held-out rows; gives eval_loss."""
    seq_len: int = 8192
    """Tokens a packed row has at most."""
    micro_tokens: int = 16384
    """Tokens a rank processes in one micro-step: whole rows of seq_len."""


@dataclass(frozen=True, kw_only=True)
class Optim:
    """AdamW and its schedule: linear warm-up, then cosine to a share of the peak."""

    lr: float = 3e-7
    """Peak learning rate."""
    min_lr_ratio: float = 0.1
    """Learning rate of the last step over the peak."""
    warmup_steps: int = 20
    weight_decay: float = 0.1
    """Decoupled; not for norms, biases, A_log, D, dt_bias, embeddings."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_norm: float = 1.0
    """Largest global norm of the gradient of the mean loss."""
    rounding: Literal["auto", "exact", "stochastic", "nearest"] = "auto"
    """How a BF16 weight takes an update that is smaller than its last bit; auto: exact where memory allows."""
    max_skipped: int = 5
    """Steps in a row that may be skipped for a non-finite gradient before the run stops."""


@dataclass(frozen=True, kw_only=True)
class Train:
    """How long, how much at once, and what the backward pass keeps."""

    steps: int | None = None
    """Optimiser steps; without it, what `epochs` comes to."""
    epochs: float = 1.0
    """Passes over the data, where `steps` is not given."""
    step_tokens: int = 65536
    """Tokens of one optimiser step over all ranks and micro-steps."""
    eval_every: int = 100
    """Steps between evaluations; 0: only before the first and after the last step."""
    seed: int = 4242
    keep: Literal["auto", "inputs", "acts", "all"] = "auto"
    """What blocks keep for the backward pass: inputs (and run again), acts (MoE blocks all, the others their inputs),
    or all; auto: by the estimate."""
    micro_steps_together: int = 0
    """Micro-steps that pass each block together, so that its weights are gathered once for all of them; 0: all of a
    step. Fewer keep fewer block inputs, but add up the step's gradients in float32."""


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """How the model is spread over the ranks."""

    expert_parallel: Literal["auto", "1", "2", "4", "8"] = "auto"
    """Ranks that share the experts, each holding whole ones, so that tokens travel and not weights; 1: every rank
    gathers every expert. auto: the most that divides ranks and experts."""
    exchange: Literal["auto", "gather", "dedup"] = "auto"
    """How tokens travel: all to all ranks, or each once to every rank that it needs; auto: dedup."""
    expert_order: str = ""
    """An earlier run's `expert_loads.json`: experts are spread over their ranks so that these loads are even; empty: in
    their own order. Neither the model nor what is saved and exported depends on it."""
    replicas: int = 1
    """Copies of what FSDP2 shards, each over neighbouring ranks: one a node, where the link between nodes is slow."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Where a run leaves its traces."""

    dir: str = ""
    replace: bool = False
    """Whether an earlier run in `dir` is removed; without it, it is refused."""
    resume: str = "auto"
    """auto: the newest whole state in `dir` is continued; never; or the folder of a saved state."""
    resume_anyway: bool = False
    """Continue although the recipe differs from the state's in what matters."""
    save_every: int = 100
    """Steps between saved states, the last step and a signal besides; 0: nothing is saved."""
    keep_last: int = 2
    """Newest saved states that are kept."""
    keep_every: int = 0
    """States of every so many steps are kept beside them; 0: none."""
    save_in_background: bool = True
    """Whether training goes on while a state is written; it needs host memory for a copy."""
    export: str = "final"
    """Folder in `dir` for the trained model in HF format; empty: none."""
    max_shard_size: str = "5GB"
    """Largest file of the export."""
    check_links: bool = True
    """Whether links between GPUs are tried before weights are loaded, for seconds; one that hangs ends the run."""
    kernels: Literal["auto", "torch", "triton", "packages"] = "auto"
    log_every: int = 1
    """Steps between lines on the screen; metrics.jsonl has every step."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All that a run depends on."""

    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    optim: Optim = field(default_factory=Optim)
    train: Train = field(default_factory=Train)
    parallel: Parallel = field(default_factory=Parallel)
    run: Run = field(default_factory=Run)

    def to_toml(self) -> str:
        """The recipe as the file that would give it."""
        lines = []
        for section in dataclasses.fields(self):
            lines += [f"[{section.name}]", *to_table(getattr(self, section.name))]
            lines.append("")
        return "\n".join(lines)

    @property
    def sha256(self) -> str:
        """Hash of the resolved recipe."""
        return hashlib.sha256(self.to_toml().encode()).hexdigest()


def load(path: str | Path) -> Recipe:
    """Reads a recipe file.

    Raises:
        UserError: no such file, no TOML, an unknown section or key (with the nearest name), a value of another type.
    """
    path = Path(path)
    raw = read_toml(path)
    sections = {f.name: f for f in dataclasses.fields(Recipe)}
    built = {}
    for name, values in raw.items():
        if name not in sections:
            raise UserError(f"{path}: unknown section [{name}]{nearest(name, sections)}")
        if not isinstance(values, dict):
            raise UserError(
                f"{path}: {name} = {values!r} stands outside a section; expected [{name}]"
            )
        if "expert_parallel" in values:  # a number or "auto": one type on the command line
            values["expert_parallel"] = str(values["expert_parallel"])
        built[name] = from_table(f"{path}: [{name}]", sections[name].default_factory, values)
    return Recipe(**built)


def check(recipe: Recipe, world_size: int) -> int:
    """Checks what no single key shows.

    Returns:
        Micro-steps a step has on each rank.

    Raises:
        UserError: naming the keys, their values and what would fit.
    """
    model, data, optim, train, run = (
        recipe.model,
        recipe.data,
        recipe.optim,
        recipe.train,
        recipe.run,
    )
    for key, value in (("model.path", model.path), ("data.path", data.path), ("run.dir", run.dir)):
        if not value:
            raise UserError(f"{key} is missing: set it in the recipe or by --{key}")
    positive = {
        "data.seq_len": data.seq_len,
        "data.micro_tokens": data.micro_tokens,
        "train.step_tokens": train.step_tokens,
        "optim.lr": optim.lr,
        "optim.clip_norm": optim.clip_norm,
        "optim.eps": optim.eps,
        "run.log_every": run.log_every,
        "optim.max_skipped": optim.max_skipped,
        "run.keep_last": run.keep_last,
    }
    for key, value in positive.items():
        if not value > 0:
            raise UserError(f"{key} = {value}; expected more than 0")
    shares = {
        "optim.beta1": optim.beta1,
        "optim.beta2": optim.beta2,
        "optim.min_lr_ratio": optim.min_lr_ratio,
    }
    for key, value in shares.items():
        if not 0 <= value <= 1 or ("beta" in key and value == 1):
            raise UserError(f"{key} = {value}; expected a number from 0 to 1")
    counts = {"train.steps": train.steps or 0, "train.eval_every": train.eval_every}
    counts["train.micro_steps_together"] = train.micro_steps_together
    counts |= {"optim.warmup_steps": optim.warmup_steps, "optim.weight_decay": optim.weight_decay}
    counts |= {"run.save_every": run.save_every, "run.keep_every": run.keep_every}
    for key, value in counts.items():
        if value < 0:
            raise UserError(f"{key} = {value}; expected 0 or more")
    if train.steps is None and not train.epochs > 0:
        raise UserError(f"train.epochs = {train.epochs}; expected more than 0, or train.steps")
    if recipe.parallel.replicas < 1 or world_size % recipe.parallel.replicas:
        raise UserError(
            f"parallel.replicas = {recipe.parallel.replicas}; expected a divisor of {world_size} ranks"
        )
    if data.micro_tokens % data.seq_len:
        raise UserError(
            f"data.micro_tokens = {data.micro_tokens} is no multiple of data.seq_len = {data.seq_len}: "
            "a micro-step takes whole rows"
        )
    one = data.micro_tokens * world_size
    if train.step_tokens % one:
        raise UserError(
            f"train.step_tokens = {train.step_tokens} does not divide into micro-steps of data.micro_tokens = "
            f"{data.micro_tokens} on {world_size} ranks; a multiple of {one} would"
        )
    return train.step_tokens // one
