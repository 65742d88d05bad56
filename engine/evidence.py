"""`evidence.json`: what a run did, written by the run itself, from what it left on disk and what it had in hand.

`Evidence` is made on rank 0 when a run starts: it notes what the data is and begins to hash the base's files in the
background (`provenance.py`). `write` is called at the end. Losses come from metrics.jsonl and failures from
events.jsonl, which resumes append to, so a run of many sessions has its whole history; one that started from a state
of another run folder gets the history of that one up to the state.

Facts that are not known are null or say why; nothing is estimated.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from hymoe.engine import resume
from hymoe.engine.data.rows import Described
from hymoe.engine.log import machine_stamp
from hymoe.engine.provenance import BackgroundHashes, described, revision_of, sha256_of
from hymoe.engine.resolve import Resolved
from hymoe.engine.train import Job, Outcome, peak_memory_bytes

CURVE_POINTS = 200  # of the loss curve at most; metrics.jsonl has every step
CURVE_KEYS = ("step", "loss", "lr", "grad_norm")
HASH_WAIT_S = 600.0  # for hashes that are not there at the end, then they stay null; the other ranks wait 1800 s
PACKAGES = ("triton", "numpy", "safetensors", "tokenizers", "mamba-ssm", "causal-conv1d", "hymoe")


class Evidence:
    """What a run that has started must remember to account for itself."""

    def __init__(
        self,
        resolved: Resolved,
        data: Described,
        held_out: Described | None,
        checked: Mapping[str, str],
    ) -> None:
        """Begins to hash the base.

        Args:
            resolved: the run.
            data: what is trained on.
            held_out: what eval_loss is measured on.
            checked: sha256 of those of the base's files that have been compared with it.
        """
        paths = resolved.recipe.data
        self._resolved = resolved
        self._data = _data(paths.path, data)
        self._held_out = None if held_out is None else _data(paths.eval, held_out)
        self._base = BackgroundHashes(resolved.checkpoint, checked)

    def write(
        self, job: Job, outcome: Outcome, exported: Path | None, update_kept: float | None
    ) -> None:
        """Writes `evidence.json` into the run folder, whole or not at all.

        Args:
            job: the run.
            outcome: what it did.
            exported: folder of the trained model, None where nothing was exported.
            update_kept: share of the update that reached its files.
        """
        folder = Path(job.recipe.run.dir)
        if not self._base.is_done:
            job.log.say("evidence waits for the hashes of the base's files")
        events, metrics, missing = history(folder)
        shards = [] if exported is None else [path.name for path in exported.glob("*.safetensors")]
        content: dict[str, Any] = {
            "recipe_sha256": self._resolved.recipe.sha256,
            "recipe": self._resolved.recipe.to_toml(),
            "base": str(self._resolved.checkpoint.folder),
            "base_revision": revision_of(self._resolved.checkpoint.folder),
            "base_files": self._base.result(HASH_WAIT_S),
            "dataset_sha256": self._data.get("dataset_sha256"),
            "data": self._data,
            "held_out_data": self._held_out,
            "started": next((e["time"] for e in events if e["event"] == "start"), None),
            "ended": datetime.now(UTC).isoformat(timespec="seconds"),
            "steps": outcome.steps,
            "applied_steps": outcome.applied,
            "tokens": outcome.tokens,
            "supervised_tokens": outcome.supervised_tokens,
            "training_seconds": outcome.seconds,
            "stopped_by": outcome.stopped_by,
            "eval_loss_before": outcome.first_eval_loss,
            "eval_loss_after": outcome.last_eval_loss,
            "update_kept_in_export": update_kept,
            "peak_memory_bytes_of_rank_0": peak_memory_bytes(job.plan.device),
            "world_size": job.plan.world_size,
            "machine": machine_stamp(job.plan.device),
            "versions": _versions(),
            "loss_curve": thinned(metrics),
            "eval_losses": _eval_losses(metrics, outcome),
            "failures": failures(events, metrics) | {"history_missing": missing},
            "export": None
            if exported is None
            else {"folder": exported.name, "weights": described(exported, shards)},
        }
        content = {key: None if _is_no_number(value) else value for key, value in content.items()}
        partial = folder / f".{resume.EVIDENCE}.partial"
        text = json.dumps(content, indent=2, allow_nan=False)
        partial.write_text(text + "\n", encoding="utf-8")
        os.replace(partial, folder / resume.EVIDENCE)


def _is_no_number(value: Any) -> bool:
    """Whether a value is a NaN or an infinity, which JSON does not know."""
    return isinstance(value, float) and not math.isfinite(value)


def _data(path: str, said: Described) -> dict[str, Any]:
    """A data set as its manifest describes it; a JSONL file by its counts and the hash of its bytes."""
    facts = {"path": path, **said.as_dict()}
    return facts if Path(path).is_dir() else {**facts, "file_sha256": sha256_of(Path(path))}


def _versions() -> dict[str, str | None]:
    """Versions of the packages that results depend on, None where one is not installed."""
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def history(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]], str | None]:
    """Events and metrics of a run and of the runs that it went on from, oldest first.

    Returns:
        Events, metrics, and what of an earlier run is not there any more.
    """
    events: list[dict[str, Any]] = []
    metrics: list[dict[str, Any]] = []
    seen: set[Path] = set()
    # What of a folder counts: up to the time and the step at which another one took up its state.
    until, last_step = None, math.inf
    while True:
        seen.add(folder.resolve())
        own = [e for e in _lines(folder / "events.jsonl") if until is None or e["time"] <= until]
        steps = [m for m in _lines(folder / "metrics.jsonl") if m["step"] <= last_step]
        events, metrics = own + events, steps + metrics
        resumes = [e for e in own if e["event"] == "resume" and "state" in e]
        # A folder that was copied or moved names states elsewhere, but its own steps are all there.
        first = steps[0]["step"] if steps else (resumes[0]["step"] + 1 if resumes else 1)
        if first == 1:
            return events, metrics, None
        taken_up = next((e for e in resumes if e["step"] == first - 1), None)
        folder = Path() if taken_up is None else Path(taken_up["state"]).parent.parent
        if taken_up is None or folder.resolve() in seen or not (folder / "events.jsonl").is_file():
            where = "an earlier run" if taken_up is None else folder
            return events, metrics, f"steps 1 to {first - 1}, of {where}"
        until, last_step = taken_up["time"], first - 1


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines; of a line that a kill cut off and a resume went on behind, the end.

    Nothing where the file is not there, and nothing of a line that has no whole object.
    """
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        start = max(line.rfind('{"event": '), 0)
        try:
            yield json.loads(line[start:])
        except ValueError:
            continue


def thinned(metrics: list[dict[str, Any]], most: int = CURVE_POINTS) -> list[dict[str, Any]]:
    """The loss curve at so many steps at most, evenly spread, the first and the last among them."""
    count = min(len(metrics), most)
    places = [round(i * (len(metrics) - 1) / max(1, count - 1)) for i in range(count)]
    return [{key: metrics[place][key] for key in CURVE_KEYS} for place in places]


def _eval_losses(metrics: list[dict[str, Any]], outcome: Outcome) -> list[dict[str, Any]]:
    first = outcome.first_eval_loss
    before = [] if first is None else [{"step": 0, "eval_loss": first}]
    measured = [m for m in metrics if m.get("eval_loss") is not None]
    return before + [{"step": m["step"], "eval_loss": m["eval_loss"]} for m in measured]


def failures(events: list[dict[str, Any]], metrics: list[dict[str, Any]]) -> dict[str, Any]:
    """What did not go as planned: skipped steps, sessions and how each ended, resumes, signals, warnings."""
    sessions = _sessions(events)
    ends = [session["ended"] for session in sessions]
    return {
        "skipped_steps": [m["step"] for m in metrics if m.get("skipped")],
        "sessions": sessions,
        "resumes": [
            {"time": s["started"], "after_step": s["resumed_after_step"]}
            for s in sessions
            if s["resumed_after_step"] is not None
        ],
        "signals": [end for end in ends if end["how"] == "signal"],
        "crashes": sum(end["how"] == "killed or crashed" for end in ends),
        "warnings": [e["message"] for e in events if e["event"] in ("warning", "skip")],
        # What `resume.begin` found: leftovers of a kill, states that are not whole, settings that differ.
        "notes": [e["message"] for e in events if e["event"] == "resume" and "step" not in e],
    }


def _sessions(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The starts of a run. One that was followed by another and said nothing at its end was killed or crashed."""
    sessions: list[dict[str, Any]] = []
    for event in events:
        kind, step = event["event"], event.get("step")
        if kind == "start":
            sessions.append(
                {
                    "started": event["time"],
                    "resumed_after_step": None,
                    "world_size": event.get("world_size"),
                    "device": (event.get("machine") or {}).get("device"),
                    "ended": {"how": "killed or crashed"},
                }
            )
        elif not sessions:
            continue
        elif kind == "resume" and step is not None:
            sessions[-1]["resumed_after_step"] = step
        elif kind == "stop":
            name = str(event.get("message")).partition(":")[0]
            ended = {"how": "signal", "signal": name, "step": step, "time": event["time"]}
            sessions[-1]["ended"] = ended
        elif kind == "not_finite":
            sessions[-1]["ended"] = {"how": "too many steps skipped", "step": step}
        elif kind == "export":
            sessions[-1]["ended"] = {"how": "finished"}
    if sessions and sessions[-1]["ended"]["how"] == "killed or crashed":
        sessions[-1]["ended"] = {"how": "finished"}  # it is the one that writes this
    return sessions
