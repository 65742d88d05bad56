"""What ends a run from outside, in one line: memory that is not there, a rank that has died."""

import errno
import os
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from hymoe.engine.recipe import Recipe

# What gloo and the stores say when the process at the other end is gone; their errors have no type of their own.
LOST = (
    "connection closed by peer",
    "connection reset by peer",
    "connection was likely closed",
    "socket closed",
    "broken pipe",
    "remote process exited",
    "connectfullmesh failed",
)


FULL = (errno.ENOSPC, errno.EDQUOT)


class RunFailed(RuntimeError):
    """The run ends with an error that is no fault of the recipe's; its message is one line. Exit status 1."""


class PeerLost(RunFailed):
    """Another rank has died; whoever is left ends too, and one of them says so."""


class PeerWatch:
    """Ends this process when another rank's has died while this one waits for it for ever.

    Over gloo the death of a rank is an error of the next exchange. A GPU's exchange may wait instead, until torchrun
    gives up on this process, which its shutdown timeout may put off for minutes.
    """

    GRACE_S = 10.0  # for the main thread to find out, say so and end by itself

    def __init__(self, pids: dict[int, int], rank: int, may_speak: Callable[[], bool]) -> None:
        """Watches from now on.

        Args:
            pids: rank -> process id, of the other ranks on this machine.
            rank: this one.
            may_speak: whether this rank is the one to say what has happened.
        """
        self._pids, self._rank, self._may_speak = pids, rank, may_speak
        self._ended = threading.Event()
        if pids:
            threading.Thread(target=self._watch, name="peers", daemon=True).start()

    def close(self) -> None:
        """Stops watching: from now on the others may go."""
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(1.0):
            lost = [rank for rank, pid in self._pids.items() if not _is_alive(pid)]
            if lost and not self._ended.wait(self.GRACE_S):
                if self._may_speak():
                    said = f"rank {lost[0]} has died; leaving without a save"
                    sys.stderr.write(f"train.py: [rank {self._rank}] {said}\n")
                    sys.stderr.flush()
                os._exit(1)


def _is_alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has collected yet has died all the same."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def is_first(address: str, port: int) -> bool:
    """Whether no other rank has asked this before, by the store at an address."""
    options = {"timeout": timedelta(seconds=5), "wait_for_workers": False}
    try:
        store = dist.TCPStore(address, port, is_master=False, **options)
        return store.add("hymoe/spoken", 1) == 1
    except RuntimeError:  # torchrun has gone: better said twice than never
        return True


def explain(error: BaseException, doing: str, recipe: Recipe) -> RunFailed | None:
    """The line for an error that a user can do something about; None for any other.

    Args:
        error: what was raised.
        doing: what the run was at, such as "step 12: backward pass of micro-step 3 of 4".
        recipe: for the keys that would help.
    """
    first = str(error).splitlines()[0] if str(error) else type(error).__name__
    if _is_out_of_memory(error):
        return RunFailed(f"out of memory, {doing}: {first.rstrip('.')}. {_remedy(recipe)}")
    if isinstance(error, OSError) and error.errno in FULL:
        return RunFailed(f"{error.strerror}, {doing}; make room, the same command goes on")
    if _is_lost_peer(error):
        return PeerLost(
            f"another rank has died, {doing}; nothing was saved after the last line 'saved'"
        )
    return None


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def _is_lost_peer(error: BaseException) -> bool:
    if isinstance(error, dist.DistError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError | ConnectionError) and any(part in text for part in LOST)


def _remedy(recipe: Recipe) -> str:
    """Recipe keys that would need less memory, in the order of what they cost in speed or precision."""
    advice = []
    if recipe.train.keep != "inputs":
        advice.append(f'train.keep = "inputs" (is {recipe.train.keep})')
    together = recipe.train.micro_steps_together
    if together != 1 and recipe.train.step_tokens > recipe.data.micro_tokens:
        advice.append(f"train.micro_steps_together = 1 (is {together or 'all of a step'})")
    if recipe.data.micro_tokens > recipe.data.seq_len:
        advice.append(f"a smaller data.micro_tokens (is {recipe.data.micro_tokens:,})")
    if recipe.optim.rounding == "exact":
        advice.append('optim.rounding = "stochastic" (is exact: 2 bytes a parameter)')
    advice += ["more ranks", f"a smaller data.seq_len (is {recipe.data.seq_len:,})"]
    return f"Less is needed with {', '.join(advice)}; --dry-run shows the sums"
