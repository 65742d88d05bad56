"""What the compiler makes of routing's kernels on the real model's shapes."""

import re

import pytest

from tests.compile_check import ARCHS, assert_fast_product, assert_fits, reports

KERNELS = {
    "route_triton": ("_split_kernel", "_product_kernel", "_choose_kernel", "_dlogits_kernel"),
    "order_triton": ("_below_kernel", "_starts_kernel", "_scatter_kernel", "_table_kernel"),
}
# Rows, strides and parts of these can pass 2^31; what else there is are experts, tiles of the sort, tiles of products.
PER_ROW = {
    "_split_kernel",
    "_product_kernel",
    "_dlogits_kernel",
    "_below_kernel",
    "_scatter_kernel",
}


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_routing(arch: int) -> None:
    found = reports("routing", arch)
    assert {r.name for r in found} == {f"{f}.{k}" for f, names in KERNELS.items() for k in names}
    for report in found:
        assert_fits(report)
        if report.name.split(".")[1] in PER_ROW:
            assert_64_bit_offsets(report.ttir)
    choose = [r for r in found if r.name == "route_triton._choose_kernel"]
    for report in choose:
        assert re.search(r"arith\.muli .*tensor<\d+x1xi64>", report.ttir), "row times experts"
    products = [r for r in found if r.name == "route_triton._product_kernel"]
    parts = {(r.constexprs["A_PARTS"], r.constexprs["B_PARTS"]) for r in products}
    assert parts == {(1, 3), (3, 3), (3, 1)}
    for report in products:
        assert_fast_product(report)
        assert "tf32" not in report.ptx
        # A block's sum starts at zero and is added outside of the matrix unit.
        assert re.search(r"arith\.addf .*tensor<\d+x\d+xf32>", report.ttir)


def assert_64_bit_offsets(ttir: str) -> None:
    """Every pointer moves by 64 bits, and these are no widened 32-bit products of vectors."""
    offsets = re.findall(r"tt\.addptr .* : [^,]*, (?:tensor<[\dx]*x)?(i\d+)", ttir)
    assert offsets
    assert set(offsets) == {"i64"}
    assert not re.search(r"arith\.muli .*xi32>", ttir)
