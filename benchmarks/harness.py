"""What every benchmark shares: interleaved timing, the stamp of the machine, one table, one JSON object as last line.

Candidates take turns, in an order that reverses from round to round, so that a neighbour on the machine or a clock
that sinks hits all of them alike. The figure is a ratio of medians; its spread is that of the rounds' own ratios.
"""

import argparse
import datetime
import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

Lap = Callable[[str], None]  # a candidate calls it at the end of each of its parts, by name


@dataclass(frozen=True)
class Timing:
    """Seconds of one candidate.

    Attributes:
        rounds: of the whole candidate, one entry a round.
        parts: name of a part -> seconds, one entry a round.
    """

    rounds: list[float] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=dict)

    @property
    def median(self) -> float:
        """Seconds of the middle round."""
        return statistics.median(self.rounds)

    def part_medians(self) -> dict[str, float]:
        """Part -> seconds of its middle round."""
        return {name: statistics.median(seconds) for name, seconds in self.parts.items()}


def interleave(
    candidates: dict[str, Callable[[Lap], None]], rounds: int, warmup: int = 1
) -> dict[str, Timing]:
    """Times the candidates in turns.

    Args:
        candidates: name -> function; it may call the `lap` it is given at the end of each part.
        rounds: timed calls of each.
        warmup: calls of each before, not timed.
    """
    timings = {name: Timing() for name in candidates}
    gc.collect()
    gc.disable()  # a collection would be charged to whoever runs at that moment
    try:
        for number in range(-warmup, rounds):
            order = list(candidates) if number % 2 else list(candidates)[::-1]
            for name in order:
                start, parts = _run(candidates[name])
                if number < 0:
                    continue
                timings[name].rounds.append(parts[-1][1] - start)
                for part, end in parts[:-1]:
                    timings[name].parts.setdefault(part, []).append(end - start)
                    start = end
            gc.collect()
    finally:
        gc.enable()
    return timings


def _run(candidate: Callable[[Lap], None]) -> tuple[float, list[tuple[str, float]]]:
    parts: list[tuple[str, float]] = []
    start = _now()
    candidate(lambda name: parts.append((name, _now())))
    return start, [*parts, ("whole", _now())]


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def ratio(slow: Timing, fast: Timing) -> dict[str, float]:
    """How many times faster: of the medians, and the lowest and highest of the rounds' own ratios."""
    each = sorted(a / b for a, b in zip(slow.rounds, fast.rounds, strict=True))
    return {"ratio": slow.median / fast.median, "lowest": each[0], "highest": each[-1]}


def stamp() -> dict[str, Any]:
    """Where and when: device, threads, how busy the machine is, versions, date."""
    versions = {}
    for package in ("torch", "transformers", "triton", "numpy"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else _cpu_name(),
        "cores": len(_cores()),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1),  # of the last minute, the benchmark itself included
        "python": platform.python_version(),
        **versions,
    }


def _cores() -> list[str]:
    text = Path("/proc/cpuinfo").read_text()
    return [line for line in text.splitlines() if line.startswith("processor")]


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def parser(description: str, rounds: int) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    options = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    options.add_argument("--json", type=Path, help="file that gets the figures")
    options.add_argument(
        "--rounds", type=int, default=rounds, help="timed rounds of each candidate"
    )
    options.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch")
    return options


def show(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table, numbers to the right."""
    widths = [max(len(row[i]) for row in (headers, *rows)) for i in range(len(headers))]
    for row in (headers, *rows):
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        print("  ".join(cells).rstrip())


def finish(figures: dict[str, Any], file: Path | None) -> None:
    """Prints the figures as the last line, one JSON object, and writes them where asked."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures))
