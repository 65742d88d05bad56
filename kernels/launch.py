"""What every kernel file shares: which implementation runs and why, on which chip, and how a Triton kernel is launched.

One place decides (`choose`): each operation asks it with the recipe's `run.kernels`, and a run prints the same answers
once at its start (`backends`). An implementation that cannot run here is an error, never another one in silence.

Every Triton kernel goes through `launch`. Inside `recording` nothing runs: operations on meta tensors leave the list
of launches that the real shapes need on a chip that need not be present, which is how kernels are compiled and judged
ahead of time. It also proves that an operation never asks the device: a meta tensor has no values to ask for.
"""

import functools
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

CHOICES = ("auto", "torch", "triton", "packages")
# Operation -> the package that `packages` uses for it on a GPU; None where there is none.
OPERATIONS: dict[str, str | None] = {
    "rms_norm": None,
    "gated_rms_norm": None,
    "relu2": None,
    "causal_conv1d": "causal_conv1d",
    "ssd_scan": "mamba_ssm",
    "varlen_attention": None,
    "route": None,
    "expert_mlp": None,
    "linear_cross_entropy": None,
    "adamw_step": None,
}
INSTALL = {"causal_conv1d": "causal-conv1d>=1.6", "mamba_ssm": "mamba-ssm>=2.3"}
# A build without CUDA has the package and not this module of it: it cannot run.
EXTENSION = {"causal_conv1d": "causal_conv1d_cuda", "mamba_ssm": "selective_scan_cuda"}
TILE_ELEMENTS = 1 << 16  # a thread: 256 KB of float32, an eighth of a 2 MB L2; see `row_tiles`

# Kernels run in Triton's interpreter, on CPU tensors: decided when triton is imported (TRITON_INTERPRET=1).
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@dataclass(frozen=True)
class Choice:
    """An implementation and why it is the one: name is torch, triton, or a package's."""

    name: str
    reason: str


@functools.cache
def choose(operation: str, kernels: str, device: str, dtype: torch.dtype | None = None) -> Choice:
    """The implementation of an operation.

    Args:
        operation: a key of OPERATIONS.
        kernels: auto | torch | triton | packages, the recipe's `run.kernels`.
        device: type of the device: cpu, cuda, or meta while launches are recorded.
        dtype: of the activations, where known.

    Raises:
        ValueError: an unknown choice, or one that cannot run here.
    """
    if kernels not in CHOICES:
        raise ValueError(f"kernels = {kernels!r}; expected one of {', '.join(CHOICES)}")
    if kernels == "torch":
        return Choice("torch", "asked for")
    if dtype == torch.float64:
        return Choice(
            "torch", "float64 is there to check gradients with; the kernels have no such arithmetic"
        )
    if operation == "varlen_attention":
        return Choice(
            "torch",
            "torch.nn.attention.varlen on a GPU in 16 bits, scaled_dot_product_attention elsewhere",
        )
    if device == "cpu" and not INTERPRETED:
        if kernels == "auto":
            return Choice("torch", "no GPU")
        raise ValueError(
            f"kernels = {kernels!r}: {operation} is on a CPU; Triton kernels and packages need a GPU, use 'auto'"
        )
    if device == "cpu" and kernels == "auto":
        return Choice("torch", "no GPU; the interpreter is for tests")
    package = OPERATIONS[operation]
    if kernels == "triton" or package is None:
        return Choice("triton", "asked for" if kernels == "triton" else "our kernels on a GPU")
    missing = [name for name in (package, EXTENSION[package]) if not _is_installed(name)]
    if not missing:
        return Choice(package, "installed")
    if kernels == "packages":
        raise ValueError(
            f"kernels = 'packages': {operation} needs {package}, of which {missing[0]} is not installed; "
            f"pip install --no-build-isolation '{INSTALL[package]}', or use 'auto' or 'triton'"
        )
    return Choice("triton", f"{missing[0]} is not installed")


def _is_installed(module: str) -> bool:
    """Whether a top-level module could be imported, without importing it."""
    if module in sys.modules:
        return sys.modules[module] is not None
    return importlib.util.find_spec(module) is not None


def backends(kernels: str, device: str) -> dict[str, Choice]:
    """Operation -> implementation for the recipe's `run.kernels` on a type of device; the caller prints the table.

    Raises:
        ValueError: see `choose`.
    """
    return {operation: choose(operation, kernels, device) for operation in OPERATIONS}


def summary(chosen: dict[str, Choice]) -> list[str]:
    """One line for each implementation and reason: which operations it runs."""
    groups: dict[Choice, list[str]] = {}
    for operation, choice in chosen.items():
        groups.setdefault(choice, []).append(operation)
    return [f"{c.name} ({c.reason}): {', '.join(names)}" for c, names in groups.items()]


def uses_triton(operation: str, kernels: str, x: Tensor) -> bool:
    """Whether the operation's Triton kernels take `x`; for operations that have no package."""
    return choose(operation, kernels, x.device.type, x.dtype).name == "triton"


@dataclass(frozen=True)
class Target:
    """The chip that a kernel is launched on.

    Attributes:
        arch: 80, 90, 100, 120, ...; 0 for the interpreter.
        shared_bytes: shared memory that one block can have.
        num_sms: streaming multiprocessors.
    """

    arch: int
    shared_bytes: int
    num_sms: int


# Chips that kernels are compiled for without one at hand: A100, H100/H200, B200, RTX PRO 6000.
KNOWN_TARGETS = {
    80: Target(80, 166_912, 108),
    90: Target(90, 232_448, 132),
    100: Target(100, 232_448, 148),
    120: Target(120, 101_376, 188),
}
INTERPRETER = Target(0, 1 << 30, 3)


@functools.cache
def _device_target(index: int) -> Target:
    props = torch.cuda.get_device_properties(index)
    return Target(
        10 * props.major + props.minor,
        props.shared_memory_per_block_optin,
        props.multi_processor_count,
    )


def target(device: torch.device) -> Target:
    """The chip of a device; of the recording where one is going on."""
    if _recording is not None:
        return _recording[0]
    if device.type != "cuda":
        return INTERPRETER
    return _device_target(torch.cuda.current_device() if device.index is None else device.index)


@dataclass(frozen=True)
class Launch:
    """A launch that was recorded: `args` are the kernel's by name, tensors on meta; `options` the compiler's."""

    kernel: Any
    grid: tuple[int, ...]
    args: dict[str, Any]
    options: dict[str, Any]


_recording: tuple[Target, list[Launch]] | None = None
_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "maxnreg")


@contextmanager
def recording(chip: Target) -> Iterator[list[Launch]]:
    """Collects launches as if on `chip` instead of running them; operations get meta tensors."""
    global _recording
    launches: list[Launch] = []
    before, _recording = _recording, (chip, launches)
    try:
        yield launches
    finally:
        _recording = before


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
    """Runs a Triton kernel on the device of its tensors; an empty grid is no launch.

    Args:
        kernel: what `triton.jit` made.
        grid: number of programs in each dimension.
        args: the kernel's arguments in order.
        kwargs: its constexprs, and num_warps, num_stages, enable_fp_fusion, maxnreg.
    """
    if 0 in grid:
        return
    kwargs.setdefault("enable_fp_fusion", True)  # Triton's own default changes with its version
    if _recording is not None:
        options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
        named = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        _recording[1].append(Launch(kernel, grid, named, options))
        return
    device = next(x.device for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
    if device.type == "cuda" and device.index not in (None, torch.cuda.current_device()):
        with torch.cuda.device(device):
            kernel[grid](*args, **kwargs)
    else:
        kernel[grid](*args, **kwargs)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """Float32 to the dtype of a store, to nearest even; Triton's interpreter would truncate, and spoil subnormals."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
        bits = tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), bits)
        x = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@triton.jit
def dot(a, b, acc):
    """Product of tiles in float32, added to acc; float32 operands are not rounded to TF32."""
    if INTERPRETED:  # its bfloat16 is an integer to numpy
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


def arithmetic_dtype(x: torch.Tensor) -> torch.dtype:
    """float32 for every training dtype; float64 stays float64, so that gradients can be checked in it."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def check_shape(name: str, x: torch.Tensor, shape: tuple[int | None, ...]) -> None:
    """Raises ValueError unless `x` has the shape; None stands for any size."""
    fits = x.dim() == len(shape) and all(
        want in (None, have) for want, have in zip(shape, x.shape, strict=True)
    )
    if not fits:
        want = ", ".join("*" if n is None else str(n) for n in shape)
        raise ValueError(f"{name}: expected shape ({want}), found {tuple(x.shape)}")


def row_tiles(x: torch.Tensor) -> Iterator[slice]:
    """Rows of (T, D) to work on together: on a CPU few enough that a chain of temporaries stays in the L2 caches."""
    rows = x.shape[0]
    step = rows if x.is_cuda else max(1, TILE_ELEMENTS * torch.get_num_threads() // x.shape[1])
    for start in range(0, rows, max(1, step)):
        yield slice(start, min(start + step, rows))
