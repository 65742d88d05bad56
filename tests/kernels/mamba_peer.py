"""mamba-ssm's own Triton kernels as a peer: compiled on a GPU, in Triton's interpreter elsewhere.

A build without CUDA is pure Python. Its top package imports extension modules that such a build does not have, and
transformers; neither has to do with the Triton kernels, so only the modules below the top are run.
"""

import contextlib
import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import triton


@contextlib.contextmanager
def mamba_chunk_scan_combined() -> Iterator[Callable[..., torch.Tensor]]:
    """mamba-ssm's scan in its deterministic mode, to be called, forward and backward, inside this context.

    In the interpreter its inputs have to be float32: bfloat16 is an integer there, and its kernels do not convert.
    Skips the test where mamba-ssm is not installed.
    """
    if importlib.util.find_spec("mamba_ssm") is None:
        pytest.skip(
            "mamba-ssm is not installed: scripts/env.sh says how a pure-Python build is made"
        )
    combined = _combined()
    determinism = importlib.import_module("mamba_ssm.utils.determinism")
    with contextlib.ExitStack() as stack:
        determinism.set_deterministic_mode(True)
        stack.callback(determinism.set_deterministic_mode, None)
        if not torch.cuda.is_available():
            stack.enter_context(mock.patch.object(torch.cuda, "device", contextlib.nullcontext))
            chip = SimpleNamespace(multi_processor_count=2)
            stack.enter_context(
                mock.patch.object(torch.cuda, "get_device_properties", return_value=chip)
            )
        yield combined.mamba_chunk_scan_combined


@functools.cache
def _combined() -> Any:
    name = "mamba_ssm.ops.triton.ssd_combined"
    if torch.cuda.is_available():
        return importlib.import_module(name)
    spec = importlib.util.find_spec("mamba_ssm")
    sys.modules.setdefault("mamba_ssm", importlib.util.module_from_spec(spec))  # not run
    with mock.patch.object(triton, "autotune", _first_config(triton.autotune)):
        return importlib.import_module(name)


def _first_config(autotune: Callable[..., Any]) -> Callable[..., Any]:
    """`triton.autotune` without a choice: measuring needs a driver."""
    return lambda configs, key, **options: autotune(configs[:1], key, **options)
