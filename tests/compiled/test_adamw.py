"""What the compiler makes of AdamW on the real model's shapes: IEEE's rounding, and loads and stores of 16 bytes."""

import re

import pytest

from benchmarks.aot import Report
from tests.compile_check import ARCHS, assert_fits, reports

ELEMENTS = 8  # of a thread in a block: 16 bytes of bfloat16


def instructions(report: Report, pattern: str) -> int:
    return len(re.findall(pattern, report.ptx))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_adamw(arch: int) -> None:
    found = reports("adamw", arch)
    kinds = ("PARAM_BF16", "GRAD_BF16", "ROUNDING", "STOCHASTIC_V", "ALIGNED")
    assert {tuple(r.constexprs[kind] for kind in kinds) for r in found} == {
        *(
            (True, True, mode, v, True)
            for mode in ("exact", "stochastic", "nearest")
            for v in (0, 1)
        ),
        (True, False, "exact", False, True),
        (True, True, "exact", False, False),
        (True, True, "stochastic", True, False),
        (False, False, "nearest", False, True),
        (False, False, "nearest", False, False),
    }
    for report in found:
        assert_fits(report)
        assert_ieee(report)
        assert_wide_offsets(report)
        if report.constexprs["ALIGNED"]:
            assert_streams(report)


def assert_ieee(report: Report) -> None:
    """Every operation is rounded by itself, to nearest, and subnormals are kept."""
    assert instructions(report, r"\bfma\.") == 0
    assert instructions(report, r"\.ftz|\.approx|\.full") == 0
    assert instructions(report, r"\bsqrt\.rn\.f32") == ELEMENTS
    assert instructions(report, r"\bdiv\.rn\.f32") == ELEMENTS


def assert_wide_offsets(report: Report) -> None:
    """The program's number is made 64 bits wide before it becomes an element, and every address adds that."""
    assert re.search(r"arith\.extsi %program\w* : i32 to i64", report.ttir)
    offsets = re.findall(r"tt\.addptr %(?:p|g|m|v|r)_ptr\w*, %start\w*.*, (\w+) loc", report.ttir)
    tensors = 5 if report.constexprs["ROUNDING"] == "exact" else 4
    assert offsets == ["i64"] * tensors, offsets


def assert_streams(report: Report) -> None:
    """16 bytes a load and a store, no exchange between threads, enough warps to keep memory busy."""
    c = report.constexprs
    vectors = 1 if c["PARAM_BF16"] else 2
    loads = 3 * vectors + (1 if c["GRAD_BF16"] else 2) + (c["ROUNDING"] == "exact")
    assert instructions(report, r"ld\.global\.v4\.b32") == loads
    stores = 3 * vectors + (c["ROUNDING"] == "exact")
    assert instructions(report, r"st\.global\.v4\.b32") == stores
    assert instructions(report, r"st\.global") == stores
    assert report.shared_bytes == 0
    assert report.blocks_per_sm * report.warps >= 20
