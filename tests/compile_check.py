"""The compiler's reports of a family of kernels, made in a process without Triton's interpreter."""

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from benchmarks.aot import ASYNC_COPIES, MATRIX_OPCODES, SLOW_PATHS, Report
from hymoe.kernels.launch import KNOWN_TARGETS

REPO = Path(__file__).resolve().parent.parent
ARCHS = tuple(KNOWN_TARGETS)


@functools.cache
def reports(family: str, arch: int) -> list[Report]:
    """Every kernel of the family on one chip, each with every tile that the table can choose."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "reports.json"
        command = [sys.executable, "benchmarks/compile_report.py", family, "--arch", str(arch)]
        done = subprocess.run(
            [*command, "--json", str(file)], cwd=REPO, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-4000:]
        found = json.loads(file.read_text())
    return [
        Report(**one | {name: Counter(one[name]) for name in ("opcodes", "main_loop")})
        for one in found
    ]


def assert_fits(report: Report) -> None:
    """No spills, and shared memory within the chip's limit."""
    assert report.stack_bytes == 0, f"{report.name} {report.constexprs}: stack {report.stack_bytes}"
    assert report.spills == 0, f"{report.name} {report.constexprs}: {report.spills} spills"
    limit = KNOWN_TARGETS[report.arch].shared_bytes
    assert report.shared_bytes <= limit, f"{report.name}: {report.shared_bytes} of {limit} bytes"


def assert_fast_product(report: Report) -> None:
    """In the loop: the matrix instructions that the chip is for and asynchronous copies; nowhere a slower path."""
    where = f"sm_{report.arch} {report.name} {report.constexprs}"
    assert report.main_loop[MATRIX_OPCODES[report.arch]] > 0, f"{where}: {report.opcodes}"
    slow = SLOW_PATHS.get(report.arch, ())
    assert not report.count(*slow), f"{where}: {slow} in {report.opcodes}"
    copies = sum(report.main_loop[one] for one in ASYNC_COPIES)
    assert copies > 0, f"{where}: no asynchronous copies in {report.main_loop}"
