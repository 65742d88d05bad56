"""What every benchmark shares: interleaved timing, the stamp of the machine, one table, one JSON object as last line.

Candidates take turns, in an order that reverses from round to round, so that a neighbour on the machine or a clock
that sinks hits all of them alike. The figure is a ratio of medians; its spread is that of the rounds' own ratios.
"""

import argparse
import datetime
import gc
import importlib
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Lap = Callable[[str], None]  # a candidate calls it at the end of each of its parts, by name
# What a floor is counted with on a GPU: what an H200 was seen to reach in bfloat16 products and in copies.
ROOFLINE = {"device": "H200", "flop_per_s": 790e12, "bytes_per_s": 4.3e12}
COLD_BYTES = 1 << 28  # written before each timed call on a GPU: more than any L2 cache holds
HEAD_START = 10_000_000  # cycles that the GPU idles while the host queues a timed call: it is the GPU that is timed


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


def kernel_parser(description: str, rounds: int) -> argparse.ArgumentParser:
    """The options of a benchmark that times operations: those of `parser`, the device, and sizes for a test."""
    options = parser(description, rounds)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    options.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default=default,
        help="cpu: smaller shapes, torch versions only",
    )
    options.add_argument(
        "--tiny", action="store_true", help="sizes of a test: seconds, and no figure worth reading"
    )
    return options


@dataclass(frozen=True)
class Work:
    """What no implementation of a pass can do without.

    Attributes:
        flop: floating-point operations.
        bytes: read once and written once.
    """

    flop: float = 0.0
    bytes: float = 0.0

    @property
    def floor(self) -> float:
        """Seconds on the roofline's GPU."""
        return max(self.flop / ROOFLINE["flop_per_s"], self.bytes / ROOFLINE["bytes_per_s"])


def passes(
    forward: Callable[[], Tensor], leaves: Sequence[Tensor], upstream: Tensor | None = None
) -> Callable[[Lap], None]:
    """A candidate of two parts, `forward` and `backward`.

    Args:
        forward: computes the output from the leaves, as autograd sees it.
        leaves: get gradients, which are thrown away.
        upstream: gradient of the output; None for a loss.
    """

    def run(lap: Lap) -> None:
        y = forward()
        lap("forward")
        torch.autograd.grad(y, leaves, upstream)
        lap("backward")

    return run


def measure_kernels(
    candidates: Mapping[str, Callable[[Lap], None]],
    work: Mapping[str, Work],
    rounds: int,
    device: str,
) -> dict[str, dict[str, dict[str, float | None]]]:
    """Times operations in turns and sets them against their floor.

    On a GPU a call starts with cold caches, and its kernels are queued before they run, so that events see the GPU's
    time and not the host's. Memory is what a call allocates at its peak, outputs and gradients included.

    Args:
        candidates: name -> function, which calls the `lap` it is given at the end of each part.
        work: part -> what it cannot do without; of more than one part, `both` is made here.
        rounds: timed calls of each, after one that is not.
        device: cuda or cpu; a CPU has no floor here, and its memory is not measured.

    Returns:
        candidate -> part -> ms, lowest_ms, highest_ms, tflop_per_s, gb_per_s, share_of_floor, extra_bytes.
    """
    extra = {name: _extra_bytes(candidate, device) for name, candidate in candidates.items()}
    seconds: dict[str, list[dict[str, float]]] = {name: [] for name in candidates}
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds):
            for name in list(candidates) if number % 2 else list(candidates)[::-1]:
                seconds[name].append(_part_seconds(candidates[name], device))
    finally:
        gc.enable()
    parts = {part: [part] for part in work} | ({"both": list(work)} if len(work) > 1 else {})
    return {
        name: {
            part: _figures(
                [sum(one[p] for p in of) for one in found],
                [work[p] for p in of],
                device,
                extra[name].get(part),
            )
            for part, of in parts.items()
        }
        for name, found in seconds.items()
    }


def _part_seconds(candidate: Callable[[Lap], None], device: str) -> dict[str, float]:
    """Seconds of each part of one call."""
    if device != "cuda":
        start, parts = _run(candidate)
        ends = [start, *(end for _, end in parts)]
        return {part: end - begin for (part, end), begin in zip(parts[:-1], ends[:-2], strict=True)}
    torch.empty(COLD_BYTES, dtype=torch.int8, device=device).zero_()
    torch.cuda._sleep(HEAD_START)
    marks = [("start", torch.cuda.Event(enable_timing=True))]
    marks[0][1].record()

    def lap(part: str) -> None:
        marks.append((part, torch.cuda.Event(enable_timing=True)))
        marks[-1][1].record()

    candidate(lap)
    torch.cuda.synchronize()
    pairs = zip(marks[:-1], marks[1:], strict=True)
    return {part: begin.elapsed_time(end) / 1000 for (_, begin), (part, end) in pairs}


def _extra_bytes(candidate: Callable[[Lap], None], device: str) -> dict[str, int]:
    """Part -> bytes allocated at its peak above those before the call; empty where that is not known."""
    if device != "cuda":
        candidate(lambda part: None)
        return {}
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    peaks: dict[str, int] = {}

    def lap(part: str) -> None:
        peaks[part] = torch.cuda.max_memory_allocated() - before
        torch.cuda.reset_peak_memory_stats()

    torch.cuda.reset_peak_memory_stats()
    candidate(lap)
    return peaks | {"both": max(peaks.values())}


def _figures(
    seconds: list[float], needs: Sequence[Work], device: str, extra_bytes: int | None
) -> dict[str, float | None]:
    """Of passes one after another: their floors add up, none hides behind another."""
    middle = statistics.median(seconds)
    floor = sum(need.floor for need in needs)
    return {
        "ms": 1e3 * middle,
        "lowest_ms": 1e3 * min(seconds),
        "highest_ms": 1e3 * max(seconds),
        "tflop_per_s": sum(need.flop for need in needs) / middle / 1e12,
        "gb_per_s": sum(need.bytes for need in needs) / middle / 1e9,
        "share_of_floor": floor / middle if device == "cuda" else None,
        "extra_bytes": extra_bytes,
    }


def show_kernels(
    title: str,
    figures: Mapping[str, Mapping[str, Mapping[str, float | None]]],
    missing: Mapping[str, str],
) -> None:
    """Prints what `measure_kernels` found, and which peers are not in it and why."""
    number = lambda value, form: "-" if value is None else format(value, form)  # noqa: E731
    headers = ["", "pass", "ms", "lowest", "highest", "TFLOP/s", "GB/s", "of floor", "extra MB"]
    rows = []
    for name, parts in figures.items():
        for part, one in parts.items():
            extra = None if one["extra_bytes"] is None else one["extra_bytes"] / 1e6
            rows.append([name, part, number(one["ms"], ".3f")])
            rows[-1] += [number(one[key], ".3f") for key in ("lowest_ms", "highest_ms")]
            rows[-1] += [number(one["tflop_per_s"], ".2f"), number(one["gb_per_s"], ".1f")]
            rows[-1] += [number(one["share_of_floor"], ".0%"), number(extra, ".1f")]
    print(title)
    show(headers, rows)
    for name, reason in missing.items():
        print(f"not measured: {name}: {reason}")


def roofline_line(device: str) -> str:
    """What the shares of the floor in a table mean, in one line."""
    if device != "cuda":
        return "a CPU run: nothing here says anything of a GPU; no floor, memory not measured"
    flop, rate = ROOFLINE["flop_per_s"] / 1e12, ROOFLINE["bytes_per_s"] / 1e12
    return (
        f"floor: {ROOFLINE['device']}, {flop:.0f} TFLOP/s bfloat16, {rate:.1f} TB/s; "
        "extra memory includes outputs and gradients"
    )


def find_peers(modules: Mapping[str, str], device: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Imports the peers that can run here.

    Args:
        modules: name -> module to import; all of them need a GPU.
        device: cuda or cpu.

    Returns:
        The modules by name, and for each peer that is left out the reason.
    """
    found, missing = {}, {}
    for name, module in modules.items():
        if device != "cuda":
            missing[name] = "needs a GPU"
            continue
        try:
            found[name] = importlib.import_module(module)
        except ImportError as reason:
            missing[name] = f"not installed ({reason})"
    return found, missing


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
