"""What the links between ranks carry: transfers that are checked value by value, and timed.

Bandwidth is what one rank sends over the time, the "bus bandwidth" of nccl-tests, which can be compared with what a
link can do whatever the number of ranks n and the size S in bytes:

    pair            S / t                  S = the message
    all_gather      S / t * (n - 1) / n    S = the gathered whole
    reduce_scatter  S / t * (n - 1) / n    S = a rank's whole input
    all_to_all      S / t * (n - 1) / n    S = a rank's whole input

Every rank knows what it must receive without having been told: values follow from sender, receiver and place.

`check_links` is the short form at the start of a run. Each stage runs in a thread of its own, so that a transfer that
never ends is found by the clock; what became of it each rank tells a store, which no dead link can stop, and from there
every rank reads the same verdict.
"""

import functools
import itertools
import json
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hymoe.engine.faults import RunFailed

_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # torch renames them
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

COLLECTIVES = ("all_gather", "all_to_all", "reduce_scatter")
LATENCY_BYTES = 1024  # a rank's part; small enough that only latency counts
GRACE_S = 5.0  # beyond the timeout, for the others' findings to reach the store


class Hooks:
    """Where tests break a rank or a link; does nothing."""

    def before(self, test: str, rank: int) -> None:
        """Called before a rank begins a test."""

    def received(self, test: str, rank: int, values: Tensor) -> None:
        """Called with what a rank has received, before it is checked."""


@dataclass(frozen=True)
class Transfer:
    """One exchange, ready to run again and again."""

    run: Callable[[], None]
    received: Tensor  # (count,) int32 or float32; of size 0 on a rank that only sends
    expected: Tensor  # the same shape and dtype
    senders: tuple[int, ...]  # whose parts `received` has, in order; none where they are summed
    sent_bytes: int  # by one rank


class Links:
    """Transfers between the ranks of a process group."""

    def __init__(
        self,
        device: torch.device,
        hooks: Hooks,
        on_begin: Callable[[], None],
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """All ranks of the world take part.

        Args:
            device: of this rank.
            hooks: for tests.
            on_begin: called before each series of transfers: a rank that has begun fewer than others holds them up.
            group: None: the default group.
        """
        self.device, self.hooks, self.on_begin, self.group = device, hooks, on_begin, group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def collective(self, name: str, num_bytes: int, repeats: int) -> dict[str, Any]:
        """One of COLLECTIVES, by all ranks.

        Returns:
            gb_per_s: of what one rank sends; latency_us: of a small one; corrupt: what arrived wrong, one text each.
        """
        small, latency = self._run(name, self._collective(name, LATENCY_BYTES * self.size), 10)
        large, rate = self._run(name, self._collective(name, num_bytes), repeats)
        return {"gb_per_s": rate, "latency_us": latency, "corrupt": small + large}

    def pair(self, low: int, high: int, num_bytes: int, repeats: int) -> dict[str, Any]:
        """Messages between two ranks, one direction after the other; only these two call it.

        Returns:
            As `collective`, with gb_per_s and latency_us of what this rank has received.
        """
        found: dict[str, Any] = {"corrupt": []}
        for source, target in ((low, high), (high, low)):
            small, latency = self._run("pair", self._message(source, target, LATENCY_BYTES), 10)
            large, rate = self._run("pair", self._message(source, target, num_bytes), repeats)
            if target == self.rank:
                found = {"gb_per_s": rate, "latency_us": latency, "corrupt": small + large}
        return found

    def meet(self, partners: dict[int, int], num_bytes: int) -> dict[str, Any]:
        """Both directions at once between all pairs of `partners`, rank -> rank; a rank without one is idle."""
        if self.rank not in partners:
            return {"corrupt": []}
        transfer = self._swap(partners[self.rank], num_bytes)
        corrupt, rate = self._run("meet", transfer, 1)
        return {"gb_per_s": rate, "corrupt": corrupt}

    def _run(self, test: str, transfer: Transfer, repeats: int) -> tuple[list[str], float]:
        """What arrived wrong, and the speed: GB/s, or microseconds of one transfer where it is a small one."""
        wrong = []
        for times in (1, repeats):  # the first one makes connections, and is checked by itself
            self.on_begin()
            transfer.received.zero_()
            self._synchronize()
            began = time.perf_counter()
            laps = [began]
            for _ in range(times):
                transfer.run()
                if transfer.sent_bytes <= LATENCY_BYTES * self.size:
                    self._synchronize()
                    laps.append(time.perf_counter())
            self._synchronize()
            seconds = (time.perf_counter() - began) / times
            self.hooks.received(test, self.rank, transfer.received)
            wrong += self._wrong(transfer)
        if len(laps) > 1:
            return wrong[:1], statistics.median(b - a for a, b in itertools.pairwise(laps)) * 1e6
        return wrong[:1], transfer.sent_bytes / seconds / 1e9

    def _wrong(self, transfer: Transfer) -> list[str]:
        found, expected = transfer.received, transfer.expected
        places = (found != expected).nonzero().flatten()
        if not len(places):
            return []
        place = int(places[0])
        part = found.numel() // max(1, len(transfer.senders))
        sent = f"sent by rank {transfer.senders[place // part]}" if transfer.senders else "summed"
        return [
            f"rank {self.rank}: {len(places):,} of {found.numel():,} values {sent} are wrong, the first at {place:,}: "
            f"found {found[place].item()}, expected {expected[place].item()}"
        ]

    def _message(self, source: int, target: int, num_bytes: int) -> Transfer:
        is_source = self.rank == source
        values = self._values(source, target, num_bytes // 4)
        received = values[:0] if is_source else torch.empty_like(values)
        operation = (
            dist.P2POp(dist.isend, values, group=self.group, group_peer=target)
            if is_source
            else dist.P2POp(dist.irecv, received, group=self.group, group_peer=source)
        )
        expected = values[:0] if is_source else values
        return Transfer(
            lambda: _wait_all([operation]), received, expected, (source,), num_bytes // 4 * 4
        )

    def _swap(self, partner: int, num_bytes: int) -> Transfer:
        count = num_bytes // 4
        sent, expected = (
            self._values(self.rank, partner, count),
            self._values(partner, self.rank, count),
        )
        received = torch.empty_like(expected)
        operations = [
            dist.P2POp(dist.isend, sent, group=self.group, group_peer=partner),
            dist.P2POp(dist.irecv, received, group=self.group, group_peer=partner),
        ]
        return Transfer(lambda: _wait_all(operations), received, expected, (partner,), count * 4)

    def _collective(self, name: str, num_bytes: int) -> Transfer:
        """`num_bytes` is the S of the head of this file."""
        ranks, part = range(self.size), num_bytes // 4 // self.size
        sent_bytes = (self.size - 1) * part * 4
        if name == "all_gather":
            sent = self._values(self.rank, 0, part)  # (part,), gathered to (size * part,)
            expected = torch.cat([self._values(r, 0, part) for r in ranks])
            operation = _all_gather
        elif name == "all_to_all":
            sent = torch.cat([self._values(self.rank, r, part) for r in ranks])
            expected = torch.cat([self._values(r, self.rank, part) for r in ranks])
            operation = dist.all_to_all_single
        else:  # small whole numbers, so that their sum is exact in any order
            sent = torch.cat([self._values(self.rank, r, part) % 1021 for r in ranks]).float()
            expected = sum(self._values(r, self.rank, part) % 1021 for r in ranks).float()
            operation = _reduce_scatter
        received = torch.empty_like(expected)
        senders = () if name == "reduce_scatter" else tuple(ranks)
        return Transfer(
            lambda: operation(received, sent, group=self.group),
            received,
            expected,
            senders,
            sent_bytes,
        )

    def _values(self, source: int, target: int, count: int) -> Tensor:
        """(count,) int32, what `source` sends to `target`."""
        places = torch.arange(count, dtype=torch.int32, device=self.device)
        return places.mul_(1664525).add_(1013904223 + 7919 * source + 104729 * target)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _wait_all(operations: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def rounds(size: int) -> list[dict[int, int]]:
    """Every pair of ranks once, in as few rounds as possible: in each, rank -> partner, both ways.

    The circle method of tournaments: one place stays, the others move on by one; with an odd number one is idle.
    """
    places = [*range(size), *([] if size % 2 == 0 else [-1])]
    half, found = len(places) // 2, []
    for _ in range(len(places) - 1):
        pairs = [
            (a, b)
            for a, b in zip(places[:half], reversed(places[half:]), strict=True)
            if -1 not in (a, b)
        ]
        found.append(dict(pairs) | {b: a for a, b in pairs})
        places = [places[0], places[-1], *places[1:-1]]
    return found


def check_links(
    device: torch.device,
    store: dist.Store,
    timeout_s: float = 20.0,
    num_bytes: int = 16 << 20,
    hooks: Hooks | None = None,
) -> str:
    """Whether every link answers and carries what it is given; collective, some seconds.

    Args:
        device: of this rank.
        store: that all ranks reach, such as torchrun's; a client of this rank's own, without keys of an earlier check.
        timeout_s: for each stage.
        num_bytes: of a message.
        hooks: for tests.

    Returns:
        The speeds in one line.

    Raises:
        RunFailed: on every rank that still runs, with one text: the rank that has not answered, the pair whose link
            hangs, or what arrived wrong.
    """
    hooks = hooks or Hooks()
    store = dist.PrefixStore("hymoe/links", store)
    board = _Board(store, dist.get_rank(), dist.get_world_size(), device, timeout_s, hooks)
    board.stage("arrival", dict)
    made: list[Links] = []

    def join() -> dict[str, Any]:
        group = dist.new_group(
            # NCCL's own watchdog ends the process without a word when this is over: the board's clock must be first.
            timeout=timedelta(seconds=10 * timeout_s),
            # At once: with an odd number of ranks one is idle in the first round, and NCCL would wait for it.
            device_id=device if device.type == "cuda" else None,
        )
        made.append(Links(device, hooks, board.count, group))
        return {}

    board.stage("group", join)
    (links,) = made
    speeds: dict[str, list[float]] = {"pairs": []}
    try:
        for partners in rounds(links.size):
            run = functools.partial(links.meet, partners, num_bytes)
            speeds["pairs"] += board.stage("meet", run, partners)
        for name in COLLECTIVES:
            run = functools.partial(links.collective, name, num_bytes * links.size, 4)
            speeds[name] = board.stage(name, run)
    except RunFailed:
        _abandon(links)
        raise
    dist.destroy_process_group(links.group)
    lowest = ", ".join(f"{shown(name)} {min(found):.3g}" for name, found in speeds.items() if found)
    return f"all ranks answer; GB/s that the slowest sends: {lowest}"


class _Board:
    """Where ranks write what became of a stage, and read what became of it on the others."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        device: torch.device,
        timeout_s: float,
        hooks: Hooks,
    ) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._device, self._timeout_s, self._hooks = device, timeout_s, hooks
        self._stage = self._begun = 0

    def count(self) -> None:
        """This rank has begun another series of transfers."""
        self._begun += 1

    def stage(
        self, test: str, run: Callable[[], dict[str, Any]], partners: dict[int, int] | None = None
    ) -> list[float]:
        """Runs it, against the clock, on all ranks.

        Args:
            test: its name.
            run: what this rank does.
            partners: in a stage of pairs, rank -> partner.

        Returns:
            GB/s by rank, of those that measured any.

        Raises:
            RunFailed: on every rank, with one text.
        """
        self._stage += 1
        found = self._against_the_clock(test, run)
        self._store.set(f"{self._stage}/{self._rank}", json.dumps(found))
        everyone = self._everyone()
        fault = verdict(test, partners or {}, everyone, self._timeout_s)
        if fault is not None:
            # The first text wins, so that all ranks say the same.
            raise RunFailed(self._store.compare_set("verdict", "", fault).decode())
        return [one["gb_per_s"] for one in everyone if one and "gb_per_s" in one]

    def _against_the_clock(self, test: str, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {"hangs": True}

        def target() -> None:
            try:
                if self._device.type == "cuda":
                    torch.cuda.set_device(self._device)  # each thread has its own
                self._hooks.before(test, self._rank)
                result = run()
            except Exception as error:
                result = {"failed": first_line(error)}
            found.update(result, hangs=False)

        thread = threading.Thread(target=target, name=f"links: {test}", daemon=True)
        thread.start()
        thread.join(self._timeout_s)
        return {"begun": self._begun, **found}

    def _everyone(self) -> list[dict[str, Any] | None]:
        """Every rank's finding; None of one that wrote none in time.

        Raises:
            RunFailed: another rank has already given its verdict.
        """
        keys = [f"{self._stage}/{rank}" for rank in range(self._size)]
        deadline = time.monotonic() + self._timeout_s + GRACE_S
        while not self._store.check(keys) and time.monotonic() < deadline:
            if self._store.check(["verdict"]):
                raise RunFailed(self._store.get("verdict").decode())
            time.sleep(0.01)
        return [
            json.loads(self._store.get(key)) if self._store.check([key]) else None for key in keys
        ]


def verdict(
    test: str, partners: dict[int, int], found: list[dict[str, Any] | None], timeout_s: float
) -> str | None:
    """What is wrong with a stage, None where nothing is.

    Args:
        test: its name.
        partners: rank -> partner, in a stage of pairs.
        found: by rank; None: no answer.
        timeout_s: how long was waited.
    """
    silent = [rank for rank, one in enumerate(found) if one is None]
    failed = [
        f"rank {r}: {one['failed']}" for r, one in enumerate(found) if one and "failed" in one
    ]
    hung = {rank: one["begun"] for rank, one in enumerate(found) if one and one["hangs"]}
    corrupt = [text for one in found if one for text in one.get("corrupt", ())]
    said = []
    if silent:
        said.append(f"{name_ranks(silent)} did not answer within {timeout_s + GRACE_S:g} s")
    if failed:
        said.append("; ".join(failed))
    if hung and partners:
        pairs = sorted({tuple(sorted((rank, partners[rank]))) for rank in hung if rank in partners})
        named = ", ".join(f"{low} and {high}" for low, high in pairs)
        said.append(f"the link between ranks {named} hangs: nothing arrived within {timeout_s:g} s")
    elif hung:
        said.append(f"{holding_up(hung)} within {timeout_s:g} s")
    said += corrupt[:2]
    if not said:
        return None
    return f"links, {shown(test)}: {'; '.join(said)}. scripts/preflight.py says more, with remedies"


def holding_up(begun: dict[int, int]) -> str:
    """Who of those that did not get through is the reason: whoever has begun fewer transfers than others.

    Args:
        begun: rank -> transfers begun, of all that did not get through.
    """
    behind = [rank for rank, count in begun.items() if count < max(begun.values())]
    others = [rank for rank in begun if rank not in behind]
    if behind:
        return f"{name_ranks(behind)} stopped on the way and {name_ranks(others)} waited in vain"
    return f"{name_ranks(others)} did not get through"


def shown(test: str) -> str:
    """A test's name as a person reads it."""
    return {"meet": "first messages"}.get(test, test.replace("_", "-"))


def name_ranks(ranks: list[int]) -> str:
    """Such as `rank 3`, or `ranks 0, 3`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def first_line(error: BaseException) -> str:
    """An error's kind and the first line of its message."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


def _abandon(links: Links) -> None:
    """Ends what still runs on a GPU, so that the end of the process need not wait for it; itself not for ever."""
    if links.device.type == "cuda":
        thread = threading.Thread(target=links.group.abort, name="links: abort", daemon=True)
        thread.start()
        thread.join(GRACE_S)
