"""This process, its device, and what devices of a known name can do."""

import os
from dataclasses import dataclass

import torch

# Dense BF16 FLOP/s without sparsity, by a part of the device's name, from the vendor's data sheets.
PEAK_FLOPS = {
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "RTX PRO 6000": 503e12,
}


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


def device_memory_bytes(here: World) -> int:
    """What one rank may use: its GPU, or its share of the host's memory."""
    if here.device.type == "cuda":
        return torch.cuda.get_device_properties(here.device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // here.size


def peak_flops(device: torch.device) -> float | None:
    """Of one device, dense BF16; None where nothing is known of it, as on a CPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device).upper()
    return next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)
