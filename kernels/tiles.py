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
TILES: dict[int, dict[str, tuple[Tile, ...]]] = {80: {}, 90: {}, 100: {}, 120: {}}


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


def tile(product: str, chip: Target, itemsize: int = 2) -> Tile:
    """The tile that a product is launched with."""
    fitting = candidates(product, chip, itemsize)
    return fitting[min(_nth, len(fitting) - 1)]
