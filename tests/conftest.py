"""Switches that every test needs, and the folder of shared data."""

import os
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = (
        "1"  # read when a kernel is defined: before any import of triton
    )
torch.set_num_threads(1)  # two workers share the machine, and sums keep one order
with torch.device("cpu"):
    # torch remembers on first use which functions a device applies to: those of a test that has replaced
    # `torch.empty` would leave every later `with torch.device("meta")` of this process without effect.
    torch.empty(0)


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder `shared` beside the repository: configs, names and data of the real models."""
    folder = Path(__file__).resolve().parent.parent.parent / "shared"
    if not folder.is_dir():
        pytest.skip(f"{folder} is absent: this test needs the shared data of the real models")
    return folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
