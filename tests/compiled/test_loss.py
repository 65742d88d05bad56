"""What the compiler makes of the linear cross-entropy's kernels on the real model's shapes."""

import re

import pytest

from benchmarks.aot import Report
from hymoe.kernels.tiles import TILES
from tests.compile_check import ARCHS, assert_fast_product, assert_fits, reports

PRODUCTS = {
    "loss_triton._logits_kernel": "loss.logits",
    "loss_triton._dweight_kernel": "loss.dweight",
}
KERNELS = {*PRODUCTS, "loss_triton._rows_kernel"}


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_linear_cross_entropy(arch: int) -> None:
    found = reports("loss", arch)
    assert {r.name for r in found} == KERNELS
    for report in found:
        assert_fits(report)
        assert_64_bit_offsets(report.ttir)
    for name, product in PRODUCTS.items():
        mine = [r for r in found if r.name == name]
        exact = [r for r in mine if "tensor<64x64xf32>" in r.ttir]
        assert {shape(r) for r in exact} == shapes(arch, "loss.float32")
        fast = [r for r in mine if r not in exact]
        assert {shape(r) for r in fast} == shapes(arch, product)
        assert {r.constexprs["EIGHTS"] for r in fast} == {True, False}
        for report in fast:
            assert_fast_product(report)
        for report in mine:
            assert "tf32" not in report.ptx
    stores = {r.constexprs["STORE"] for r in found if r.name == "loss_triton._logits_kernel"}
    first = {r.constexprs["FIRST"] for r in found if r.name == "loss_triton._dweight_kernel"}
    assert stores == first == {True, False}


def shape(report: Report) -> tuple[int, int, int]:
    return tuple(report.constexprs[f"BLOCK_{letter}"] for letter in "MNK")


def shapes(arch: int, product: str) -> set[tuple[int, int, int]]:
    return {(t.m, t.n, t.k) for t in TILES[arch][product]}


def assert_64_bit_offsets(ttir: str) -> None:
    """No stride, width or number of spans is a factor of a 32-bit product that moves a pointer."""
    assert re.search(r"arith\.muli .*: (tensor<[\dx]+x)?i64", ttir)
    # `_in_eights` multiplies a quotient by 8, which moves nothing past what it was.
    eights = set(re.findall(r"%(\w+) = arith\.constant 8 : i32", ttir))
    for factors in re.findall(r"arith\.muli %(\w+), %(\w+) .*: (?:tensor<[\dx]+x)?i32", ttir):
        wide = [
            f for f in factors if re.fullmatch(r"(\w+_stride|width|words|spans|rows)(_\d+)?", f)
        ]
        assert not wide or eights.intersection(factors), factors
