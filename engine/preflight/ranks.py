"""The processes that preflight tests with, one a rank, and what each does when asked.

A transfer that hangs can be ended by nothing but the end of its process. So the tests run in children; the parent asks
all or some of them for one test at a time, waits until its timeout, and knows by then who began and who finished.
"""

import collections
import contextlib
import multiprocessing
import signal
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from hymoe.engine.preflight.links import Hooks, Links, first_line, holding_up, name_ranks

GRACE_S = 2.0  # for other ranks to say what they know once one has failed


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much the tests move and compute."""

    meet_bytes: int  # a pair's first message
    pair_bytes: int
    collective_bytes: int  # S of links.py
    matmul: int  # rows and columns of square bf16 matrices
    copy_bytes: int
    repeats: int
    matmul_seconds: float  # long enough that a card that gets too hot or too little power shows it


GPU = Sizes(
    meet_bytes=16 << 20,
    pair_bytes=128 << 20,
    collective_bytes=256 << 20,
    matmul=8192,
    copy_bytes=1 << 30,
    repeats=5,
    matmul_seconds=1.0,
)
CPU = Sizes(
    meet_bytes=1 << 16,
    pair_bytes=1 << 20,
    collective_bytes=1 << 20,
    matmul=128,
    copy_bytes=4 << 20,
    repeats=2,
    matmul_seconds=0.0,
)


class Broken(Exception):
    """A test that did not come to its end on every rank."""

    def __init__(self, test: str, timeout_s: float) -> None:
        """Nothing is known yet."""
        super().__init__(test)
        self.test, self.timeout_s = test, timeout_s
        self.died: dict[int, str] = {}  # rank -> how
        self.failed: dict[int, str] = {}  # rank -> its error; the process lives
        self.silent: list[int] = []  # did not even begin
        self.waiting: dict[int, int] = {}  # began and did not finish -> transfers begun
        self.pairs: list[tuple[int, int]] = []  # of those ranks, where the test is one of pairs

    @property
    def ranks(self) -> set[int]:
        """All of these."""
        return {*self.died, *self.failed, *self.silent, *self.waiting}

    @property
    def is_over(self) -> bool:
        """Whether no other test can follow."""
        return bool(self.died or self.silent or self.waiting)

    def __str__(self) -> str:
        """In one line: who, and what each of them did."""
        said = [f"rank {rank} {how}" for rank, how in sorted((self.died | self.failed).items())]
        if self.silent:
            said.append(f"{name_ranks(self.silent)} did not begin within {self.timeout_s:g} s")
        if self.waiting:
            said.append(f"{holding_up(self.waiting)} within {self.timeout_s:g} s")
        return "; ".join(said)


@dataclass(frozen=True)
class _Setup:
    size: int
    device_type: str
    port: int
    timeout_s: float
    sizes: Sizes
    hooks: Hooks


class Ranks:
    """The children, as their parent sees them."""

    def __init__(
        self,
        size: int,
        device_type: str,
        timeout_s: float,
        hooks: Hooks | None = None,
        method: str | None = None,
    ) -> None:
        """Starts them; `ask("start")` must come first.

        Args:
            size: number of ranks.
            device_type: cuda (one card a rank) or cpu.
            timeout_s: of each test.
            hooks: for tests; must be picklable.
            method: of starting processes; None: what fits the device.
        """
        # Where no GPU is at stake a server that has imported torch once forks the ranks, which saves seconds.
        context = multiprocessing.get_context(
            method or ("spawn" if device_type == "cuda" else "forkserver")
        )
        if context.get_start_method() == "forkserver":
            context.set_forkserver_preload([__name__])
        # Lives here, so that it outlives any rank.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        sizes = GPU if device_type == "cuda" else CPU
        setup = _Setup(
            size, device_type, self._store.port, timeout_s, sizes, hooks or Hooks()
        )  # fmt: skip
        self.size, self._timeout_s = size, timeout_s
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=serve, args=(rank, setup, theirs), name=f"preflight rank {rank}", daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def ask(
        self,
        test: str,
        *arguments: Any,
        ranks: Iterable[int] | None = None,
        timeout_s: float | None = None,
    ) -> dict[int, Any]:
        """Lets ranks run a test and waits for all of them.

        Args:
            test: a method of `Rank`.
            *arguments: for it.
            ranks: who; None: all.
            timeout_s: None: that of every test.

        Returns:
            rank -> what the test returned.

        Raises:
            Broken: someone died, failed or did not finish in time.
        """
        broken = Broken(test, timeout_s or self._timeout_s)
        deadline = time.monotonic() + broken.timeout_s
        answers: dict[int, Any] = {}
        began: collections.Counter[int] = collections.Counter()
        missing = set(range(self.size) if ranks is None else ranks)
        for rank in sorted(missing):
            with contextlib.suppress(BrokenPipeError):  # it has died: found below, where it is read
                self._pipes[rank].send((test, arguments))
        while missing and (left := deadline - time.monotonic()) > 0:
            by_pipe = {self._pipes[rank]: rank for rank in missing}
            for pipe in wait(list(by_pipe), timeout=left):
                rank = by_pipe[pipe]
                kind, value = self._receive(rank)
                if kind == "began":
                    began[rank] += 1
                    continue
                missing.discard(rank)
                if kind == "done":
                    answers[rank] = value
                else:
                    (broken.died if kind == "died" else broken.failed)[rank] = value
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        broken.silent = sorted(missing - set(began))
        broken.waiting = {rank: began[rank] for rank in sorted(missing) if rank in began}
        if broken.ranks:
            raise broken
        return dict(sorted(answers.items()))

    def _receive(self, rank: int) -> tuple[str, Any]:
        try:
            return self._pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            self._processes[rank].join(GRACE_S)
            code = self._processes[rank].exitcode
            how = (
                f"was killed by signal {-code}" if code and code < 0 else f"ended with code {code}"
            )
            return "died", how

    def close(self, kill: bool) -> list[int]:
        """Ends the children.

        Args:
            kill: at once, because one of them hangs.

        Returns:
            Ranks whose process not even SIGKILL could end, as one that waits inside the driver.
        """
        for pipe in self._pipes:
            pipe.close()  # a rank that waits for its next test takes this for the end
        for process in self._processes:
            if not kill:
                process.join(10)
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join(5)
        return [rank for rank, process in enumerate(self._processes) if process.is_alive()]


def serve(rank: int, setup: _Setup, pipe: Connection) -> None:
    """A child: does what it is asked until the parent closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, who ends this process
    if setup.device_type == "cpu":
        torch.set_num_threads(1)
    worker = Rank(rank, setup, lambda: pipe.send(("began", None)))
    while True:
        try:
            test, arguments = pipe.recv()
        except EOFError:
            break
        try:
            setup.hooks.before(test, rank)
            pipe.send(("began", None))
            answer = ("done", getattr(worker, test)(*arguments))
        except Exception as error:
            answer = ("failed", f"failed with {first_line(error)}")
        pipe.send(answer)
    if dist.is_initialized():
        dist.destroy_process_group()


class Rank:
    """What a rank can be asked for; every public method is a test."""

    def __init__(self, rank: int, setup: _Setup, on_begin: Callable[[], None]) -> None:
        """Starts nothing."""
        self._rank, self._setup, self._sizes = rank, setup, setup.sizes
        self._on_begin = on_begin
        is_cuda = setup.device_type == "cuda"
        self._device = torch.device("cuda", rank) if is_cuda else torch.device("cpu")

    def start(self) -> dict[str, Any]:
        """The device: its name and memory."""
        if self._device.type != "cuda":
            return {}
        torch.cuda.set_device(self._device)
        properties = torch.cuda.get_device_properties(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        capability = f"sm_{properties.major}{properties.minor}"
        return {
            "name": properties.name,
            "uuid": str(properties.uuid),
            "total_bytes": total,
            "free_bytes": free,
            "capability": capability,
            "built_for": torch.cuda.get_arch_list(),
        }

    def join(self) -> None:
        """The process group; NCCL's communicator too, so that later tests time transfers only."""
        setup = self._setup
        store = dist.TCPStore(
            "127.0.0.1", setup.port, is_master=False, wait_for_workers=False,
            timeout=timedelta(seconds=setup.timeout_s),
        )  # fmt: skip
        is_cuda = self._device.type == "cuda"
        dist.init_process_group(
            "nccl" if is_cuda else "gloo",
            store=store,
            rank=self._rank,
            world_size=setup.size,
            # The parent's clock comes first; NCCL's own would end this process without a word.
            timeout=timedelta(seconds=10 * setup.timeout_s),
            device_id=self._device if is_cuda else None,
        )
        self._links = Links(self._device, setup.hooks, self._on_begin)

    def matmul(self) -> dict[str, float]:
        """TFLOP/s of a bf16 product: the median over time, and at the end, where a card that throttles is slower."""
        n = self._sizes.matmul
        a, b = torch.randn(2, n, n, device=self._device).bfloat16()
        out = torch.empty_like(a)
        batch = 10 if self._device.type == "cuda" else 1
        torch.mm(a, b, out=out)
        self._synchronize()
        began, rates = time.perf_counter(), []
        while len(rates) < 5 or time.perf_counter() - began < self._sizes.matmul_seconds:
            lap = time.perf_counter()
            for _ in range(batch):
                torch.mm(a, b, out=out)
            self._synchronize()
            rates.append(2 * n**3 * batch / (time.perf_counter() - lap) / 1e12)
        return {"tflop_per_s": statistics.median(rates), "at_end": statistics.median(rates[-5:])}

    def copy(self) -> dict[str, float]:
        """GB/s of a copy inside the device's memory; a byte read and a byte written count as two."""
        source = torch.zeros(self._sizes.copy_bytes // 4, dtype=torch.int32, device=self._device)
        target = torch.empty_like(source)
        target.copy_(source)
        rates = []
        for _ in range(5):
            self._synchronize()
            began = time.perf_counter()
            target.copy_(source)
            self._synchronize()
            rates.append(2 * self._sizes.copy_bytes / (time.perf_counter() - began) / 1e9)
        return {"gb_per_s": statistics.median(rates)}

    def meet(self, partners: dict[int, int]) -> dict[str, Any]:
        """A first message both ways between the pairs of a round."""
        return self._links.meet(partners, self._sizes.meet_bytes)

    def pair(self, low: int, high: int) -> dict[str, Any]:
        """Speeds between two ranks."""
        return self._links.pair(low, high, self._sizes.pair_bytes, self._sizes.repeats)

    def all_gather(self) -> dict[str, Any]:
        """See links.py."""
        return self._collective("all_gather")

    def all_to_all(self) -> dict[str, Any]:
        """See links.py."""
        return self._collective("all_to_all")

    def reduce_scatter(self) -> dict[str, Any]:
        """See links.py."""
        return self._collective("reduce_scatter")

    def _collective(self, name: str) -> dict[str, Any]:
        return self._links.collective(name, self._sizes.collective_bytes, self._sizes.repeats)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
