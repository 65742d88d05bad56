"""Whether a run continues an earlier one, from which saved state, and whether its recipe allows that.

| run.dir | run.resume = auto | never | PATH |
|---|---|---|---|
| absent, empty | from the base | from the base | from PATH |
| has saved states | from the newest whole one | refused | as auto; PATH among them must be the newest |
| an unfinished run that saved none yet | from the base | refused | from PATH |
| another run without states | refused | refused | refused |

`run.replace` removes what is there and starts anew. A state that is not whole is skipped with a line; where all
are damaged the run does not start again by itself.
"""

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hymoe.engine import checkpoint_files as files
from hymoe.engine import hf_hashes
from hymoe.engine import recipe as recipes
from hymoe.engine.checkpoint import FORMAT, Group, load, parts_of
from hymoe.engine.data.store import PackedRows
from hymoe.engine.errors import UserError
from hymoe.engine.hf_checkpoint import Checkpoint, load_weights
from hymoe.engine.log import machine_stamp
from hymoe.engine.recipe import Recipe
from hymoe.engine.saver import Saver
from hymoe.engine.stop import LeaveLoading, StopFlag
from hymoe.engine.train import Job, Outcome, stop_asked
from hymoe.model.config import HybridConfig

EVIDENCE = "evidence.json"


@dataclass(frozen=True, slots=True)
class Start:
    """Where a run begins.

    Attributes:
        state: folder of the saved state; None: at the base.
        manifest: what the state is.
        notes: lines for the log.
    """

    state: Path | None = None
    manifest: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        """The last step that is done."""
        return self.manifest["step"] if self.manifest else 0


def begin(recipe: Recipe, identity: dict[str, Any], group: Group) -> Start:
    """Decides, prepares run.dir for it, and leaves the resolved recipe there; collective.

    Args:
        recipe: resolved.
        identity: recipe key -> value of all that a state depends on.
        group: all ranks.

    Raises:
        UserError: the folder is in use, no state is whole, or the recipe differs from the state's in what matters.
    """
    folder = Path(recipe.run.dir)
    plan = _on_rank_zero(group, lambda: _survey(folder, recipe))
    state, manifest, notes = _newest_whole([Path(p) for p in plan["states"]], group)
    notes = [*plan["notes"], *notes]
    if state is None and plan["states"]:
        raise UserError(
            f"run.dir = {folder}: none of its saved states is whole ({notes[-1]}); "
            "--run.replace true starts anew, or name one by --run.resume"
        )
    if state is not None:
        notes += check_identity(state, manifest, identity, recipe)
    last = _on_rank_zero(group, lambda: _prepare(folder, recipe, manifest, replace=plan["replace"]))
    if (
        last is not None
        and last["step"] == manifest["step"]
        and manifest["progress"].get("pending")
    ):
        # The evaluation that a signal had cut short has been made up for since.
        manifest["progress"] |= {"pending": None, "last_eval_loss": last["eval_loss"]}
    return Start(state, manifest, tuple(notes))


def _survey(folder: Path, recipe: Recipe) -> dict[str, Any]:
    """What may be continued, by the table in this file's head; changes nothing but leftovers of a kill."""
    run = recipe.run
    path = None if run.resume in ("auto", "never") else Path(run.resume).resolve()
    if path is not None and not path.is_dir():
        raise UserError(
            f"run.resume = {run.resume}: no such folder; expected auto, never or a saved state"
        )
    if path is not None:
        files.step_of(path)
    outside = [str(path)] if path is not None else []
    if not folder.exists() or not any(folder.iterdir()):
        return {"states": outside, "notes": [], "replace": False}
    if not (folder / "recipe.toml").is_file():
        raise UserError(f"run.dir = {folder}: not empty and no run of ours; choose another folder")
    if run.replace:
        if path is not None and path.is_relative_to(folder.resolve()):
            raise UserError(f"run.replace would remove run.resume = {run.resume}; set one of them")
        return {"states": outside, "notes": [], "replace": True}
    if run.resume == "never":
        raise UserError(
            f"run.dir = {folder}: holds an earlier run; choose another, --run.replace true, "
            "or --run.resume auto to continue it"
        )
    checkpoints = folder / files.FOLDER
    notes = [f"removed {name}: a save that was cut short" for name in files.sweep(checkpoints)]
    own = files.states(checkpoints)
    if path is not None and path.parent == checkpoints.resolve():
        newer = [state.name for state in own if files.step_of(state) > files.step_of(path)]
        if newer:
            raise UserError(
                f"run.resume = {run.resume}: run.dir has gone on to {newer[0]}; "
                "choose another run.dir to go on from an earlier state"
            )
        own = [path]
    elif path is not None and own:
        notes.append(f"run.resume = {run.resume}: run.dir has gone on from there")
    states = [str(state) for state in own] or outside
    if not states:
        is_finished = (folder / EVIDENCE).exists()
        if is_finished or not recipes.load(folder / "recipe.toml").run.save_every:
            raise UserError(
                f"run.dir = {folder}: holds an earlier run without a saved state; "
                "choose another, or --run.replace true"
            )
        notes.append(f"the earlier run in {folder} saved no state: from the start again")
    return {"states": states, "notes": notes, "replace": False}


def _newest_whole(
    candidates: list[Path], group: Group
) -> tuple[Path | None, dict[str, Any], list[str]]:
    """The first whole state; the ranks share the reading of its files. Collective."""
    notes = []
    for state in candidates:
        manifest, problem = {}, None
        try:
            manifest = files.read_manifest(state)
            if manifest["format"] != FORMAT:
                problem = f"format {manifest['format']}, expected {FORMAT}"
        except UserError as error:
            problem = str(error)
        if (problem := group.first_fault(problem)) is None:
            mine = sorted(manifest["files"])[group.rank :: group.size]
            problem = group.first_fault(files.fault(state, mine, manifest))
        if problem is None:
            return state, manifest, notes
        notes.append(f"skipped {state.name}: {problem}")
    return None, {}, notes


def is_done(start: Start, recipe: Recipe, steps: int) -> bool:
    """Whether there is nothing left to train or to export."""
    folder = Path(recipe.run.dir)
    is_exported = not recipe.run.export or (folder / recipe.run.export).exists()
    return (
        start.state is not None
        and start.step >= steps
        and is_exported
        and (folder / EVIDENCE).exists()
    )


def identity(recipe: Recipe, config: HybridConfig, tokenizer: Path, steps: int) -> dict[str, Any]:
    """All that the values of a saved state depend on, by recipe key: a resume with another one is refused."""
    data = Path(recipe.data.path)
    prepared = PackedRows(data).manifest["dataset_sha256"] if data.is_dir() else _sha256(data)
    optim = dataclasses.asdict(recipe.optim)
    del optim["max_skipped"]
    return {
        **base_identity(config, tokenizer),
        "model.dtype": recipe.model.dtype,
        "data.path (its content)": prepared[:16],
        "data.seq_len": recipe.data.seq_len,
        **{f"optim.{key}": value for key, value in optim.items()},
        "train.steps": steps,
        "train.step_tokens": recipe.train.step_tokens,
        "train.seed": recipe.train.seed,
    }


def base_identity(config: HybridConfig, tokenizer: Path | None) -> dict[str, str]:
    """The part of `identity` that is the base's; None: without its tokenizer."""
    text = json.dumps(config.to_dict(), sort_keys=True)
    found = {"model.path (its config.json)": hashlib.sha256(text.encode()).hexdigest()[:16]}
    if tokenizer is not None:
        found["model.path (its tokenizer)"] = _sha256(tokenizer)[:16]
    return found


def check_identity(
    state: Path, manifest: dict[str, Any], identity: dict[str, Any], recipe: Recipe
) -> list[str]:
    """Compares what a state was made with and what is asked for.

    Returns:
        Lines about what differs and was allowed.

    Raises:
        UserError: something that matters differs, unless run.resume_anyway.
    """
    saved = manifest["identity"]
    changed = [
        f"{key} was {saved.get(key)}, is {identity.get(key)}"
        for key in sorted(saved.keys() | identity.keys())
        if saved.get(key) != identity.get(key)
    ]
    if not changed:
        return []
    if not recipe.run.resume_anyway:
        raise UserError(
            f"{state}: was made with another recipe: {'; '.join(changed)}; "
            "choose another run.dir, or --run.resume-anyway true"
        )
    return [f"run.resume_anyway: {line}" for line in changed]


def saver(job: Job, base: Path, identity: dict[str, Any], group: Group) -> Saver:
    """What saves the states of a run, as its recipe says."""
    run = job.recipe.run
    about = {
        "identity": identity,
        "recipe": job.recipe.to_toml(),
        "recipe_sha256": job.recipe.sha256,
        "base": str(base),
        "world_size": job.plan.world_size,
        "machine": machine_stamp(job.plan.device),
    }
    return Saver(
        Path(run.dir) / files.FOLDER,
        lambda: parts_of(job.lm, job.optimizer),
        group,
        about=about,
        keep_last=run.keep_last,
        keep_every=run.keep_every,
        in_background=run.save_in_background,
        say=job.log.event,
    )


def fill(job: Job, base: Checkpoint, start: Start, group: Group) -> bool:
    """Reads the base's weights, or all of a saved state; False where a signal has come to any rank meanwhile."""
    if stop_asked(job):
        return False
    job.doing = "loading"
    if start.state is None:
        if job.recipe.model.check_hashes:
            _check_hashes(job, base, group)
        report = job.log.progress("loading")
        try:
            load_weights(job.lm, base, progress=_until(job.stop, report))
        except LeaveLoading:
            job.doing = "leaving"  # the others hear of it now
        return not stop_asked(job)
    parts = parts_of(job.lm, job.optimizer)
    load(start.state, parts, group)
    progress = dict(start.manifest["progress"])
    job.optimizer.count.fill_(progress.pop("count"))
    job.outcome = Outcome(**progress)
    if job.saver is not None:
        job.saver.last_step = start.step
    job.log.event(
        "resume",
        f"resumed from {start.state} after step {start.step}, saved by {start.manifest['world_size']} ranks",
        state=str(start.state),
        step=start.step,
    )
    return not stop_asked(job)


def _check_hashes(job: Job, base: Checkpoint, group: Group) -> None:
    """The base's files against the hashes that lie beside them, shared by the ranks; collective."""
    known, problem = {}, None
    try:
        known = hf_hashes.stated(base)
        report = _until(job.stop, job.log.progress("checking hashes"))
        problem = hf_hashes.fault(known, group.rank, group.size, report)
    except LeaveLoading:
        job.doing = "leaving"  # loading ends at once as well
    except UserError as error:
        problem = str(error)
    if (problem := group.first_fault(problem)) is not None:
        raise UserError(problem)
    if known:
        sources = ", ".join(sorted({str(one.by) for one in known.values()}))
        job.log.event(
            "hashes", f"checked the sha256 of {len(known)} files of the base by {sources}"
        )


def _until(stop: StopFlag, report: Callable[[int, int], None]) -> Callable[[int, int], None]:
    """A progress callback that ends the work at a signal."""

    def progress(done: int, total: int) -> None:
        if stop:
            raise LeaveLoading
        report(done, total)

    return progress


def _prepare(
    folder: Path, recipe: Recipe, manifest: dict[str, Any], *, replace: bool
) -> dict[str, Any] | None:
    """Makes the run folder as it was when the state was saved: the recipe, and metrics up to the step.

    Returns:
        The last of the metrics.
    """
    if replace:
        shutil.rmtree(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"run.dir = {folder}: cannot be made ({error.strerror})") from None
    if recipe.run.export and not (folder / EVIDENCE).exists():
        # Of a run that was killed between its export and its evidence.
        shutil.rmtree(folder / recipe.run.export, ignore_errors=True)
    (folder / "recipe.toml").write_text(recipe.to_toml(), encoding="utf-8")
    return truncate_metrics(folder / "metrics.jsonl", manifest.get("step", 0))


def truncate_metrics(path: Path, step: int) -> dict[str, Any] | None:
    """Cuts a file of metrics after the line of a step, or before what a kill left of a line.

    Returns:
        The last line that is left.
    """
    if not path.exists():
        return None
    last, end = None, 0
    with path.open("rb+") as file:
        for line in file:
            metrics = _whole_line(line)
            if metrics is None or metrics["step"] > step:
                break
            last, end = metrics, end + len(line)
        file.truncate(end)
        file.flush()
        os.fsync(file.fileno())
    return last


def _whole_line(line: bytes) -> dict[str, Any] | None:
    """The metrics of a line; None for what is left of a line that was being written."""
    try:
        return json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None


def saved_rounding(recipe: Recipe) -> str | None:
    """What `optim.rounding = auto` has come to in the state that this run may continue; None where there is none."""
    run = recipe.run
    if run.resume == "never" or (run.replace and run.resume == "auto"):
        return None
    own = [] if run.replace else files.states(Path(run.dir) / files.FOLDER)
    for state in own or ([] if run.resume == "auto" else [Path(run.resume)]):
        if (state / files.MANIFEST).is_file():
            try:
                return files.read_manifest(state)["identity"].get("optim.rounding")
            except UserError:
                continue  # a damaged one: `begin` says so
    return None


def _on_rank_zero(group: Group, work: Any) -> Any:
    """Runs `work` on one rank and gives its result, or its UserError, to all."""
    result, problem = None, None
    if group.rank == 0:
        try:
            result = work()
        except UserError as error:
            problem = str(error)
    problem, result = group.gather((problem, result))[0]
    if problem is not None:
        raise UserError(problem)
    return result


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
