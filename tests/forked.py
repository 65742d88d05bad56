"""Runs of scripts/train.py on several ranks without the seconds that imports take, and with faults at exact moments.

A parent process imports everything once and forks the ranks of each run; a fault is a patch that a rank makes to
itself before it starts. `python tests/forked.py` is that parent.
"""

import contextlib
import errno
import functools
import importlib
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent
SECONDS = 120  # after which a run counts as hung


@dataclass
class Ran:
    """What became of a run: exit codes by rank (negative: killed by that signal), and all that it printed."""

    codes: list[int]
    out: str


class Ranks:
    """The parent of forked ranks, as the tests see it."""

    def __init__(self, folder: Path) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
        self._folder, self._runs = folder, 0
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )  # fmt: skip

    def start(self, ranks: int, *arguments: Any, **fault: Any) -> list[int]:
        """Process ids of the ranks; `wait` must follow."""
        self._runs += 1
        self._out = self._folder / f"output_{self._runs}.txt"
        request = {"ranks": ranks, "arguments": list(map(str, arguments)), "fault": fault}
        self._process.stdin.write(json.dumps({**request, "out": str(self._out)}) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def said(self) -> str:
        """What the run has printed so far."""
        return self._out.read_text() if self._out.exists() else ""

    def wait(self) -> Ran:
        codes = json.loads(self._process.stdout.readline())
        return Ran(codes, self._out.read_text())

    def __call__(self, ranks: int, *arguments: Any, **fault: Any) -> Ran:
        self.start(ranks, *arguments, **fault)
        return self.wait()

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._process.stdout.close()


@contextlib.contextmanager
def ranks(folder: Path) -> Iterator[Ranks]:
    parent = Ranks(folder)
    try:
        yield parent
    finally:
        parent.close()


def serve() -> None:
    """One request a line: forks its ranks, tells their ids, waits, tells their exit codes."""
    import torch
    import torch.distributed as dist

    for module in ("tyro", "hymoe.engine.run", "hymoe.engine.demo"):
        importlib.import_module(module)
    torch.set_num_threads(1)
    for line in sys.stdin:
        request = json.loads(line)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        pids: list[int] = []
        for rank in range(request["ranks"]):
            pid = os.fork()
            if pid == 0:
                os.setpgid(0, pids[0] if pids else 0)
                _rank(rank, store.port, request)
            with contextlib.suppress(PermissionError, ProcessLookupError):
                os.setpgid(pid, pids[0] if pids else pid)
            pids.append(pid)
        _tell(pids)
        _tell([_exit_code(pid) for pid in pids])


def _tell(value: list[int]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def _exit_code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _rank(rank: int, port: int, request: dict[str, Any]) -> None:
    code = 70
    try:
        signal.alarm(SECONDS)
        out = os.open(request["out"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for target in (1, 2):
            os.dup2(out, target)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        # As torchrun does, whose store outlives the ranks.
        where |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
        ranks_ = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": request["ranks"]}
        os.environ.update(where | {key: str(value) for key, value in ranks_.items()})
        fault = request["fault"]
        if fault and fault.pop("rank", rank) == rank:
            FAULTS[fault.pop("fault")](**fault)
        sys.argv = ["train.py", *request["arguments"]]
        try:
            runpy.run_path(str(REPO / "scripts" / "train.py"), run_name="__main__")
        except SystemExit as left:
            code = left.code or 0
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def kill_all() -> None:
    os.killpg(0, signal.SIGKILL)


def kill_one() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def usr1_twice() -> None:
    os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGTERM)


def no_room() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def no_memory() -> None:
    import torch

    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore text")


ACTIONS = {f.__name__: f for f in (kill_all, kill_one, terminate, usr1_twice, no_room, no_memory)}


def before(owner: Any, name: str, action: Callable[[], None], when: Callable[..., bool]) -> None:
    """Patches a function: `action` first, at the first call for which `when` holds."""
    original, done = getattr(owner, name), []

    def patched(*args: Any, **kwargs: Any) -> Any:
        if not done and when(*args, **kwargs):
            done.append(True)
            action()
        return original(*args, **kwargs)

    setattr(owner, name, patched)


def at(where: str, action: str, step: int = 0) -> None:
    """An action at a moment of the run."""
    from hymoe.engine import checkpoint_files, resume, saver, train

    act = ACTIONS[action]
    saving: list[int] = []  # the step whose state is being written

    def note(folder: Path, number: int, *rest: Any) -> bool:
        saving.append(number)
        return False

    def is_saving(*args: Any, **kwargs: Any) -> bool:
        return saving[-1:] == [step]

    before(saver, "write", no_room, note)
    if where == "step":
        before(train, "take_step", act, lambda job, number: number == step)
    elif where == "loading":
        before(resume, "load_weights", act, lambda *a, **k: True)
    elif where == "resuming":
        before(resume, "load", act, lambda *a: True)
    elif where == "evaluation":
        before(train, "evaluate", act, lambda job: job.outcome.steps == step)
    elif where == "shard":  # bytes of this rank are in a file that is not synced
        before(os, "fsync", act, is_saving)
    elif where == "manifest":  # all files are there, the state is not published
        before(checkpoint_files, "publish", act, is_saving)
    elif where == "rename":
        before(
            Path, "rename", act, lambda self, to: is_saving() and Path(to).name.startswith("step_")
        )
    elif where == "prune":  # the state is published, an old one half removed
        before(shutil, "rmtree", act, lambda path, *a, **k: str(path).endswith(".removed"))
    elif where == "export":
        from hymoe.engine import run

        before(run, "save_pretrained", act, lambda *a, **k: True)
    else:
        raise ValueError(where)


def hang(step: int) -> None:
    """Rank 1 dies in a step, and rank 0 never finds out, as on a GPU that waits for the other's data."""
    from hymoe.engine import faults, train

    faults.PeerWatch.GRACE_S = 0.5
    act = kill_one if os.environ["RANK"] == "1" else functools.partial(time.sleep, SECONDS)
    before(train, "take_step", act, lambda job, number: number == step)


def not_finite(first: int, last: int) -> None:
    """The gradient of one parameter is NaN on this rank in some steps."""
    from hymoe.engine import parallel, train

    number = [0]
    before(train, "take_step", no_room, lambda job, step: number.append(step) or False)
    original = parallel.Alone.gradients

    def gradients(self: Any, lm: Any) -> Any:
        grads = original(self, lm)
        if first <= number[-1] <= last:
            names = [name for name, _ in lm.named_parameters()]
            grads[names.index("layers.3.mixer.up_proj.weight")].view(-1)[0] = float("nan")
        return grads

    parallel.Alone.gradients = gradients


def disk(free: int, after: int) -> None:
    """The disk is found to be full at the save after so many."""
    from hymoe.engine import checkpoint_files

    asked: list[int] = []
    original = checkpoint_files.free_bytes

    def free_bytes(folder: Path) -> int:
        asked.append(1)
        return free if len(asked) > after else original(folder)

    checkpoint_files.free_bytes = free_bytes


FAULTS: dict[str, Callable[..., None]] = {
    "at": at,
    "not_finite": not_finite,
    "disk": disk,
    "hang": hang,
}


if __name__ == "__main__":
    serve()
