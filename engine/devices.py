"""This process, its device, and what devices of a known name can do."""

import os
from dataclasses import dataclass

import torch

from hymoe.engine.errors import UserError

GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """A GPU by its name, for predictions; nothing here was measured by this project.

    Attributes:
        name: as a person writes it.
        match: part of the name that the driver gives.
        memory: bytes that a process can have, less than the label says.
        flops: dense BF16 FLOP/s without sparsity, from the vendor's data sheet.
        memory_rate: bytes a second to and from its memory, likewise.
        all_to_all_rate: bytes a second that a card sends while all cards of a node send to each other.
        ring_rate: bytes a second of a card in an all-gather or reduce-scatter; both as users report them.
    """

    name: str
    match: str
    memory: int
    flops: float
    memory_rate: float
    all_to_all_rate: float
    ring_rate: float


# Links: H100 and H200 as users report of NVLink 4; A100 and B200 the same shares of their own NVLink. RTX Pro 6000:
# PCIe 5 without NVLink, four cards at once; the ring with NCCL_MIN_NCHANNELS=8, without which it has 22 GB/s.
_KNOWN = (
    ("h100", "H100", 79.2, 989e12, 3.35e12, 320e9, 360e9),
    ("h200", "H200", 139.0, 989e12, 4.8e12, 320e9, 360e9),
    ("b200", "B200", 178.0, 2250e12, 8.0e12, 640e9, 720e9),
    ("a100-80", "A100", 79.2, 312e12, 2.04e12, 213e9, 240e9),
    ("rtxpro6000", "RTX PRO 6000", 95.0, 503e12, 1.79e12, 32e9, 41e9),
)
DEVICES = {
    name: Device(
        name=name, match=match, memory=int(memory * GIB), flops=flops, memory_rate=rate,
        all_to_all_rate=link, ring_rate=ring,
    )
    for name, match, memory, flops, rate, link, ring in _KNOWN
}  # fmt: skip


@dataclass(frozen=True)
class World:
    """This process among those that torchrun started."""

    rank: int
    local_rank: int
    size: int

    @property
    def device(self) -> torch.device:
        """The GPU of this process, or the CPU where there is none."""
        return (
            torch.device("cuda", self.local_rank)
            if torch.cuda.is_available()
            else torch.device("cpu")
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What a recipe is resolved for: the ranks of this run, or those of a machine that is not here.

    Attributes:
        ranks: processes, one a device.
        kind: cuda or cpu.
        memory: bytes that a rank may use.
        device: what is known of the device; None of a CPU and of an unknown card.
        is_here: this very process runs on it.
    """

    ranks: int
    kind: str
    memory: int
    device: Device | None
    is_here: bool = True

    @property
    def name(self) -> str:
        """Of the device, for a person."""
        return self.kind if self.device is None else self.device.name


def machine_here(here: World) -> Machine:
    """The ranks that torchrun has started."""
    known = None
    if here.device.type == "cuda":
        known = known_device(torch.cuda.get_device_name(here.device))
    return Machine(
        ranks=here.size, kind=here.device.type, memory=device_memory_bytes(here), device=known
    )


def named_machine(name: str | None, ranks: int | None, here: World) -> Machine:
    """A machine to plan for.

    Args:
        name: one of DEVICES; None: the device that is here.
        ranks: of one node; None: as many as torchrun has started.
        here: this process.

    Raises:
        UserError: an unknown name, or less than one rank.
    """
    ranks = here.size if ranks is None else ranks
    if ranks < 1:
        raise UserError(f"--ranks {ranks}: expected 1 or more")
    if name is None:
        local = machine_here(here)
        memory = local.memory
        if local.kind == "cpu":  # which the ranks share
            memory = device_memory_bytes(World(0, 0, ranks))
        return Machine(ranks=ranks, kind=local.kind, memory=memory, device=local.device, is_here=False)  # fmt: skip
    if name not in DEVICES:
        raise UserError(f"--device {name}: expected one of {', '.join(DEVICES)}")
    known = DEVICES[name]
    return Machine(ranks=ranks, kind="cuda", memory=known.memory, device=known, is_here=False)


def known_device(full_name: str) -> Device | None:
    """The device whose name the driver gives; None where nothing is known of it."""
    return next((d for d in DEVICES.values() if d.match in full_name.upper()), None)


def device_memory_bytes(here: World) -> int:
    """What one rank may use: its GPU, or its share of the host's memory."""
    if here.device.type == "cuda":
        return torch.cuda.get_device_properties(here.device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // here.size


def peak_flops(device: torch.device) -> float | None:
    """Of one device, dense BF16; None where nothing is known of it, as on a CPU."""
    if device.type != "cuda":
        return None
    known = known_device(torch.cuda.get_device_name(device))
    return None if known is None else known.flops
