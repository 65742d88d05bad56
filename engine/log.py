"""What a run says: one JSON object a step, events as JSON lines, one line a step for a person.

Only rank 0 writes. On a terminal the lines run above a progress bar; in a log they are plain.
"""

import json
import math
import platform
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

PROGRESS_SECONDS = 5.0


class RunLog:
    """metrics.jsonl, events.jsonl and the screen of one run; silent on every rank but 0."""

    def __init__(self, folder: Path | None, total_steps: int, every: int, rank: int) -> None:
        """Opens the files to append; `folder` None (or another rank than 0) writes nothing."""
        self._quiet = rank != 0
        self._every = every
        self._total = total_steps
        self._metrics = self._open(folder, "metrics.jsonl")
        self._events = self._open(folder, "events.jsonl")
        self._console = Console(file=sys.stdout, soft_wrap=True, highlight=False, quiet=self._quiet)
        self._bar: Progress | None = None

    def _open(self, folder: Path | None, name: str) -> IO[str] | None:
        return (
            None if folder is None or self._quiet else (folder / name).open("a", encoding="utf-8")
        )

    def event(self, kind: str, message: str | None = None, **values: Any) -> None:
        """An event for the file, and its message, if it has one, for the screen."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        _write(self._events, {"event": kind, "time": now, "message": message, **values})
        if message is not None:
            self.say(message)

    def say(self, message: str) -> None:
        """A line for the screen only."""
        self._console.print(message, markup=False)

    def progress(self, what: str) -> Callable[[int, int], None]:
        """A callback of (done, total) bytes for long work: a line every PROGRESS_SECONDS, none for short work."""
        return byte_progress(f"{what}  rank 0", self.say)

    def start_steps(self) -> None:
        """Shows the progress bar where there is a terminal."""
        if self._console.is_terminal and not self._quiet:
            columns = (
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
            )
            self._bar = Progress(*columns, console=self._console)
            self._task = self._bar.add_task("train", total=self._total, note="")
            self._bar.start()

    def step(self, metrics: dict[str, Any]) -> None:
        """One step: every key to metrics.jsonl, the ones that a person follows to the screen."""
        _write(self._metrics, metrics)
        number = metrics["step"]
        if (
            number % self._every == 0
            or number in (1, self._total)
            or metrics.get("eval_loss") is not None
        ):
            self.say(step_line(metrics, self._total))
        if self._bar is not None:
            self._bar.update(self._task, completed=number, note=f"loss {metrics['loss']:.4f}")

    def close(self) -> None:
        """Ends the bar and closes the files."""
        if self._bar is not None:
            self._bar.stop()
        for file in (self._metrics, self._events):
            if file is not None:
                file.close()


def step_line(metrics: dict[str, Any], total_steps: int) -> str:
    """The aligned console line of one step."""
    width = len(str(total_steps))
    parts = [
        f"step {metrics['step']:>{width}}/{total_steps}",
        f"loss {metrics['loss']:8.4f}",
        f"lr {metrics['lr']:.2e}",
        f"norm {metrics['grad_norm']:8.3f}",
        f"{metrics['tokens_per_second']:>9,.0f} tok/s",
        f"{metrics['step_seconds']:6.2f} s",
    ]
    if metrics.get("expert_load_max_over_mean") is not None:
        parts.append(f"load {metrics['expert_load_max_over_mean']:.2f}")
    if metrics.get("rank_load_max_over_mean") is not None:
        parts.append(f"ranks {metrics['rank_load_max_over_mean']:.2f}")
    if metrics.get("dead_experts"):
        parts.append(f"dead {metrics['dead_experts']}")
    if metrics.get("skipped"):
        parts.append("SKIPPED: gradient norm is not finite")
    if metrics.get("eval_loss") is not None:
        parts.append(f"eval loss {metrics['eval_loss']:.4f}")
    return "  ".join(parts)


def _write(file: IO[str] | None, values: dict[str, Any]) -> None:
    """One JSON line, flushed, so that a run that dies has said what it did. JSON knows no NaN: null."""
    if file is not None:
        clean = {
            k: None if isinstance(v, float) and not math.isfinite(v) else v
            for k, v in values.items()
        }
        file.write(json.dumps(clean) + "\n")
        file.flush()


def machine_stamp(device: torch.device) -> dict[str, Any]:
    """What a figure depends on beside the recipe: device, driver and versions."""
    stamp: dict[str, Any] = {
        "device": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        stamp |= {
            "device": properties.name,
            "memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
        }
    return stamp


class Stopwatch:
    """Seconds between the ends of steps."""

    def __init__(self) -> None:
        """Starts now."""
        self._last = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap or the start."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        return seconds


def byte_progress(what: str, say: Callable[[str], None]) -> Callable[[int, int], None]:
    """A callback of (done, total) bytes for long work: a line every PROGRESS_SECONDS, none for short work."""
    began = last = time.perf_counter()

    def report(done: int, total: int) -> None:
        nonlocal last
        now = time.perf_counter()
        if now - last >= PROGRESS_SECONDS:
            last = now
            rate = done / (now - began) / 1e9
            say(f"{what}: {done / 1e9:.1f} of {total / 1e9:.1f} GB, {rate:.2f} GB/s")

    return report
