"""What the compiler makes of the experts' kernels on the real model's shapes, with every tile of the table."""

import re

import pytest

from benchmarks.aot import ASYNC_COPIES, Report
from hymoe.kernels.grouped_gemm_triton import _programs
from hymoe.kernels.launch import KNOWN_TARGETS
from hymoe.kernels.tiles import Tile
from tests.compile_check import ARCHS, assert_fast_product, assert_fits, reports

pytestmark = pytest.mark.slow
ROWS, WGRAD = "grouped_gemm_triton._rows_kernel", "grouped_gemm_triton._wgrad_kernel"
COMBINE = "experts_triton._combine_kernel"
# Epilogue, whether rows are gathered, whether matrices are transposed: up, down, their two gradients, grouped_gemm.
PRODUCTS = {
    ("relu2", True, False),
    ("scale", False, False),
    ("backward", True, True),
    ("plain", False, True),
    ("plain", False, False),
}


def is_float32(report: Report) -> bool:
    return re.search(r"!tt.ptr<bf16>", report.ttir) is None


def kind(report: Report) -> tuple:
    names = ("EPILOGUE", "GATHER", "TRANSPOSED") if report.name == ROWS else ("GATHER_A",)
    return tuple(report.constexprs[name] for name in names)


@pytest.mark.parametrize("arch", ARCHS)
def test_every_kernel_fits(arch: int) -> None:
    found = reports("experts", arch)
    for report in found:
        assert_fits(report)
    for is_wide in (False, True):
        of = [r for r in found if is_float32(r) == is_wide]
        assert {kind(r) for r in of if r.name == ROWS} == PRODUCTS
        assert {kind(r) for r in of if r.name == WGRAD} == {(True,), (False,)}
        assert any(r.name == COMBINE for r in of)


@pytest.mark.parametrize("arch", ARCHS)
def test_products_are_fast_and_their_programs_run_at_once(arch: int) -> None:
    products = [
        r for r in reports("experts", arch) if r.name in (ROWS, WGRAD) and not is_float32(r)
    ]
    tiles = {tuple(r.constexprs[f"BLOCK_{d}"] for d in "MNK") for r in products}
    assert len(tiles) == 2
    for report in products:
        assert_fast_product(report)
        # No operand by another way: the loop has what a step copies, 16 bytes a thread at a time.
        m, n, k = (report.constexprs[f"BLOCK_{d}"] for d in "MNK")
        copies = (m + n) * k * 2 // (16 * 32 * report.warps)
        assert sum(report.main_loop[one] for one in ASYNC_COPIES) >= copies + (report.name == WGRAD)
        # As many blocks as the launch counts on: a persistent grid larger than that has a tail.
        stages = report.constexprs["num_stages"]
        stages = (stages + 1) // 2 if report.name == WGRAD else stages
        tile, chip = Tile(m, n, k, report.warps, stages), KNOWN_TARGETS[arch]
        (programs,) = _programs(tile, chip, itemsize=2, tiles=10**6)
        assert report.blocks_per_sm >= programs / chip.num_sms


@pytest.mark.parametrize("arch", ARCHS)
def test_float32_products_are_not_rounded(arch: int) -> None:
    for report in reports("experts", arch):
        if report.name in (ROWS, WGRAD) and is_float32(report):
            assert "tf32" not in report.ptx
            assert report.count("FFMA") > 0


@pytest.mark.parametrize("arch", ARCHS)
def test_rows_and_experts_have_64_bit_offsets(arch: int) -> None:
    """A row's place is a 64-bit product; within a tile and within a matrix 32 bits are enough."""
    for report in reports("experts", arch):
        vectors = len(re.findall(r"arith\.muli .* tensor<[\dx]*x?i64>", report.ttir))
        scalars = len(re.findall(r"arith\.muli .* : i64", report.ttir))
        if report.name == ROWS:
            # Vector: the operand's rows. Scalars: the expert's matrix, the first row of the tile's output, and where
            # each part of an epilogue that goes by parts puts its sums.
            parts = report.constexprs["BLOCK_N"] // report.constexprs["COLUMNS"]
            sums = report.constexprs["EPILOGUE"] == "backward"
            assert (vectors, scalars) == (1, 2 + parts * sums), report.name
        elif report.name == WGRAD:
            assert (vectors, scalars) == (2, 1), (
                report.ttir
            )  # both operands' rows; the expert's result
        elif report.name == COMBINE:
            assert scalars >= 2, report.name  # rows of the sum and of the result
