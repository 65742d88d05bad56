"""A script of ours with the private memory of its stages measured: OUT [NAME=MODULE:FUNCTION ...] -- SCRIPT ARGUMENTS.

Each function is a stage; what it adds at its peak to what the process had before (RssAnon, sampled) goes to OUT.RANK.
`stop=STEP` ends a run by a signal in that step, as a preempted one ends.
"""

import functools
import importlib
import json
import os
import runpy
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

SAMPLE_SECONDS = 0.005


def private_bytes() -> int:
    """RssAnon of this process: mapped files and the page cache are no private memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return 1024 * int(line.split()[1])
    raise RuntimeError("/proc/self/status has no RssAnon")


def measured(stages: dict[str, Any], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with its peak of private memory noted."""

    @functools.wraps(function)
    def stage(*args: Any, **kwargs: Any) -> Any:
        before = peak = private_bytes()
        ended = threading.Event()

        def sample() -> None:
            nonlocal peak
            while not ended.wait(SAMPLE_SECONDS):
                peak = max(peak, private_bytes())

        thread = threading.Thread(target=sample)
        thread.start()
        try:
            return function(*args, **kwargs)
        finally:
            ended.set()
            thread.join()
            peak = max(peak, private_bytes())
            stages[name] = {"before": before, "added": peak - before}

    return stage


def stop_in_step(number: int) -> None:
    """A signal comes to rank 0 when it begins a step."""
    from hymoe.engine import train

    original = train.take_step

    def take_step(job: Any, step: int, *rest: Any, **more: Any) -> Any:
        if step == number and os.environ.get("RANK", "0") == "0":
            os.kill(os.getpid(), signal.SIGTERM)
        return original(job, step, *rest, **more)

    train.take_step = take_step


def note_shard(stages: dict[str, Any]) -> None:
    """The bytes of what this rank keeps: its rows of the model, and of all of its state."""
    from hymoe.engine import saver

    original = saver.write

    def write(folder: Path, step: int, parts: Any, *rest: Any) -> Any:
        sizes = {name: part.tensor.nbytes for name, part in parts.items()}
        stages["shard"] = sum(size for name, size in sizes.items() if name.startswith("model."))
        stages["state"] = sum(sizes.values())
        stages["largest"] = max(sizes.values())
        return original(folder, step, parts, *rest)

    saver.write = write


def main() -> None:
    out, *stage_names = sys.argv[1 : sys.argv.index("--")]
    script, *arguments = sys.argv[sys.argv.index("--") + 1 :]
    stages: dict[str, Any] = {}
    for stage in stage_names:
        name, _, place = stage.partition("=")
        if name == "stop":
            stop_in_step(int(place))
            continue
        module, _, function = place.partition(":")
        owner = importlib.import_module(module)
        setattr(owner, function, measured(stages, name, getattr(owner, function)))
    note_shard(stages)
    sys.argv = [script, *arguments]
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        stages["peak"] = private_bytes()
        Path(f"{out}.{os.environ.get('RANK', '0')}").write_text(json.dumps(stages))


if __name__ == "__main__":
    main()
