"""Saves the state of a run while training goes on.

At the end of a step the state is copied to host memory, on a GPU by a stream of its own while the next
forward and backward pass run, which change nothing of it; `before_update` is where the next optimiser step waits.
A thread then writes, with a process group of its own. The next save, and the end, wait for the one before. Where
host memory is short, the state is written from where it lies and training waits.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hymoe.engine import checkpoint_files as files
from hymoe.engine.checkpoint import FORMAT, Group, Parts, write
from hymoe.engine.errors import UserError

HOST_MARGIN = 1.1  # of the bytes of a state, for what the writing itself takes
DISK_MARGIN = 1.02  # of the bytes of a state, for headers and metadata


class Saver:
    """Saves a run's state while it trains; one writer at a time.

    Attributes:
        last_step: of the newest state that this run has begun to save or started from.
    """

    def __init__(
        self,
        folder: Path,
        parts: Callable[[], Parts],
        group: Group,
        *,
        about: dict[str, Any],
        keep_last: int = 2,
        keep_every: int = 0,
        in_background: bool = True,
        say: Callable[..., None] = lambda kind, message, **values: None,
    ) -> None:
        """Writes nothing yet.

        Args:
            folder: that holds the states; made where it is absent.
            parts: this rank's live tensors; asked at each save, because FSDP2 may move a parameter's memory.
            group: all ranks.
            about: what every manifest says beside the run's progress.
            keep_last: newest states that are kept.
            keep_every: states of every so many steps are kept too; 0: none.
            in_background: whether training goes on while a state is written.
            say: takes an event (kind, message, values) of this rank.
        """
        self.last_step: int | None = None
        self._folder, self._parts, self._group, self._about = folder, parts, group, about
        self._keep = {"keep_last": keep_last, "keep_every": keep_every}
        self._in_background, self._say = in_background, say
        self._host: dict[str, Tensor] | None = None
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None
        self._thread: threading.Thread | None = None
        self._result: tuple[str, dict[str, Any]] | None = None
        self._error: BaseException | None = None

    @property
    def has_failed(self) -> bool:
        """Whether the writer of this rank has ended with an error that `wait` will raise."""
        return self._error is not None

    def save(self, step: int, progress: dict[str, Any]) -> None:
        """Saves the state after a step; collective, every rank calls it at the same step.

        Args:
            step: its number.
            progress: where the run stands, in JSON types.

        Raises:
            UserError: the one before could not be written, or there is no room for this one.
        """
        began = time.perf_counter()
        self.wait()
        parts = self._parts()
        size = sum(self._group.gather(_bytes(parts)))
        self._check_disk(step, size)
        content = {"format": FORMAT, "step": step, **self._about, "progress": progress}
        in_background = self._in_background and self._has_room(parts)
        if in_background:
            parts = self._copy_to_host(parts)
        self.last_step = step
        waited = time.perf_counter() - began

        def work() -> None:
            try:
                if self._copied is not None:
                    self._copied.synchronize()
                state = write(self._folder, step, parts, content, self._group)
                gone = files.prune(self._folder, **self._keep) if self._group.rank == 0 else []
                self._result = _report(state, size, time.perf_counter() - began, waited, gone)
            except BaseException as error:  # CheckpointException is none of Exception
                if isinstance(error, UserError) and self._group.rank == 0:
                    # All ranks have stopped writing; a disk that is full must not stay so.
                    files.discard(self._folder, step)
                self._error = error

        if in_background:
            self._thread = threading.Thread(target=work, name=f"save {step}", daemon=True)
            self._thread.start()
        else:
            work()
            self.wait()

    def before_update(self) -> None:
        """Makes the device wait, before it changes the state, until the state has been copied; not the host."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def poll(self) -> None:
        """Says that a save is done, where it is; does not wait."""
        if self._result is not None:
            (kind, values), self._result = self._result, None
            self._say(kind, **values)

    def wait(self) -> None:
        """Waits for the save that is under way.

        Raises:
            UserError: it could not be written; on every rank.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._copied = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        self.poll()

    def leave(self, seconds: float) -> bool:
        """Gives the writer some time to end, for a run that leaves with an error of its own; whether it has ended."""
        if self._thread is not None:
            self._thread.join(seconds)
        return self._thread is None or not self._thread.is_alive()

    def _check_disk(self, step: int, size: int) -> None:
        problem = None
        if self._group.rank == 0:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                needed, free = int(size * DISK_MARGIN), files.free_bytes(self._folder)
                if free < needed:
                    problem = (
                        f"{self._folder / files.name_of(step)}: needs {needed:,} bytes, the disk has {free:,} free; "
                        "make room, or keep fewer states (run.keep_last, run.keep_every)"
                    )
            except OSError as error:
                problem = f"{self._folder}: cannot be made ({error.strerror})"
        if (problem := self._group.first_fault(problem)) is not None:
            raise UserError(problem)

    def _has_room(self, parts: Parts) -> bool:
        """Whether the host has room for a copy of all ranks' parts; the first save's copy serves the later ones."""
        if self._host is not None:
            return True
        wanted = [int(size * HOST_MARGIN) for size in self._group.gather(_bytes(parts))]
        there = min(self._group.gather(available_bytes()))
        if sum(wanted) <= there:
            return True
        self._in_background = False
        self._say(
            "warning",
            message=f"saving in the background needs {sum(wanted):,} bytes of host memory, "
            f"{there:,} are there: training waits while a state is written",
        )
        return False

    def _copy_to_host(self, parts: Parts) -> Parts:
        on_gpu = any(part.tensor.is_cuda for part in parts.values())
        if self._host is None:
            self._host = {
                name: torch.empty(
                    part.tensor.shape, dtype=part.tensor.dtype, pin_memory=part.tensor.is_cuda
                )
                for name, part in parts.items()
            }
            self._stream = torch.cuda.Stream() if on_gpu else None
        if self._stream is None:
            for name, part in parts.items():
                self._host[name].copy_(part.tensor)
        else:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for name, part in parts.items():
                    self._host[name].copy_(part.tensor, non_blocking=True)
                self._copied = self._stream.record_event()
        return {name: replace(part, tensor=self._host[name]) for name, part in parts.items()}


def available_bytes() -> int:
    """Host memory that this machine, or the control group of this process, can still give."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    group = Path("/sys/fs/cgroup")
    limit, used = group / "memory.max", group / "memory.current"
    if limit.is_file() and used.is_file() and (most := limit.read_text().strip()) != "max":
        free = min(free, int(most) - int(used.read_text()))
    return free


def _bytes(parts: Parts) -> int:
    return sum(part.tensor.nbytes for part in parts.values())


def _report(
    state: Path, size: int, seconds: float, waited: float, gone: list[str]
) -> tuple[str, dict[str, Any]]:
    removed = f"; removed {', '.join(gone)}" if gone else ""
    message = f"saved {state.name}: {size / 1e6:,.1f} MB in {seconds:.2f} s, training waited {waited:.2f} s{removed}"
    return "save", {
        "message": message,
        "state": state.name,
        "bytes": size,
        "seconds": seconds,
        "waited_seconds": waited,
        "removed": gone,
    }
