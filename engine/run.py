"""Where a run is put together: recipe -> plan, model, data, optimiser, loop, export.

The only place that wires objects and the only one that reads the environment.
"""

import dataclasses
import hashlib
import os
from pathlib import Path

import torch
import torch.distributed as dist

from hymoe.engine import checkpoint, faults, hf_hashes, parallel, resume
from hymoe.engine.data.loader import Loader
from hymoe.engine.data.prepare import prepare_jsonl
from hymoe.engine.data.rows import Described, Rows
from hymoe.engine.data.store import PackedRows
from hymoe.engine.data.tokenizer import Tokenizer
from hymoe.engine.devices import World, peak_flops
from hymoe.engine.errors import UserError
from hymoe.engine.evidence import Evidence
from hymoe.engine.export import TrainedValues
from hymoe.engine.forecast import forecast
from hymoe.engine.hf_checkpoint import near_zero_rows, plan_export, save_pretrained
from hymoe.engine.log import RunLog, machine_stamp
from hymoe.engine.optim import Optimizer
from hymoe.engine.preflight.links import check_links
from hymoe.engine.recipe import Recipe
from hymoe.engine.relabel import relabel
from hymoe.engine.resolve import Resolved, describe
from hymoe.engine.stop import StopFlag
from hymoe.engine.train import Job, Outcome, train
from hymoe.kernels.launch import backends
from hymoe.model.cost import flops_per_token, mean_context
from hymoe.model.net import HybridLM

LINKS_TIMEOUT_S = 60.0  # for each stage; making NCCL's communicators is one


def world() -> World:
    """Reads what torchrun sets; without it, one process."""
    values = (
        os.environ.get(key, default)
        for key, default in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1))
    )
    return World(*(int(value) for value in values))


def execute(resolved: Resolved, here: World, stop: StopFlag | None = None) -> Outcome:
    """Trains as the recipe says, from the base or from a saved state, and exports the result.

    Args:
        resolved: what to do.
        here: this process.
        stop: the flag of signals, where it has been set up already.

    Raises:
        UserError: bad data, a folder that is in use, no room for a state, too many skipped steps.
        RunFailed: no memory, or another rank has died.
    """
    if here.device.type == "cuda":
        torch.cuda.set_device(here.device)
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    stop = stop or StopFlag()
    recipe = resolved.recipe
    tokenizer = _tokenizer(resolved)
    rows, stats = _rows(recipe, recipe.data.path, tokenizer)
    evals = None if recipe.data.eval is None else _rows(recipe, recipe.data.eval, tokenizer)
    experts = recipe.parallel
    plan = parallel.start(
        *(here.device, here.size, int(experts.expert_parallel)),
        *(experts.exchange, experts.replicas),
    )
    group = checkpoint.Group()
    job, patience_s = None, 5.0
    watch = faults.PeerWatch(group.peers(), here.rank, lambda: first_to_speak(here))
    try:
        loader = _loader(recipe, rows, plan)
        steps = _steps(recipe, loader)
        identity = resume.identity(recipe, resolved.config, tokenizer.path, steps)
        start = resume.begin(recipe, identity, group)
        log = RunLog(Path(recipe.run.dir), steps, recipe.run.log_every, plan.rank)
        for note in start.notes:
            log.event("resume", note)
        if resume.is_done(start, recipe, steps):
            log.event("resume", f"finished after step {steps}, exported too: nothing to do")
            return Outcome(steps=start.step)
        if here.device.type == "cuda" and here.size > 1 and recipe.run.check_links:
            # Before 63 GB are loaded: a link that hangs would otherwise be met in the first step.
            try:
                speeds = check_links(here.device, _meeting_store(), timeout_s=LINKS_TIMEOUT_S)
            except faults.RunFailed as error:
                raise faults.RunFailed(f"{error}; run.check_links = false leaves it out") from error
            log.event("links", f"links   {speeds}")
        lm = _model(resolved, plan)
        job = _job(resolved, plan, lm, loader, evals and evals[0], steps, log, stop)
        _announce(resolved, here, job, stats, evals and evals[1])
        if recipe.run.save_every:
            job.saver = resume.saver(job, resolved.checkpoint.folder, identity, group)
        if not resume.fill(job, resolved.checkpoint, start, group):
            reason = f"{stop.reason}: nothing to save while loading, leaving"
            log.event("stop", reason, step=start.step)
            return Outcome(steps=start.step, stopped_by=stop.reason)
        if start.state is None:
            _warn_of_near_zero_rows(lm, tokenizer, log)
        evidence = None
        if here.rank == 0:
            # `fill` has compared them, where it read the base.
            reads_base = start.state is None and recipe.model.check_hashes
            known = hf_hashes.stated(resolved.checkpoint) if reads_base else {}
            checked = {file.name: one.sha256 for file, one in known.items()}
            evidence = Evidence(resolved, stats, evals and evals[1], checked)
        outcome = train(job)
        _finish(job, evidence)
        log.close()
        return outcome
    except UserError:
        patience_s = 600.0  # all ranks end together: what is being written may become whole
        raise
    except faults.RunFailed:
        raise  # it says already what was wrong
    except Exception as error:
        doing = "starting" if job is None else job.doing
        explained = faults.explain(error, doing, recipe)
        if explained is None:
            raise
        raise explained from error
    finally:
        watch.close()
        if job is None or job.saver is None or job.saver.leave(patience_s):
            group.close()
        plan.close()


def first_to_speak(here: World) -> bool:
    """Whether this rank is the first that asks, so that one of several ranks with one trouble reports it.

    torchrun's own store answers, which outlives every rank; without it each rank speaks for itself.
    """
    if here.size == 1 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return True
    return faults.is_first(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))


def _meeting_store() -> dist.Store:
    """A client of the store at which the ranks met; a restart finds no keys of the attempt before."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False)
    return dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)


def _model(resolved: Resolved, plan: parallel.Alone) -> HybridLM:
    """The model with its memory spread over the ranks, still empty."""
    recipe, folder = resolved.recipe, Path(resolved.recipe.run.dir)
    lm = HybridLM(resolved.config, kernels=recipe.run.kernels, dtype=resolved.dtype, device="meta")
    lm.source = resolved.checkpoint.folder
    if recipe.run.export:
        # What would stop the export is found before training, not after it.
        plan.on_rank_zero(lambda: _check_export(lm, folder, recipe))
    lm.set_keep(recipe.train.keep)
    lm = plan.shard(lm)
    # One order on all ranks, whatever each has found in the file.
    relabel(lm, plan.on_rank_zero(lambda: resolved.orders))
    return lm


def _finish(job: Job, evidence: Evidence | None) -> None:
    """After the loop: the export, the last state on disk, the evidence, which rank 0 has.

    A run that a signal has ended exports only where it saves no state to continue from.
    """
    outcome, recipe = job.outcome, job.recipe
    if outcome.stopped_by is not None and (job.saver is not None or not outcome.steps):
        return
    job.doing = "exporting"
    exported = kept = None
    if recipe.run.export:
        stopped = outcome.stopped_by is not None
        name = f"stopped_step_{outcome.steps:08d}" if stopped else recipe.run.export
        exported = Path(recipe.run.dir) / name
        kept = _export(job, exported)
    if job.saver is not None:
        job.saver.wait()
    job.doing = "writing the evidence"
    # All wait for it: a rank that leaves earlier would be taken for dead.
    job.plan.on_rank_zero(lambda: evidence.write(job, outcome, exported, kept))


def _tokenizer(resolved: Resolved) -> Tokenizer:
    tokenizer, words = Tokenizer(resolved.recipe.model.path), resolved.config.vocab_size
    if tokenizer.vocab_size > words:
        raise UserError(
            f"{tokenizer.path}: has ids up to {tokenizer.vocab_size - 1}, "
            f"the model's vocabulary ends at {words - 1}; they do not belong together"
        )
    return tokenizer


def _rows(recipe: Recipe, path: str, tokenizer: Tokenizer) -> tuple[Rows, Described]:
    """Packed rows of a prepared folder, or of a JSONL file that is prepared here; and what to say of them."""
    if not Path(path).is_dir():
        return prepare_jsonl(path, tokenizer, recipe.data.seq_len, recipe.train.seed)
    rows = PackedRows(path)
    sha256 = hashlib.sha256(tokenizer.path.read_bytes()).hexdigest()
    if rows.manifest["tokenizer_sha256"] != sha256:
        raise UserError(
            f"{path}: prepared with another tokenizer than {tokenizer.path}; prepare the data with this model"
        )
    return rows, rows


def _check_export(lm: HybridLM, folder: Path, recipe: Recipe) -> None:
    plan_export(lm, folder / recipe.run.export, max_shard_size=recipe.run.max_shard_size)


def _loader(recipe: Recipe, rows: Rows, plan: parallel.Alone) -> Loader:
    return Loader(
        rows,
        recipe.train.step_tokens,
        recipe.data.micro_tokens,
        recipe.data.seq_len,
        plan.rank,
        plan.world_size,
        recipe.train.seed,
        plan.device,
    )


def _steps(recipe: Recipe, loader: Loader) -> int:
    return (
        loader.steps_in(recipe.train.epochs) if recipe.train.steps is None else recipe.train.steps
    )


def _job(
    resolved: Resolved,
    plan: parallel.Alone,
    lm: HybridLM,
    loader: Loader,
    eval_rows: Rows | None,
    steps: int,
    log: RunLog,
    stop: StopFlag,
) -> Job:
    optim = resolved.recipe.optim
    optimizer = Optimizer(
        lm.named_parameters(),
        beta1=optim.beta1,
        beta2=optim.beta2,
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        clip_norm=optim.clip_norm,
        rounding=optim.rounding,
        seed=resolved.recipe.train.seed,
        kernels=lm.kernels,
    )
    return Job(
        recipe=resolved.recipe,
        plan=plan,
        lm=lm,
        optimizer=optimizer,
        loader=loader,
        eval_rows=eval_rows,
        steps=steps,
        log=log,
        stop=stop,
        flops_per_token=flops_per_token(resolved.config, _mean_context(loader.rows)).training,
        peak_flops=peak_flops(plan.device),
    )


def _mean_context(rows: Rows) -> float:
    """Keys that a query sees, averaged over the first rows: enough for a utilisation figure."""
    lengths: list[int] = []
    for i in range(min(len(rows), 64)):
        starts = rows[i][2]
        lengths += [int(n) for n in starts[1:] - starts[:-1]]
    return mean_context(lengths)


def _announce(
    resolved: Resolved, here: World, job: Job, stats: Described, eval_stats: Described | None
) -> None:
    for line in describe(resolved, job.steps):
        job.log.say(line)
    if not resolved.fits:
        job.log.event("warning", f"warning: by the estimate this run {resolved.verdict}")
    job.log.say(f"data    {stats.summary()}")
    if eval_stats is not None:
        job.log.say(f"eval    {eval_stats.summary()}")
    job.log.event(
        "start",
        recipe=resolved.recipe.to_toml(),
        recipe_sha256=resolved.recipe.sha256,
        kernels={
            operation: dataclasses.asdict(choice)
            for operation, choice in backends(job.lm.kernels, here.device.type).items()
        },
        machine=machine_stamp(job.plan.device),
        world_size=here.size,
        data=stats.as_dict(),
        eval=eval_stats and eval_stats.as_dict(),
    )


def dry_run(resolved: Resolved) -> str:
    """Everything that a run would do before its first step, in text; trains nothing and writes nothing.

    Raises:
        UserError: what is wrong with the data; or it is not here, and `train.steps` is not given either.
    """
    recipe = resolved.recipe
    data, steps, context = [], recipe.train.steps, None
    if resolved.checkpoint is None and not Path(recipe.data.path).exists():
        data.append(f"data    {recipe.data.path} is not here; it was not checked")
        if steps is None:
            raise UserError(
                f"{recipe.data.path}: no such data; without it a dry run needs train.steps"
            )
    else:
        tokenizer = _tokenizer(resolved)
        rows, stats = _rows(recipe, recipe.data.path, tokenizer)
        loader = _loader(recipe, rows, parallel.Alone(torch.device("cpu")))
        steps, context = _steps(recipe, loader), _mean_context(rows)
        data.append(f"data    {stats.summary()}")
        if recipe.data.eval is not None:
            data.append(f"eval    {_rows(recipe, recipe.data.eval, tokenizer)[1].summary()}")
    return "\n".join(
        [recipe.to_toml(), *describe(resolved, steps), *data, *forecast(resolved, context)]
    )


def _warn_of_near_zero_rows(lm: HybridLM, tokenizer: Tokenizer, log: RunLog) -> None:
    ids = near_zero_rows(lm)
    if not ids:
        return
    shown = ", ".join(f"{i} {tokenizer.decode([i])!r}" for i in ids[:8])
    more = f" and {len(ids) - 8} more" if len(ids) > 8 else ""
    log.event(
        "warning",
        f"warning: {len(ids)} embedding rows are near zero, as of tokens that the base model never saw: {shown}{more}; "
        "a norm layer divides them by nearly nothing, so their gradients may be huge",
        near_zero_rows=ids,
    )


def _export(job: Job, folder: Path) -> float | None:
    """Writes the model; returns the share of the update that reached the files, None where nothing moved."""
    values = TrainedValues(job.lm, job.optimizer)
    save_pretrained(
        job.lm,
        folder,
        max_shard_size=job.recipe.run.max_shard_size,
        value=values,
        progress=job.log.progress("exporting"),
    )
    projected, whole = job.plan.sum_over_ranks(values.sums).tolist()
    kept = projected / whole if whole else None
    share = "nothing moved" if kept is None else f"{kept:.2%} of the update reached the files"
    job.log.event("export", f"exported {folder}: {share}", folder=folder.name, update_kept=kept)
    return kept
