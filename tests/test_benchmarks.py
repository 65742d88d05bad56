"""The benchmarks of the kernels run on any machine, and their harness measures what it says."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import harness

REPO = Path(__file__).resolve().parent.parent
BENCHMARKS = ("expert_mlp", "cross_entropy", "adamw", "norms", "mamba", "routing")


@pytest.mark.parametrize("name", BENCHMARKS)
def test_it_runs_on_a_cpu(name: str, tmp_path: Path) -> None:
    """A table with names and milliseconds, what could not be measured, and the figures as the last line."""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    options = ["--device", "cpu", "--rounds", "1", "--tiny", "--json", str(tmp_path / "found.json")]
    done = subprocess.run(
        [sys.executable, f"benchmarks/{name}.py", *options],
        cwd=REPO,
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    figures = json.loads(lines[-1])
    assert figures == json.loads((tmp_path / "found.json").read_text())
    assert figures["benchmark"] == name
    assert {"date", "device", "torch"} <= set(figures["stamp"])
    headers = [line.split() for line in lines if " ms" in line]
    assert headers, "no table with milliseconds"
    assert {"GB/s", "TFLOP/s"} & set(headers[0]), headers[0]
    assert any("forward" in line or "step" in line for line in lines), "no passes"
    assert any("not measured" in line or "missing" in line for line in lines), "no word of peers"


def test_parts_are_timed_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every candidate runs once untimed and once a round, in an order that turns around; the clock ticks when read."""
    clock = itertools.count()
    monkeypatch.setattr(harness, "_now", lambda: float(next(clock)))
    calls: list[str] = []

    def candidate(name: str):
        def run(lap: harness.Lap) -> None:
            calls.append(name)
            lap("forward")
            next(clock)
            lap("backward")

        return run

    work = {"forward": harness.Work(), "backward": harness.Work(flop=1000, bytes=4000)}
    found = harness.measure_kernels({n: candidate(n) for n in "ab"}, work, 3, "cpu")
    assert calls == [*"ab", *"ba", *"ab", *"ba"]
    assert list(found) == ["a", "b"]
    assert list(found["a"]) == ["forward", "backward", "both"]
    assert found["a"]["backward"] == {
        "ms": 2000,
        "lowest_ms": 2000,
        "highest_ms": 2000,
        "tflop_per_s": 500 / 1e12,
        "gb_per_s": 2000 / 1e9,
        "share_of_floor": None,
        "extra_bytes": None,
    }
    assert found["a"]["forward"]["ms"] == 1000
    assert found["b"]["both"]["ms"] == 3000


def test_a_floor_is_the_slower_of_products_and_memory() -> None:
    flop, rate = harness.ROOFLINE["flop_per_s"], harness.ROOFLINE["bytes_per_s"]
    assert harness.Work(flop=flop, bytes=rate / 2).floor == 1
    assert harness.Work(flop=flop / 4, bytes=2 * rate).floor == 2
    # One pass after another: neither hides behind the other.
    passes = [harness.Work(flop=flop), harness.Work(bytes=rate)]
    assert harness._figures([4.0], passes, "cuda", 8)["share_of_floor"] == 0.5


def test_passes_are_forward_and_backward() -> None:
    x = torch.ones(3, requires_grad=True)
    seen: list[str] = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            seen.append("computes")
            return x * 2

        @staticmethod
        def backward(ctx, dy: Tensor) -> Tensor:
            seen.append("differentiates")
            return dy * 2

    run = harness.passes(lambda: Probe.apply(x), [x], torch.ones(3))
    run(seen.append)
    assert seen == ["computes", "forward", "differentiates", "backward"]
    assert x.grad is None


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    one = {"ms": 1.5, "lowest_ms": 1.25, "highest_ms": 2.0, "tflop_per_s": 10.0, "gb_per_s": 20.0}
    figures = {
        "ours": {"forward": one | {"share_of_floor": 0.5, "extra_bytes": 3_000_000}},
        "a peer": {"forward": one | {"share_of_floor": None, "extra_bytes": None}},
    }
    harness.show_kernels("a title", figures, {"another": "not installed"})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "a title"
    assert lines[1].split()[:2] == ["pass", "ms"]
    assert lines[2].split() == [
        "ours",
        "forward",
        "1.500",
        "1.250",
        "2.000",
        "10.00",
        "20.0",
        "50%",
        "3.0",
    ]
    assert lines[3].split()[-2:] == ["-", "-"]
    assert lines[4] == "not measured: another: not installed"


def test_peers_are_found_or_named() -> None:
    found, missing = harness.find_peers({"a": "no_such_package"}, "cuda")
    assert not found
    assert missing["a"].startswith("not installed")
    assert harness.find_peers({"a": "json"}, "cuda") == ({"a": json}, {})
    assert harness.find_peers({"a": "json"}, "cpu") == ({}, {"a": "needs a GPU"})


@pytest.mark.gpu
def test_a_gpu_is_timed_without_its_host() -> None:
    """The time and memory of a copy, whatever the host does before it."""
    source = torch.zeros(1 << 28, dtype=torch.int8, device="cuda")

    def copy(lap: harness.Lap) -> None:
        for _ in range(20):
            source[:1].add_(0)  # small work that only the host's queueing makes slow
        source.clone()
        lap("copy")

    one = harness.measure_kernels({"": copy}, {"copy": harness.Work(bytes=2**29)}, 5, "cuda")
    assert one[""]["copy"]["extra_bytes"] == 1 << 28
    assert 0.2 < one[""]["copy"]["share_of_floor"] < 2
