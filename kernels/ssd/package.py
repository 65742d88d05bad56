"""The Mamba-2 scan by mamba-ssm's Triton kernels, kept off what is known to go wrong in them.

- Documents are told apart by `seq_idx`: its first id has to be 0, and an id that comes back in the same row leaks the
  state of the first document into the last. `Packed.seq_idx` counts 0, 1, 2, ...
- Offsets are products of 32-bit integers (state-spaces/mamba#1015). dt, a slice of the wide projection, is copied so
  that its rows lie side by side; a row that passes 2^31 anywhere else is refused.
- A chunk that is no power of two gives NaN (#449); the next smaller one is taken.
- By default gradients are sums of atomics, and the fastest of many tiles is chosen while the run goes on: other bits in
  each run. Their deterministic mode is switched on, by call and not by environment, and one tile a kernel is kept.
Their softplus is log(1 + exp(x)) in float32, which loses a time step's digits where it is below about 1e-4.
"""

import importlib
from types import ModuleType

import torch
from torch import Tensor
from triton.runtime.autotuner import Autotuner

from hymoe.kernels.launch import INSTALL
from hymoe.kernels.packed import Packed

KERNEL_FILES = ("bmm", "chunk_scan", "chunk_state", "state_passing", "combined")


def package_scan(
    x: Tensor,
    dt: Tensor,
    a_log: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
    packed: Packed,
    chunk_size: int,
) -> Tensor:
    """See `op.ssd_scan`, which checks the shapes.

    Raises:
        ValueError: the row is too large for 32-bit offsets.
        ImportError: mamba-ssm is installed but cannot be imported.
    """
    size = max(16, 1 << (chunk_size.bit_length() - 1))
    b, c = (t.to(x.dtype) for t in (b, c))
    check_offsets(x, b, c, size)
    y = _deterministic().mamba_chunk_scan_combined(
        x[None],
        dt.contiguous()[None],
        -torch.exp(a_log.float()),
        b[None],
        c[None],
        size,
        D=skip.float(),
        dt_bias=dt_bias.float(),
        seq_idx=packed.seq_idx[None] if len(packed.lengths) > 1 else None,
        dt_softplus=True,
        dt_limit=dt_limit,
    )
    return y[0]


def check_offsets(x: Tensor, b: Tensor, c: Tensor, size: int) -> None:
    """Raises ValueError where an offset in mamba-ssm's kernels would pass 2^31.

    Args:
        x: (T, H, P).
        b: (T, G, N).
        c: (T, G, N).
        size: tokens a chunk.
    """
    tokens, heads, width = x.shape
    groups, states = b.shape[1:]
    # Elements a token of what they address, in whole chunks: inputs, states, c . b, and the heads' shares of db.
    widest = max(
        *(t.stride(0) for t in (x, b, c)),
        heads * width,
        -(-heads * width * states // size),
        groups * size,
        heads * states,
    )
    reached = -(-tokens // size) * size * widest
    if reached >= 2**31:
        raise ValueError(
            f"ssd_scan: {tokens} tokens reach offset {reached} in mamba-ssm's kernels, which count to 2^31; "
            f"use kernels = 'triton', or fewer tokens a row"
        )


def _deterministic() -> ModuleType:
    """The module of mamba-ssm's scan, deterministic."""
    try:
        determinism = importlib.import_module("mamba_ssm.utils.determinism")
        modules = [importlib.import_module(f"mamba_ssm.ops.triton.ssd_{f}") for f in KERNEL_FILES]
    except ImportError as error:
        raise ImportError(
            f"mamba_ssm cannot be imported ({error}); pip install --no-build-isolation '{INSTALL['mamba_ssm']}', "
            f"or use kernels = 'triton'"
        ) from error
    determinism.set_deterministic_mode(True)
    # Whoever imported them before may have done so in the other mode, which is then in the tiles to choose from.
    for module in modules:
        for kernel in vars(module).values():
            if isinstance(kernel, Autotuner) and len(kernel.configs) > 1:
                kernel.configs = determinism.autotune_configs(kernel.configs)
    return modules[-1]
