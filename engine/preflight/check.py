"""Looks at a machine before a long run does: what is there, how fast it is, and whether every link answers.

The parent (`preflight`) starts a process for each rank (`ranks.py`), lets them run one test at a time and
judges what they measured by what the device should give (`devices.py`). The order narrows a fault down: processes,
the group, each pair's first message, each pair's speed, collectives. A test that does not end is the last one: the
ranks that it hangs on are named, the rest is listed as not run.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hymoe.engine.devices import GIB, Device, known_device
from hymoe.engine.errors import UserError
from hymoe.engine.preflight.links import COLLECTIVES, Hooks, rounds, shown
from hymoe.engine.preflight.machine import (
    HMM,
    IOMMU,
    SHM,
    holders,
    host_lines,
    pcie_lines,
    pcie_widths,
    software_lines,
)
from hymoe.engine.preflight.ranks import Broken, Ranks
from hymoe.engine.preflight.report import Line, Result

START_SECONDS = 90.0  # processes, imports and CUDA contexts, on top of nothing
# Shares of what a device should give, below which a figure is (warn, bad). Kernels reach 70 to 80 % of the data
# sheet's FLOP/s and 90 % of its memory rate; a card at a third of that is throttled or broken.
ARITHMETIC = ("matmul", "copy")
SHARES = {"matmul": (0.55, 0.30), "copy": (0.70, 0.40), "links": (0.70, 0.30)}
AMONG_RANKS = (0.90, 0.70)  # of the median rank: every step waits for the slowest
AMONG_PAIRS = (
    0.50,
    0.15,
)  # of the median pair: cards under one switch may be twice as near as others
AT_END = 0.90  # of the median rate: slower at the end is a card that throttles
FREE_SHARE = (0.95, 0.70)  # of the memory, before anything is loaded
PCIE_BELOW = 100e9  # bytes a second of the ring: a card with less has no NVLink

CHANNELS = "cards without NVLink: NCCL_MIN_NCHANNELS=8; NCCL's own choice gives about half"
NVLINK = "cards with NVLink: nvidia-smi nvlink --status; with NVSwitch the fabric manager must run"
P2P = "NCCL_P2P_DISABLE=1 shows whether P2P is the cause, and works meanwhile at a lower speed"
COOLING = "nvidia-smi -q -d PERFORMANCE,POWER,TEMPERATURE says why a card is slow"
NO_GPU = "these are processes on a CPU with gloo: the figures say nothing about GPUs"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What to test.

    Attributes:
        ranks: processes; None: one for each GPU.
        timeout_s: of each test.
        folder: whose disk is looked at.
    """

    ranks: int | None = None
    timeout_s: float = 20.0
    folder: Path = Path()

    def __post_init__(self) -> None:
        """Refuses what cannot be.

        Raises:
            UserError: a number out of range, or no such folder.
        """
        cards = torch.cuda.device_count()
        if self.ranks is not None and self.ranks < 1:
            raise UserError(f"--ranks {self.ranks}: expected 1 or more")
        if self.ranks is not None and 0 < cards < self.ranks:
            raise UserError(f"--ranks {self.ranks}: this machine has {cards} GPUs, one for a rank")
        if not self.timeout_s > 0:
            raise UserError(f"--timeout {self.timeout_s:g}: expected more than 0 seconds")
        if not self.folder.is_dir():
            raise UserError(f"--folder {self.folder}: expected a folder that exists")


def preflight(asked: Asked, say: Callable[[str], None], hooks: Hooks | None = None) -> Result:
    """Tests the machine; takes some 20 seconds on GPUs.

    Args:
        asked: what to test.
        say: hears what is being done.
        hooks: for tests.
    """
    began = time.monotonic()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    count = asked.ranks if asked.ranks is not None else torch.cuda.device_count()
    result = Result(kind, count)
    result.lines += software_lines(kind == "cuda") + host_lines(asked.folder, kind == "cuda")
    if count:
        _test_ranks(result, asked, say, hooks)
    else:
        no_gpu = "--ranks N tests N processes on the CPU instead"
        result.lines.append(
            Line(section="devices", name="GPUs", found="none", should="1 or more", state="bad", remedy=no_gpu)
        )  # fmt: skip
    result.seconds = time.monotonic() - began
    return result


def _test_ranks(
    result: Result, asked: Asked, say: Callable[[str], None], hooks: Hooks | None
) -> None:
    say(f"starting {result.ranks} processes ({result.kind})")
    ranks = Ranks(result.ranks, result.kind, asked.timeout_s, hooks)
    is_whole = False
    try:
        device = device_lines(result, ranks.ask("start", timeout_s=START_SECONDS))
        tests = Judge(result, ranks, device, say)
        is_whole = tests.run()
    except Broken as broken:
        result.lines.append(
            Line(section="devices", name="processes", found=str(broken), should="one a rank", state="bad")
        )  # fmt: skip
    finally:
        result.stuck = ranks.close(kill=not is_whole)
    if result.stuck:
        result.lines.append(
            Line(
                section="devices",
                name="processes",
                found=f"{result.stuck} cannot be killed: they wait inside the driver",
                state="bad",
                remedy="the machine needs a reboot",
            )
        )


def device_lines(result: Result, started: dict[int, dict[str, Any]]) -> Device | None:
    """Cards, their memory and slots; returns what is known of the first one."""
    if result.kind == "cpu":
        result.lines.append(Line(section="devices", name="device", found=f"CPU. {NO_GPU}"))
        return None
    known = known_device(started[0]["name"])
    widths = pcie_widths()
    for rank, card in started.items():
        is_same = card["name"] == started[0]["name"]
        result.lines.append(
            Line(
                section="devices",
                name=f"rank {rank}: card",
                found=f"{card['name']} ({card['capability']})",
                should=started[0]["name"] if not is_same else "",
                state="ok" if is_same else "warn",
                remedy="" if is_same else "every step waits for the slowest card",
            )
        )
        if not any(_runs_on(built, card["capability"]) for built in card["built_for"]):
            result.lines.append(
                Line(
                    section="devices",
                    name=f"rank {rank}: torch",
                    found=f"built for {' '.join(card['built_for'])}",
                    should=card["capability"],
                    state="bad",
                    remedy="a torch built with a newer CUDA",
                )
            )
        result.lines.append(_memory_line(rank, card, known))
        now, most = next((w for uuid, w in widths.items() if card["uuid"] in uuid), ("", ""))
        if now != most:
            result.lines.append(
                Line(
                    section="devices",
                    name=f"rank {rank}: PCIe lanes",
                    found=now,
                    should=most,
                    state="warn",
                    remedy="slot, riser or BIOS give the card fewer lanes than it has",
                )
            )
    if known is not None and known.ring_rate < PCIE_BELOW and result.ranks > 1:
        result.lines += pcie_lines()
    return known


def _runs_on(built: str, capability: str) -> bool:
    """Whether code built for an architecture, such as sm_80, runs on another of the same major number."""
    kind, _, number = built.rstrip("af").partition("_")
    wanted = capability.partition("_")[2]
    if kind == "compute":  # intermediate code, which the driver compiles for any later one
        return int(number) <= int(wanted)
    return number[:-1] == wanted[:-1] and int(number) <= int(wanted)


def _memory_line(rank: int, card: dict[str, Any], known: Device | None) -> Line:
    total, free = card["total_bytes"], card["free_bytes"]
    should = f"{FREE_SHARE[0]:.0%} free"
    if known is not None:
        should = f"{known.memory / GIB:.0f} GiB, {should}"
    state = _state(free / total, FREE_SHARE)
    if (
        known is not None and total < 0.95 * known.memory
    ):  # a smaller kind of the card, or a part of one
        state = _worse(state, "warn")
    others = holders(card["uuid"]) if state != "ok" else []
    return Line(
        section="devices",
        name=f"rank {rank}: memory",
        found=f"{total / GIB:.1f} GiB, {free / GIB:.1f} free",
        should=should,
        state=state,
        remedy=f"held by {', '.join(others)}" if others else "",
        value=free / GIB,
    )


def _state(share: float, bounds: tuple[float, float]) -> str:
    warn, bad = bounds
    return "ok" if share >= warn else "warn" if share >= bad else "bad"


def _worse(*states: str) -> str:
    return max(states, key=("info", "ok", "warn", "bad").index)


class Judge:
    """The tests of the ranks, in order, until one does not end."""

    def __init__(
        self, result: Result, ranks: Ranks, device: Device | None, say: Callable[[str], None]
    ) -> None:
        """`device`: what is known of the cards, None of others."""
        self._result, self._ranks, self._device, self._say = result, ranks, device, say
        self._is_cuda = result.kind == "cuda"
        self._is_pcie = device is not None and device.ring_rate < PCIE_BELOW

    def run(self) -> bool:
        """Returns whether all of them came to their end."""
        tests = [(name, self._arithmetic) for name in ARITHMETIC]
        if self._result.ranks > 1:
            tests += [("join", self._ask), ("meet", self._meet), ("pair", self._pairs)]
            tests += [(name, self._collective) for name in COLLECTIVES]
        else:
            self._add("links", "links", "one rank: none to test")
        for number, (name, test) in enumerate(tests):
            self._say(shown(name))
            try:
                test(name)
            except Broken as broken:
                self._say_broken(name, broken)
                if name in ARITHMETIC and not broken.is_over:
                    continue
                for left, _ in tests[number + 1 :]:
                    self._add("links", shown(left), "not run: the test before did not end")
                return False
        return True

    def _ask(self, test: str) -> dict[int, Any]:
        return self._ranks.ask(test)

    def _arithmetic(self, test: str) -> None:
        found = self._ask(test)
        key, unit = ("tflop_per_s", "TFLOP/s") if test == "matmul" else ("gb_per_s", "GB/s")
        name = "bf16 product" if test == "matmul" else "copy in memory"
        sheet = None
        if self._device is not None:
            flops, rate = self._device.flops / 1e12, self._device.memory_rate / 1e9
            sheet = flops if test == "matmul" else rate
        middle = statistics.median(one[key] for one in found.values())
        for rank, one in found.items():
            rate, states, why = one[key], ["info"], []
            if self._is_cuda:
                states.append(_state(rate / middle, AMONG_RANKS))
                if states[-1] != "ok":
                    why.append(f"{rate / middle:.0%} of the median rank")
                if sheet is not None:
                    states.append(_state(rate / sheet, SHARES[test]))
                if one.get("at_end", rate) < AT_END * rate:
                    states.append("warn")
                    why.append(f"{one['at_end'] / rate:.0%} of that towards the end")
            state = _worse(*states)
            said = f"{rate:,.3g} {unit}{''.join(f', {reason}' for reason in why)}"
            should = f"{sheet:,.0f} {unit}; found {rate / sheet:.0%} of it" if sheet else ""
            remedy = COOLING if state in ("warn", "bad") else ""
            self._add("arithmetic", f"rank {rank}: {name}", said, should, state, remedy, rate)

    def _meet(self, test: str) -> None:
        """Every pair's first message, disjoint pairs at once."""
        corrupt: list[str] = []
        for partners in rounds(self._result.ranks):
            try:
                found = self._ranks.ask("meet", partners)
            except Broken as broken:
                broken.pairs = sorted(
                    {
                        (min(rank, partners[rank]), max(rank, partners[rank]))
                        for rank in broken.ranks
                        if rank in partners
                    }
                )
                raise
            corrupt += [text for one in found.values() for text in one["corrupt"]]
        self._say_values(shown(test), corrupt, "every pair answers, both ways")

    def _pairs(self, test: str) -> None:
        """Each pair's speed, one at a time and one direction at a time."""
        count, corrupt = self._result.ranks, []
        for low, high in ((a, b) for a in range(count) for b in range(a + 1, count)):
            try:
                found = self._ranks.ask("pair", low, high, ranks=(low, high))
            except Broken as broken:
                broken.pairs = [(low, high)]
                raise
            for source, target in ((low, high), (high, low)):
                one = found[target]
                corrupt += one["corrupt"]
                self._result.pairs.append(
                    {
                        "source": source,
                        "target": target,
                        "gb_per_s": one["gb_per_s"],
                        "latency_us": one["latency_us"],
                    }
                )
        middle = statistics.median(one["gb_per_s"] for one in self._result.pairs)
        # Nothing is known of a pair alone; it should at least do what it must in a ring.
        should = None if self._device is None else self._device.ring_rate / 1e9
        for one in self._result.pairs:
            rate = one["gb_per_s"]
            state, remedy = "info", ""
            if self._is_cuda:
                state = _state(rate / middle, AMONG_PAIRS)
                if should is not None:
                    state = _worse(state, _state(rate / should, SHARES["links"]))
                remedy = "" if state == "ok" else self._slow()
            self._add(
                "links", f"pair {one['source']} -> {one['target']}",
                f"{rate:,.3g} GB/s, {one['latency_us']:,.0f} us", f">= {should:,.0f} GB/s" if should else "",
                state, remedy, rate,
            )  # fmt: skip
        self._say_values("pairs", corrupt, "every value arrived as it was sent")

    def _collective(self, test: str) -> None:
        found = self._ask(test)
        rate = min(one["gb_per_s"] for one in found.values())
        latency = max(one["latency_us"] for one in found.values())
        should, state = None, "info"
        if self._is_cuda:
            state = "ok"
        if self._device is not None:
            is_ring = test != "all_to_all"
            should = (self._device.ring_rate if is_ring else self._device.all_to_all_rate) / 1e9
            state = _state(rate / should, SHARES["links"])
        name = shown(test)
        self._add(
            "links", name, f"{rate:,.3g} GB/s, {latency:,.0f} us", f"{should:,.0f} GB/s" if should else "",
            state, "" if state in ("ok", "info") else self._slow(), rate,
        )  # fmt: skip
        corrupt = [text for one in found.values() for text in one["corrupt"]]
        if corrupt:
            self._say_values(name, corrupt, "")

    def _say_values(self, name: str, corrupt: list[str], good: str) -> None:
        if not corrupt:
            self._add("links", name, good, "", "ok")
        for text in corrupt:
            self._add(
                "links", f"{name}: values", text, "every value as it was sent", "bad",
                f"wrong values come from P2P through an IOMMU, or from a broken card or riser. {P2P}",
            )  # fmt: skip

    def _say_broken(self, name: str, broken: Broken) -> None:
        """The line of a test that did not end: between whom, who did not begin, what helps."""
        pairs = ", ".join(f"{low} and {high}" for low, high in broken.pairs)
        where = f"between ranks {pairs}: " if pairs else ""
        is_link = name not in ARITHMETIC
        what = "FAILS" if broken.died or broken.failed else "HANGS"
        self._add(
            "links" if is_link else "arithmetic", shown(name), f"{what}. {where}{broken}",
            f"ends within {broken.timeout_s:g} s", "bad", self._hangs() if is_link else COOLING,
        )  # fmt: skip

    def _slow(self) -> str:
        if self._device is None:
            return f"{CHANNELS}; {NVLINK}"
        return f"{CHANNELS}; {IOMMU}" if self._is_pcie else NVLINK

    def _hangs(self) -> str:
        if not self._is_cuda:
            return NO_GPU
        if self._device is not None and not self._is_pcie:
            return f"{NVLINK}; {SHM}; {P2P}"
        return f"{P2P}; {HMM}; {IOMMU}; {SHM}"

    def _add(
        self, section: str, name: str, found: str, should: str = "", state: str = "info", remedy: str = "",
        value: float | None = None,
    ) -> None:  # fmt: skip
        self._result.lines.append(
            Line(section=section, name=name, found=found, should=should, state=state, remedy=remedy, value=value)
        )  # fmt: skip
