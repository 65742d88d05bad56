"""Links and ranks that tests/test_preflight.py breaks, and a rank that calls `check_links`; result to a file."""

import json
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from hymoe.engine.faults import RunFailed
from hymoe.engine.preflight.links import Hooks, check_links


class Sleeps(Hooks):
    """One rank never begins a test."""

    def __init__(self, test: str, rank: int) -> None:
        self.test, self.rank = test, rank

    def before(self, test: str, rank: int) -> None:
        if (test, rank) == (self.test, self.rank):
            threading.Event().wait()


class Stalls(Sleeps):
    """One rank begins a test and never gets to its end."""

    def before(self, test: str, rank: int) -> None:
        """Begins as it should."""

    def received(self, test: str, rank: int, values: Tensor) -> None:
        super().before(test, rank)


class Fails(Sleeps):
    """One rank's test raises."""

    def before(self, test: str, rank: int) -> None:
        if (test, rank) == (self.test, self.rank):
            raise MemoryError("no room\nmore text")


class Corrupts(Sleeps):
    """One value that a rank receives changes on its way."""

    def before(self, test: str, rank: int) -> None:
        """Begins as it should."""

    def received(self, test: str, rank: int, values: Tensor) -> None:
        if (test, rank) == (self.test, self.rank) and len(values):
            values[-1] += 1


def check(rank: int, size: int, folder: str, hooks: Hooks, is_absent: bool) -> None:
    """A rank of a run; `is_absent`: it never comes to the check."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/meeting", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    if is_absent:
        threading.Event().wait()
    found = {}
    try:
        found["said"] = check_links(
            torch.device("cpu"), dist.FileStore(f"{folder}/board", -1),
            timeout_s=2.0, num_bytes=1 << 14, hooks=hooks,
        )  # fmt: skip
    except RunFailed as error:
        found["failed"] = str(error)
    total = torch.ones(())
    if "said" in found:
        dist.all_reduce(total)  # the default group still works
    found["total"] = total.item()
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
