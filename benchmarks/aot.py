"""Compiles the kernels for chips that are not at hand and reads what the compiler made of them.

Operations run on meta tensors of the real shapes inside `launch.recording`; every launch they would make is compiled
for its chip, and the machine code is read with the `cuobjdump` that comes with Triton. TRITON_INTERPRET must not be
set: it is read when triton is imported, and an interpreted kernel has no machine code.
"""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hymoe.kernels.launch import Launch

QUARTERS, REGISTERS_PER_QUARTER = 4, 16_384  # of an SM; a warp's registers lie in one quarter
TMEM_COLUMNS = 512  # of an SM that has tensor memory
# arch -> shared bytes of a whole SM, warps that it can hold, blocks.
SM_LIMITS = {
    80: (167_936, 64, 32),
    90: (233_472, 64, 32),
    100: (233_472, 64, 32),
    120: (102_400, 48, 24),
}
# Whole opcodes: the text HMMA is also a part of UTCHMMA.
MATRIX_OPCODES = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA", 120: "HMMA"}
SLOW_PATHS = {90: ("HMMA",), 100: ("HMMA",)}  # another chip's matrix instructions
ASYNC_COPIES = ("LDGSTS", "UTMALDG", "UBLKCP")
_TYPES = {
    torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8",
    torch.uint8: "u8", torch.bool: "i1",
}  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """A kernel with everything that the compiler specialises on.

    Attributes:
        kernel: what `triton.jit` made.
        signature: (argument, type) pairs.
        constexprs: (argument, value) pairs.
        divisible: indices of the arguments that 16 divides.
        options: the compiler's, (name, value) pairs.
        grid: of one launch of it.
    """

    kernel: Any
    signature: tuple[tuple[str, str], ...]
    constexprs: tuple[tuple[str, Any], ...]
    divisible: tuple[int, ...]
    options: tuple[tuple[str, Any], ...]
    grid: tuple[int, ...]

    @property
    def name(self) -> str:
        """File and kernel."""
        return f"{Path(self.kernel.fn.__code__.co_filename).stem}.{self.kernel.__name__}"


def variant(launch: Launch) -> Variant:
    """What Triton's own launcher would specialise this launch on: types, ones, divisibility by 16."""
    signature, constexprs, divisible = [], [], []
    for i, param in enumerate(launch.kernel.params):
        value = launch.args.get(param.name, param.default)
        if param.is_constexpr or value is None or (type(value) is int and value == 1):
            signature.append((param.name, "constexpr"))
            constexprs.append((param.name, value))
            continue
        if isinstance(value, torch.Tensor):
            signature.append((param.name, "*" + _TYPES[value.dtype]))
            aligned = value.storage_offset() * value.element_size() % 16 == 0
        elif isinstance(value, bool):
            signature.append((param.name, "i1"))
            aligned = False
        elif isinstance(value, int):
            signature.append((param.name, "i32" if -(2**31) <= value < 2**31 else "i64"))
            aligned = value % 16 == 0
        else:
            signature.append((param.name, "fp32"))
            aligned = False
        if aligned and not param.do_not_specialize:
            divisible.append(i)
    options = tuple(sorted(launch.options.items()))
    grid = tuple(launch.grid)
    return Variant(
        launch.kernel, tuple(signature), tuple(constexprs), tuple(divisible), options, grid
    )


def variants(launches: list[Launch]) -> list[Variant]:
    """The different ones among the launches, in order; grids may differ."""
    found: dict[Any, Variant] = {}
    for one in map(variant, launches):
        key = (one.name, one.signature, one.constexprs, one.divisible, one.options)
        found.setdefault(key, one)
    return list(found.values())


@dataclass(frozen=True)
class Report:
    """What the compiler made of a variant.

    Attributes:
        arch: 80, 90, 100 or 120.
        name: file and kernel.
        constexprs: the variant's, with the compiler's options.
        registers: a thread.
        stack_bytes: a thread; more than 0 are spills or arrays in local memory.
        shared_bytes: a block.
        warps: a block.
        tensor_memory: columns a block, of chips that have it.
        opcodes: machine instructions, how often each stands in the code.
        main_loop: the same, of the smallest loop around a matrix instruction; empty without one.
        ttir: Triton's own intermediate code.
        ptx: the assembler's input.
    """

    arch: int
    name: str
    constexprs: dict[str, Any]
    registers: int
    stack_bytes: int
    shared_bytes: int
    warps: int
    tensor_memory: int
    opcodes: Counter[str]
    main_loop: Counter[str]
    ttir: str
    ptx: str

    def count(self, *opcodes: str) -> int:
        """Instructions whose opcode, without its modifiers, is one of these."""
        return sum(self.opcodes[opcode] for opcode in opcodes)

    @property
    def spills(self) -> int:
        """Loads from and stores to local memory."""
        return self.count("LDL", "STL")

    @property
    def blocks_per_sm(self) -> int:
        """Blocks that fit an SM by registers, shared memory, tensor memory and warps."""
        shared, warps, blocks = SM_LIMITS[self.arch]
        per_warp = -(-max(1, self.registers) // 8) * 8 * 32
        by_registers = REGISTERS_PER_QUARTER // per_warp * QUARTERS // self.warps
        by_shared = shared // (self.shared_bytes + 1024)
        by_tensor_memory = TMEM_COLUMNS // max(1, self.tensor_memory)
        return min(by_registers, by_shared, by_tensor_memory, warps // self.warps, blocks)

    @property
    def occupancy(self) -> float:
        """Share of the warps that an SM can hold."""
        return self.blocks_per_sm * self.warps / SM_LIMITS[self.arch][1]


def compile_variant(one: Variant, arch: int) -> Report:
    """Compiles for sm_{arch} and reads the machine code.

    Raises:
        RuntimeError: triton was imported with its interpreter switched on.
    """
    if triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set: an interpreted kernel has no machine code")
    names = one.kernel.arg_names
    source = ASTSource(
        fn=one.kernel,
        signature=dict(one.signature),
        constexprs={(names.index(name),): value for name, value in one.constexprs},
        attrs={(i,): [["tt.divisibility", 16]] for i in one.divisible},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=dict(one.options))
    cubin = compiled.asm["cubin"]
    registers, stack, static_shared = parse_resources(_cuobjdump(cubin, "-res-usage"))
    code = parse_code(_cuobjdump(cubin, "-sass"))
    return Report(
        arch=arch,
        name=one.name,
        constexprs=dict(one.constexprs) | dict(one.options),
        registers=registers,
        stack_bytes=stack,
        shared_bytes=max(compiled.metadata.shared, static_shared),
        warps=compiled.metadata.num_warps,
        tensor_memory=getattr(compiled.metadata, "tmem_size", None) or 0,
        opcodes=Counter(one.opcode for one in code),
        main_loop=main_loop(code, MATRIX_OPCODES[arch]),
        ttir=compiled.asm["ttir"],
        ptx=compiled.asm["ptx"],
    )


def _cuobjdump(cubin: bytes, option: str) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), option, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def parse_resources(text: str) -> tuple[int, int, int]:
    """Registers, stack bytes and static shared bytes of the kernel, from `cuobjdump -res-usage`.

    Raises:
        RuntimeError: the text is not about one kernel.
    """
    found = re.findall(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", text)
    if len(found) != 1:
        raise RuntimeError(f"cuobjdump names {len(found)} kernels, expected one: {text}")
    registers, stack, shared = map(int, found[0])
    return registers, stack, shared


class Instruction(NamedTuple):
    """A machine instruction: opcode without its modifiers; target where it is a branch to a place in the code."""

    address: int
    opcode: str
    target: int | None


def parse_code(text: str) -> list[Instruction]:
    """The instructions in order, from `cuobjdump -sass`."""
    pattern = r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)([^;\n]*)"
    code = []
    for address, opcode, rest in re.findall(pattern, text):
        target = re.search(r"0x([0-9a-f]+)\s*$", rest) if opcode == "BRA" else None
        code.append(Instruction(int(address, 16), opcode, target and int(target[1], 16)))
    return code


def main_loop(code: Sequence[Instruction], opcode: str) -> Counter[str]:
    """Opcodes of the smallest loop that holds `opcode`, from the target of a branch backwards to that branch."""
    loops = [
        [one for one in code if back.target <= one.address <= back.address]
        for back in code
        if back.target is not None and back.target <= back.address
    ]
    around = [loop for loop in loops if any(one.opcode == opcode for one in loop)]
    return Counter(one.opcode for one in min(around, key=len, default=[]))
