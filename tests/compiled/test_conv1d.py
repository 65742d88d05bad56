"""What the compiler makes of the convolution's kernels, for every chip."""

import re

import pytest

from tests.compile_check import ARCHS, assert_fits, reports


@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_fit_and_keep_enough_loads_under_way(arch: int) -> None:
    found = {report.name: report for report in reports("conv1d", arch)}
    assert set(found) == {"conv1d_triton._forward_kernel", "conv1d_triton._backward_kernel"}
    for report in found.values():
        assert_fits(report)
        threads = report.warps * 32 * report.blocks_per_sm
        assert threads >= 384, f"{report.name}: {threads} threads an SM, each with four rows"


@pytest.mark.parametrize("arch", ARCHS)
def test_offsets_of_rows_have_64_bits(arch: int) -> None:
    for report in reports("conv1d", arch):
        wide = re.findall(r"arith\.muli %(\w+), %(\w+) : i64", report.ttir)
        # Four rows ahead and three before, of x at least, and the row that is written.
        assert len(wide) >= 8, report.ttir
        for factors in re.findall(r"arith\.muli %(\w+), %(\w+) : i32", report.ttir):
            assert not {"x_stride", "dy_stride"} & set(factors), f"{report.name}: {factors}"
            if "channels" in factors:  # places within one program's sums: at most 5 C
                assert any(re.fullmatch(r"c\d+_i32", name) for name in factors), factors
