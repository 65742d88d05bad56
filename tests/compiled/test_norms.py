"""What the compiler makes of the norms' and the squared ReLU's kernels on the real model's shapes."""

import re

import pytest

from benchmarks.aot import Report
from hymoe.kernels.norm import RESIDENT_WARPS
from tests.compile_check import ARCHS, assert_fits, reports

pytestmark = pytest.mark.slow
NORMS = {("norm._forward_kernel", g) for g in (False, True)} | {
    ("norm._backward_kernel", g) for g in (False, True)
}


@pytest.mark.parametrize("arch", ARCHS)
def test_norms(arch: int) -> None:
    found = [r for r in reports("norms", arch) if r.name.startswith("norm.")]
    assert {(r.name, r.constexprs["GATED"]) for r in found} == NORMS
    for report in found:
        assert_fits(report)
        gated = report.constexprs["GATED"]
        backward = report.name == "norm._backward_kernel"
        # x and its gate, the output, and backward dy and the gate's gradient: rows of 16-bit values, 16 bytes a thread.
        rows = 2 + gated + backward * (1 + gated)
        # The place of a row in 64 bits; the place in a row may be added to it in 32.
        assert index_types(report, "bf16").count("i64") == rows, report.ttir
        assert index_types(report, "f32").count("i64") == 1 + backward, report.ttir  # r, sums
        assert len(re.findall(r"(?:ld|st)\.global\S*\.v4\.b32|cp\.async\S* [^;]*0x10", report.ptx))
        if backward:
            assert report.blocks_per_sm * report.warps >= RESIDENT_WARPS[gated], "a second wave"
            assert report.count("LDGSTS") > 0, "the next row is not loaded ahead"


@pytest.mark.parametrize("arch", ARCHS)
def test_relu2(arch: int) -> None:
    found = {r.name: r for r in reports("norms", arch) if r.name.startswith("relu2.")}
    assert set(found) == {"relu2._forward_kernel", "relu2._backward_kernel"}
    for name, report in found.items():
        assert_fits(report)
        tensors = 2 if name == "relu2._forward_kernel" else 3
        assert index_types(report, "bf16") == ["i64"] * tensors, report.ttir
        moves = re.findall(r"\b(?:ld|st)\.global\S*", report.ptx)
        assert len(moves) == 2 * tensors, moves
        assert all(".v4.b32" in move for move in moves), moves
        assert report.blocks_per_sm * report.warps >= 32


def index_types(report: Report, pointed_to: str) -> list[str]:
    """Types of the offsets that are added to pointers of one type, in Triton's code, in order."""
    pattern = rf"tt\.addptr [^\n]*!tt\.ptr<{pointed_to}>>?, (?:tensor<[\dx]*)?(i\d+)"
    return re.findall(pattern, report.ttir)
