"""Tiles of the matrix-product kernels, by chip and product; `benchmarks/tune.py` measures them and writes this table.

A product takes the first tile of its list whose operands fit the chip's shared memory as the driver reports it.
Nothing is tuned while a run goes on, and no choice depends on the number of tokens.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hymoe.kernels.launch import Target


@dataclass(frozen=True)
class Tile:
    """Rows, columns and depth of a product's tile, warps, and stages of its pipeline of loads."""

    m: int
    n: int
    k: int
    warps: int
    stages: int

    def shared_bytes(self, itemsize: int) -> int:
        """Of the operands in flight."""
        return self.stages * (self.m + self.n) * self.k * itemsize


INTERPRETER = Tile(16, 32, 16, 1, 1)  # small, so that tiny tests have many tiles and ragged ones

# arch -> product -> tiles, best first.
TILES: dict[int, dict[str, tuple[Tile, ...]]] = {
    80: {
        "experts.up": (Tile(128, 256, 64, 8, 3), Tile(128, 128, 32, 4, 4)),
        "experts.down": (Tile(128, 256, 64, 8, 3), Tile(128, 128, 32, 4, 4)),
        "experts.dgrad_down": (Tile(128, 256, 64, 8, 3), Tile(128, 128, 32, 4, 4)),
        "experts.dgrad_up": (Tile(128, 256, 64, 8, 3), Tile(128, 128, 32, 4, 4)),
        "experts.wgrad": (Tile(128, 256, 64, 8, 3), Tile(128, 128, 32, 4, 3)),
        "experts.float32": (Tile(64, 64, 32, 8, 3),),
        "router": (Tile(128, 128, 32, 8, 3), Tile(64, 64, 32, 4, 4)),
        "loss.logits": (Tile(128, 256, 32, 8, 3), Tile(128, 128, 32, 4, 4)),
        "loss.dweight": (Tile(128, 128, 32, 8, 4), Tile(128, 128, 64, 8, 3)),
        "loss.float32": (Tile(64, 64, 32, 8, 3),),
    },
    90: {
        "experts.up": (Tile(128, 256, 64, 8, 4), Tile(128, 128, 64, 4, 3)),
        "experts.down": (Tile(128, 256, 64, 8, 4), Tile(128, 128, 64, 4, 3)),
        "experts.dgrad_down": (Tile(128, 256, 64, 8, 4), Tile(128, 128, 64, 4, 3)),
        "experts.dgrad_up": (Tile(128, 256, 64, 8, 4), Tile(128, 128, 64, 4, 3)),
        "experts.wgrad": (Tile(128, 256, 64, 8, 3), Tile(128, 128, 64, 4, 3)),
        "experts.float32": (Tile(64, 64, 32, 8, 3),),
        "router": (Tile(128, 128, 64, 8, 3), Tile(128, 128, 64, 8, 2), Tile(64, 64, 64, 4, 3)),
        "loss.logits": (Tile(128, 256, 64, 8, 3), Tile(128, 128, 64, 4, 3)),
        "loss.dweight": (Tile(256, 128, 64, 8, 3), Tile(128, 128, 64, 4, 3)),
        "loss.float32": (Tile(64, 64, 32, 8, 3),),
    },
    100: {
        "experts.up": (Tile(128, 256, 64, 8, 4), Tile(128, 128, 64, 8, 3)),
        "experts.down": (Tile(128, 256, 64, 8, 4), Tile(128, 128, 64, 8, 3)),
        "experts.dgrad_down": (Tile(128, 256, 64, 8, 4), Tile(128, 128, 64, 8, 3)),
        "experts.dgrad_up": (Tile(128, 256, 64, 8, 4), Tile(128, 128, 64, 8, 3)),
        "experts.wgrad": (Tile(128, 256, 64, 8, 3), Tile(128, 128, 64, 8, 3)),
        "experts.float32": (Tile(64, 64, 32, 8, 3),),
        "router": (Tile(128, 128, 64, 8, 3), Tile(128, 128, 64, 8, 2), Tile(64, 64, 64, 8, 3)),
        "loss.logits": (Tile(128, 256, 64, 8, 3), Tile(128, 128, 64, 4, 3)),
        "loss.dweight": (Tile(256, 128, 64, 8, 3), Tile(128, 128, 64, 4, 3)),
        "loss.float32": (Tile(64, 64, 32, 8, 3),),
    },
    120: {
        "experts.up": (Tile(128, 128, 64, 8, 3), Tile(128, 64, 32, 4, 4)),
        "experts.down": (Tile(128, 128, 64, 8, 3), Tile(128, 64, 32, 4, 4)),
        "experts.dgrad_down": (Tile(128, 128, 64, 8, 3), Tile(128, 64, 32, 4, 4)),
        "experts.dgrad_up": (Tile(128, 128, 64, 8, 3), Tile(128, 64, 32, 4, 4)),
        "experts.wgrad": (Tile(128, 128, 64, 8, 3), Tile(128, 64, 32, 4, 3)),
        "experts.float32": (Tile(64, 64, 32, 8, 3),),
        "router": (Tile(128, 64, 32, 8, 2), Tile(64, 64, 32, 8, 3)),
        "loss.logits": (Tile(128, 128, 64, 8, 2), Tile(128, 64, 64, 4, 3)),
        "loss.dweight": (Tile(128, 128, 64, 8, 2), Tile(128, 64, 64, 8, 3)),
        "loss.float32": (Tile(64, 64, 32, 8, 3),),
    },
}


def candidates(product: str, chip: Target, itemsize: int = 2) -> list[Tile]:
    """The tiles of a product that fit the chip, best first; a chip without an entry has that of the next older one.

    Raises:
        ValueError: no tile fits.
    """
    if chip.arch == 0:
        return [INTERPRETER]
    known = max((arch for arch in TILES if arch <= chip.arch), default=min(TILES))
    fitting = [t for t in TILES[known][product] if t.shared_bytes(itemsize) <= chip.shared_bytes]
    if not fitting:
        raise ValueError(
            f"{product}: no tile of sm_{known} fits {chip.shared_bytes} bytes of shared memory"
        )
    return fitting


_nth = 0


@contextmanager
def nth_best(n: int) -> Iterator[None]:
    """Launches inside take the n-th fitting tile (the last where there are fewer): for checks and for tuning."""
    global _nth
    before, _nth = _nth, n
    try:
        yield
    finally:
        _nth = before


_forced: dict[str, tuple[Tile, set[int]]] = {}


@contextmanager
def forced(product: str, choice: Tile) -> Iterator[set[int]]:
    """Launches of a product inside take this tile, in the table or not, whether it fits or not: for tuning.

    Yields:
        The item sizes that the product's tile was asked for with.
    """
    before, asked = _forced.copy(), set()
    _forced[product] = (choice, asked)
    try:
        yield asked
    finally:
        _forced.clear()
        _forced.update(before)


def tile(product: str, chip: Target, itemsize: int = 2) -> Tile:
    """The tile that a product is launched with."""
    if product in _forced:
        choice, asked = _forced[product]
        asked.add(itemsize)
        return choice
    fitting = candidates(product, chip, itemsize)
    return fitting[min(_nth, len(fitting) - 1)]
