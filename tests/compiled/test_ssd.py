"""What the compiler makes of the scan's kernels, for every chip."""

import re

import pytest

from benchmarks.aot import ASYNC_COPIES, MATRIX_OPCODES, SLOW_PATHS, Report
from tests.compile_check import ARCHS, assert_fast_product, assert_fits, reports

# Kernel -> products in its code: it is there twice, one for each way.
PRODUCTS = {
    "decay._decay_kernel": False,
    "decay._decay_backward_kernel": False,
    "states._states_kernel": True,
    "scan._values_kernel": True,
    "scan._projections_kernel": True,
}


def named(arch: int) -> list[Report]:
    return reports("mamba", arch)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_fit_and_use_the_chip(arch: int) -> None:
    found = named(arch)
    ways = [(r.name, r.constexprs.get("BACK", False)) for r in found]
    both = [
        (name, way) for name, products in PRODUCTS.items() for way in (False, True)[: 1 + products]
    ]
    assert sorted(ways) == sorted(both)
    for report in found:
        assert_fits(report)
        if PRODUCTS[report.name] and arch != 100:
            assert_fast_product(report)
        elif PRODUCTS[report.name]:
            # ptxas lays parts of the loop out behind it, so that no branch backwards spans the whole of it.
            assert report.count(MATRIX_OPCODES[arch]) > 0
            assert not report.count(*SLOW_PATHS[arch])
            assert report.count(*ASYNC_COPIES) > 0


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_offsets_have_64_bits(arch: int) -> None:
    """No stride, number of tokens or place of a state is a factor of a 32-bit product."""
    for report in named(arch):
        narrow = re.findall(r"arith\.muli %(\w+), %(\w+) .*: (?:tensor<[\dx]+x)?i32", report.ttir)
        for factors in narrow:
            found = [f for f in factors if re.match(r"\w*stride|tokens|slots", f)]
            assert not found, f"{report.name}: {factors}"
        assert re.search(r"arith\.muli .*: (tensor<[\dx]+x)?i64", report.ttir), report.name
