"""Every kernel test runs with poisoned memory: what a kernel does not write is NaN, and shows."""

from collections.abc import Callable
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
