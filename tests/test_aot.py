"""What the compile report reads in the compiler's output, on samples of that output."""

import pytest
import torch
import triton
from triton.runtime.jit import JITFunction

from benchmarks import aot, compile_report
from hymoe.kernels.launch import KNOWN_TARGETS, Launch

USAGE = """
Resource usage:
 Common:
  GLOBAL:0
 Function _kernel:
  REG:168 STACK:16 SHARED:2048 LOCAL:0 CONSTANT[0]:632 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
# A prologue with a copy, a loop over tiles that holds the main loop over k and a wait, an end that branches to itself.
CODE = """
	code for sm_90
        /*0000*/                   LDC R1, c[0x0][0x28] ;                  /* 0x00000a00ff017b82 */
                                                                           /* 0x000e220000000800 */
        /*0010*/                   LDGSTS.E.BYPASS.128 [R71], desc[UR26][R8.64], P0 ;   /* 0x0 */
        /*0020*/             @!UP0 UTCHMMA gdesc[UR10], tmem[UR6], !UPT ;  /* 0x0 */
        /*0030*/                   LDGSTS.E [R71+0x1000], desc[UR26][R8.64] ;          /* 0x0 */
        /*0040*/               @P1 BRA 0x40 ;                              /* 0x0 */
        /*0050*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR16], R24, gsb0 ;  /* 0x0 */
        /*0060*/              @!P2 BRA 0x30 ;                              /* 0x0 */
        /*0070*/                   STG.E.64 desc[UR4][R2.64], R24 ;        /* 0x0 */
        /*0080*/                   BRA.U UP3, 0x10 ;                       /* 0x0 */
        /*0090*/               @P0 BRA 0xb0 ;                              /* 0x0 */
        /*00a0*/                   STL [R1], R4 ;                          /* 0x0 */
        /*00b0*/                   BRA 0xb0;                               /* 0x0 */
"""


def _kernel(x_ptr, y_ptr, gone_ptr, rows, stride, scale, flag, BLOCK):
    pass


# Not `triton.jit`: in the interpreter that makes something else.
KERNEL = JITFunction(_kernel)


def report(**changes) -> aot.Report:
    values = {
        "arch": 90,
        "name": "file._kernel",
        "constexprs": {"BLOCK_M": 64, "BLOCK_K": 32, "GATED": True, "num_stages": 3},
        "registers": 64,
        "stack_bytes": 0,
        "shared_bytes": 0,
        "warps": 4,
        "tensor_memory": 0,
        "opcodes": aot.Counter(),
        "main_loop": aot.Counter(),
        "ttir": "",
        "ptx": "",
    }
    return aot.Report(**values | changes)


def test_resources() -> None:
    assert aot.parse_resources(USAGE) == (168, 16, 2048)
    for text in ("", USAGE + USAGE):
        with pytest.raises(RuntimeError, match=r"names (0|2) kernels, expected one"):
            aot.parse_resources(text)


def test_code() -> None:
    code = aot.parse_code(CODE)
    assert [one.address for one in code] == list(range(0, 0xC0, 0x10))
    assert " ".join(one.opcode for one in code) == (
        "LDC LDGSTS UTCHMMA LDGSTS BRA HGMMA BRA STG BRA BRA STL BRA"
    )
    assert [one.target for one in code if one.opcode == "BRA"] == [0x40, 0x30, 0x10, 0xB0, 0xB0]


def test_the_main_loop_is_the_smallest_around_a_matrix_instruction() -> None:
    code = aot.parse_code(CODE)
    assert aot.main_loop(code, "HGMMA") == {"LDGSTS": 1, "BRA": 2, "HGMMA": 1}
    assert aot.main_loop(code, "UTCHMMA")["STG"] == 1  # only the loop over tiles holds it
    assert aot.main_loop(code, "HMMA") == {}  # a part of other opcodes' names, and not here


def test_opcodes_are_counted_whole() -> None:
    found = report(opcodes=aot.Counter(one.opcode for one in aot.parse_code(CODE)))
    assert found.count("HMMA") == 0
    assert found.count("LDGSTS", "HGMMA") == 3
    assert found.spills == 1


@pytest.mark.parametrize(
    ("changes", "blocks"),
    [
        ({}, 8),  # 64 registers x 4 warps: 8 warps a quarter of the SM
        ({"registers": 65}, 7),  # 72 are handed out: 7 warps a quarter
        ({"registers": 255, "warps": 8}, 1),
        (
            {"registers": 96, "warps": 1},
            20,
        ),  # 5 warps a quarter; 21 would fit if registers were not shared out
        ({"registers": 16}, 16),  # 64 warps
        ({"registers": 16, "arch": 120}, 12),  # 48 warps
        ({"registers": 16, "warps": 1}, 32),  # blocks
        ({"registers": 16, "warps": 1, "arch": 120}, 24),
        ({"shared_bytes": 100_000}, 2),
        (
            {"shared_bytes": 232_448},
            1,
        ),  # the whole of what a block can have, and 1 KB of the system's
        ({"shared_bytes": 166_912, "arch": 80}, 1),
        ({"arch": 100, "tensor_memory": 256}, 2),
    ],
)
def test_blocks_of_an_sm(changes: dict[str, int], blocks: int) -> None:
    found = report(**changes)
    assert found.blocks_per_sm == blocks
    assert found.occupancy == blocks * found.warps / (48 if found.arch == 120 else 64)


@pytest.mark.parametrize("arch", KNOWN_TARGETS)
def test_limits_agree_with_those_that_tiles_are_chosen_by(arch: int) -> None:
    assert aot.SM_LIMITS[arch][0] - 1024 == KNOWN_TARGETS[arch].shared_bytes


def test_a_launch_is_compiled_as_it_would_be_run() -> None:
    """Types, the value 1, None and constexprs are compiled in; what 16 divides is marked."""
    memory = torch.zeros(64, dtype=torch.bfloat16, device="meta")
    args = {
        "x_ptr": memory,
        "y_ptr": memory[1:],  # 2 bytes off
        "gone_ptr": None,
        "rows": 1,
        "stride": 1 << 31,
        "scale": 0.5,
        "flag": True,
        "BLOCK": 32,
    }
    found = aot.variant(Launch(KERNEL, (3,), args, {"num_warps": 4}))
    assert dict(found.signature) == {
        "x_ptr": "*bf16",
        "y_ptr": "*bf16",
        "gone_ptr": "constexpr",
        "rows": "constexpr",
        "stride": "i64",
        "scale": "fp32",
        "flag": "i1",
        "BLOCK": "i32",  # only an annotation makes it one
    }
    assert dict(found.constexprs) == {"gone_ptr": None, "rows": 1}
    assert found.divisible == (0, 4, 7)
    assert found.options == (("num_warps", 4),)
    assert found.name == "test_aot._kernel"


def test_equal_launches_are_compiled_once() -> None:
    x = torch.zeros(64, device="meta")
    args = dict.fromkeys(("x_ptr", "y_ptr", "gone_ptr"), x)
    args |= {"rows": 32, "stride": 16, "scale": 1.0, "flag": False, "BLOCK": 32}
    launches = [
        Launch(KERNEL, (n,), args | {"rows": rows}, {}) for n, rows in enumerate((32, 48, 40))
    ]
    assert [one.grid for one in aot.variants(launches)] == [(0,), (2,)]


def test_nothing_is_compiled_by_an_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET is set"):
        aot.compile_variant(aot.Variant(KERNEL, (), (), (), (), (1,)), 90)


def test_a_row_of_the_table() -> None:
    found = report(
        registers=128,
        stack_bytes=8,
        opcodes=aot.Counter({"HGMMA": 8, "LDGSTS": 6, "STL": 2}),
        main_loop=aot.Counter({"HGMMA": 4, "LDGSTS": 3}),
    )
    cells = dict(zip(compile_report.HEADERS[:12], compile_report.row(found), strict=False))
    assert cells == {
        "kernel": "sm_90 file._kernel",
        "variant": "GATED",
        "tile": "64x32",
        "warps": "4",
        "stages": "3",
        "registers": "128",
        "stack": "8",
        "spills": "2",
        "shared": "0",
        "blocks": "4",
        "warps of SM": "25%",
        "matrix": "8",
    }
    assert compile_report.row(found)[12:] == ["4", "6", "3"]
