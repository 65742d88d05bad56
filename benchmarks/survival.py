"""Does a run lose anything when it is killed? Random SIGKILLs and SIGTERMs, each resumed and compared to the bit.

A small model (engine/demo.py) is trained on 2 ranks under torchrun, once in one go. Then, `--kills` times, torchrun
and its workers get SIGKILL at a random moment (after a random step, and up to two steps later: in loading, steps,
saves, evaluation, export), and the run is started again; every fifth time on one rank. And, `--terms` times, one
worker gets SIGTERM: torchrun must return 0. What must equal the unbroken run on the same number of ranks: metrics of
every step but the measured times, every tensor of the last saved state, every byte of the export. On another number:
the loss to 1e-3.

The table also says how long training waited for a save, beside the length of a step.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from harness import finish, show, stamp

from hymoe.engine import recipe as recipes
from hymoe.engine.checkpoint import Saved
from hymoe.engine.checkpoint_files import FOLDER, states
from hymoe.engine.demo import write_demo

REPO = Path(__file__).resolve().parent.parent
MEASURED = {"step_seconds", "tokens_per_second", "peak_memory_bytes"}
BEGUN = "model   "  # first line of a run that has read its recipe
ROWS = 600  # of the training file: reading more at each start would only take time
HUNG_S = 300


@dataclass
class Ran:
    """One launch: torchrun's status and its output."""

    status: int
    out: str


def main() -> int:
    """Returns 1 where anything was lost."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=30, help="runs that get SIGKILL")
    parser.add_argument("--terms", type=int, default=10, help="runs of which a worker gets SIGTERM")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(Path(folder), arguments)
    finish(stamp() | figures, arguments.json)
    return 0 if figures["lost"] == 0 else 1


def measure(root: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """All launches, one after another."""
    recipe = prepare(root, arguments.steps)
    unbroken = root / "unbroken"
    whole = launch(recipe, unbroken, arguments.ranks)
    if whole.status:
        raise SystemExit(f"the unbroken run failed:\n{whole.out}")
    step_seconds = statistics.median(m["step_seconds"] for m in read_metrics(unbroken))
    rng, rows, lost = random.Random(arguments.seed), [], 0
    for i in range(arguments.kills + arguments.terms):
        is_kill, run = i < arguments.kills, root / f"run_{i}"
        moment = rng.randint(0, arguments.steps), rng.uniform(0, 2 * step_seconds)
        first = launch(recipe, run, arguments.ranks, moment, kills=is_kill)
        ranks = 1 if is_kill and i % 5 == 4 else arguments.ranks
        at = len(read_metrics(run))
        second = launch(recipe, run, ranks)
        fault = compare(run, unbroken, to_the_bit=ranks == arguments.ranks)
        if second.status:
            fault = f"resume: status {second.status}"
        if not is_kill and first.status:
            fault = f"torchrun returned {first.status} after SIGTERM"
        lost += fault is not None
        what = "SIGKILL" if is_kill else "SIGTERM"
        said = resumed_from(second.out)
        rows.append(
            [
                str(i + 1),
                what,
                f"{moment[0]} + {moment[1]:.2f} s",
                str(at),
                said,
                str(ranks),
                fault or "same",
            ]
        )
        print(f"{rows[-1]}{'' if fault is None else first.out + second.out}", flush=True)
    show(["run", "signal", "after step", "steps done", "resumed", "on ranks", "result"], rows)
    return {"launches": rows, "lost": lost, "recipe": recipe.read_text(), **waits(unbroken)}


def prepare(root: Path, steps: int) -> Path:
    """The demo, with few rows, few steps and frequent saves."""
    demo = root / "demo"
    demo.mkdir()
    write_demo(demo, demo)
    lines = (demo / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (demo / "train.jsonl").write_text("".join(lines[:ROWS]), encoding="utf-8")
    recipe = recipes.load(demo / "recipe.toml")
    recipe = replace(
        recipe,
        model=replace(recipe.model, dtype="bfloat16"),
        data=replace(recipe.data, micro_tokens=256),
        train=replace(recipe.train, steps=steps, step_tokens=1024, eval_every=5),
        run=replace(recipe.run, dir="", replace=False, save_every=2, keep_last=2, log_every=1),
    )
    path = root / "recipe.toml"
    path.write_text(recipe.to_toml(), encoding="utf-8")
    return path


def launch(
    recipe: Path,
    run: Path,
    ranks: int,
    moment: tuple[int, float] | None = None,
    kills: bool = True,
) -> Ran:
    """One start of the run; with a moment, a signal so many seconds after its line of a step (0: its first)."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    script = [str(REPO / "scripts" / "train.py"), str(recipe), "--run.dir", str(run)]
    process = subprocess.Popen(
        [sys.executable, *command, *script],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines: list[str] = []
    watchdog = threading.Timer(HUNG_S, kill, (process.pid,))
    watchdog.start()
    timer = None
    for line in process.stdout:
        lines.append(line)
        if moment is not None and timer is None and reaches(line, moment[0]):
            timer = threading.Timer(moment[1], kill if kills else terminate_one, (process.pid,))
            timer.start()
    status = process.wait()
    for waiting in (watchdog, timer):
        if waiting is not None:
            waiting.cancel()
    return Ran(status, "".join(lines))


def reaches(line: str, step: int) -> bool:
    """Whether a line of output is the one of a step."""
    words = line.split()
    is_step = len(words) > 1 and words[0] == "step"
    return line.startswith(BEGUN) if not step else is_step and words[1].startswith(f"{step}/")


def workers(launcher: int) -> list[int]:
    """Process ids of torchrun's children, none where it has gone."""
    found = Path(f"/proc/{launcher}/task").glob("*/children")
    return [int(pid) for file in found for pid in file.read_text().split()]


def kill(launcher: int) -> None:
    """SIGKILL to torchrun and its workers: what a machine that stops does."""
    for pid in [launcher, *workers(launcher)]:
        _send(pid, signal.SIGKILL)


def terminate_one(launcher: int) -> None:
    """SIGTERM to one worker."""
    for pid in workers(launcher)[-1:]:
        _send(pid, signal.SIGTERM)


def _send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        print(f"process {pid} had ended before its {number.name}")


def compare(run: Path, unbroken: Path, *, to_the_bit: bool) -> str | None:
    """What differs from the unbroken run; None where nothing does."""
    ours, theirs = read_metrics(run), read_metrics(unbroken)
    if [m["step"] for m in ours] != [m["step"] for m in theirs]:
        return f"steps {[m['step'] for m in ours]}"
    if not to_the_bit:
        worst = max(abs(a["loss"] / b["loss"] - 1) for a, b in zip(ours, theirs, strict=True))
        return None if worst < 1e-3 else f"loss differs by {worst:.1e}"
    for a, b in zip(ours, theirs, strict=True):
        differ = [key for key in b if key not in MEASURED and a.get(key) != b[key]]
        if differ:
            return f"step {a['step']}: {differ[0]} is {a.get(differ[0])}, not {b[differ[0]]}"
    one, other = (Saved(states(folder / FOLDER)[0]) for folder in (run, unbroken))
    for name in other.tensors:
        if not torch.equal(one.read(name), other.read(name)):
            return f"{name} differs"
    for file in (unbroken / "final").iterdir():
        if (run / "final" / file.name).read_bytes() != file.read_bytes():
            return f"final/{file.name} differs"
    return None


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Whole lines of metrics.jsonl; none where there is no such file yet."""
    file = run / "metrics.jsonl"
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def resumed_from(out: str) -> str:
    """Where a launch says that it has begun."""
    for line in out.splitlines():
        if line.startswith("resumed from"):
            return f"step {line.split('after step ')[1].split(',')[0]}"
        if line.startswith("finished after"):
            return "finished"
    return "start"


def waits(run: Path) -> dict[str, float]:
    """Seconds that training waited for a save, beside the seconds of a step."""
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    waited = [event["waited_seconds"] for event in events if event["event"] == "save"]
    took = [event["seconds"] for event in events if event["event"] == "save"]
    steps = [m["step_seconds"] for m in read_metrics(run)]
    figures = {
        "step_seconds_median": statistics.median(steps),
        "save_seconds_median": statistics.median(took),
        "save_waited_seconds_median": statistics.median(waited),
        "save_waited_seconds_max": max(waited),
    }
    show(["seconds", "value"], [[name, f"{value:.3f}"] for name, value in figures.items()])
    return figures


if __name__ == "__main__":
    sys.exit(main())
