"""Every kernel test runs with poisoned memory, and leaves no peer package behind.

Poison: what a kernel does not write is NaN, and shows.
"""

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    def poison(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = make(*args, **kwargs)
            if tensor.dtype.is_floating_point:
                return tensor.fill_(torch.nan)
            return tensor.fill_(1 if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).min)

        return made

    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
    ):
        monkeypatch.setattr(owner, name, poison(getattr(owner, name)))


_peers: dict[
    str, ModuleType
] = {}  # kept, because their operators can be registered once in a process


@pytest.fixture(autouse=True)
def peers_leave_with_the_test() -> Iterator[None]:
    """Without a GPU, mamba-ssm and causal-conv1d work for these tests only: transformers, in the next file, would
    take an imported one for a package that works."""
    if torch.cuda.is_available():
        yield
        return
    sys.modules.update(_peers)
    yield
    for name in list(sys.modules):
        if name.split(".")[0] in ("mamba_ssm", "causal_conv1d"):
            _peers[name] = sys.modules.pop(name)
