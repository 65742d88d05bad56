"""Finds the tiles of the matrix products for the GPU at hand and writes them into kernels/tiles.py.

python benchmarks/tune.py                       every product of the table
python benchmarks/tune.py loss.logits --dry-run --arch 90

Each product is tried with every tile that the chip's shared memory and registers allow, in its whole operation, forward
and backward, at the real model's shapes: only the product's tile changes, so the operation's time ranks the tiles. A
tile whose results differ from those of the table's tile, or that fails to launch, is named and dropped. The entry of
this chip's architecture gets the two fastest, and one that also fits with wider operands where neither does.
"""

import argparse
import ast
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor
from triton.errors import TritonError

from benchmarks import harness
from benchmarks.shapes import D, E, F, K, T, V
from hymoe.kernels import launch, tiles
from hymoe.kernels.experts import expert_mlp
from hymoe.kernels.launch import KNOWN_TARGETS, Target
from hymoe.kernels.loss import linear_cross_entropy
from hymoe.kernels.route import route
from hymoe.kernels.tiles import Tile

TABLE = Path(tiles.__file__)
ROWS, COLUMNS, DEPTHS, WARPS, STAGES = (
    (64, 128, 256),
    (64, 128, 256),
    (32, 64, 128),
    (4, 8),
    range(2, 6),
)
# Float32 of the tile's sum in a thread's registers: fewer starve the matrix unit, more spill. From sm_100 on the sum
# lies in tensor memory, but passes through registers at the end.
SUMS = range(32, 129)
KEPT = 2
GATE = 1e-2  # relative difference from the table's tile: another order of sums in bfloat16 is far below
ROUNDS = 10
SUPERVISED = 0.4  # of the tokens of a chat

# Of a tile that the compiler or the driver does not take; a fault of the GPU itself then fails every other tile too.
FAILURES = (TritonError, RuntimeError)

Workload = Callable[
    [str], Callable[[], list[Tensor]]
]  # device -> a call that returns results and gradients


def grid(chip: Target, itemsize: int) -> list[Tile]:
    """The tiles to try on a chip for operands of this size."""
    every = (Tile(*one) for one in itertools.product(ROWS, COLUMNS, DEPTHS, WARPS, STAGES))
    return [
        tile
        for tile in every
        if tile.m * tile.n // (32 * tile.warps) in SUMS
        and tile.shared_bytes(itemsize) <= chip.shared_bytes
    ]


def route_work(device: str, dtype: torch.dtype) -> Callable[[], list[Tensor]]:
    """The router, whose product is `router`."""
    x, weight, dy = normal(device, dtype, (T, D), (E, D), (T, K))
    x, weight, bias = (
        x.requires_grad_(),
        weight.float().requires_grad_(),
        dy[0].new_zeros(E).float(),
    )

    def run() -> list[Tensor]:
        _, weights = route(x, weight, bias, top_k=K, scaling=2.5, kernels="triton")
        return [weights, *torch.autograd.grad(weights, (x, weight), dy.float())]

    return run


def experts_work(device: str, dtype: torch.dtype) -> Callable[[], list[Tensor]]:
    """The expert MLP, whose products are `experts.*`."""
    x, up, down, router, dy = normal(device, dtype, (T, D), (E, F, D), (E, D, F), (E, D), (T, D))
    leaves = [t.requires_grad_() for t in (x, up, down)]
    bias = torch.zeros(E, device=device)
    with torch.no_grad():
        routing, weights = route(x, router.float(), bias, top_k=K, kernels="triton")
    weights.requires_grad_()

    def run() -> list[Tensor]:
        y = expert_mlp(x, weights, up, down, routing, kernels="triton")
        return [y, *torch.autograd.grad(y, (*leaves, weights), dy)]

    return run


def loss_work(device: str, dtype: torch.dtype) -> Callable[[], list[Tensor]]:
    """The linear cross-entropy, whose products are `loss.*`."""
    hidden, weight = (t.requires_grad_() for t in normal(device, dtype, (T, D), (V, D)))
    count = int(SUPERVISED * T)
    labels = torch.randint(V, (T,), device=device)
    labels[count:] = -100

    def run() -> list[Tensor]:
        loss = linear_cross_entropy(hidden, weight, labels, count, "triton")
        return [loss, *torch.autograd.grad(loss, (hidden, weight))]

    return run


# First part of a product's name -> the operation that it is a part of.
WORKLOADS: dict[str, Workload] = {
    "router": route_work,
    "experts": experts_work,
    "loss": loss_work,
}


def normal(device: str, dtype: torch.dtype, *shapes: tuple[int, ...]) -> Iterator[Tensor]:
    """Random tensors whose products with one another are of size 1; without values on meta."""
    torch.manual_seed(0)
    for shape in shapes:
        yield torch.randn(shape, device=device, dtype=dtype) * shape[-1] ** -0.25


def products() -> list[str]:
    """Every product of the table."""
    return sorted({product for chip in tiles.TILES.values() for product in chip})


def tune(product: str, dtype: torch.dtype, tried: Sequence[Tile]) -> list[tuple[float, Tile]]:
    """(ms, tile) of every tile that works, fastest first; prints as it goes."""
    run = WORKLOADS[product.partition(".")[0]]("cuda", dtype)
    expected = run()
    found = []
    for tile in tried:
        with tiles.forced(product, tile):
            try:
                wrong = largest_difference(run(), expected)
            except FAILURES as reason:
                print(f"  {tile}: {str(reason).splitlines()[0]}")
                continue
            if not wrong < GATE:
                print(f"  {tile}: WRONG, differs by {wrong:.2g}")
                continue
            found.append((milliseconds(run), tile))
            print(f"  {tile}: {found[-1][0]:.3f} ms")
    return sorted(found, key=lambda one: one[0])


def milliseconds(run: Callable[[], Any]) -> float:
    """Median of the whole operation."""

    def timed(lap: harness.Lap) -> None:
        run()
        lap("whole")

    figures = harness.measure_kernels({"": timed}, {"whole": harness.Work()}, ROUNDS, "cuda")
    return figures[""]["whole"]["ms"]


def largest_difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Relative, of the tensor that differs most; NaN where a value is."""
    pairs = zip(found, expected, strict=True)
    each = [((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in pairs]
    return float("nan") if any(one != one for one in each) else max(each)


def item_sizes(product: str, chip: Target) -> dict[torch.dtype, set[int]]:
    """Dtype of the activations -> sizes of operands that the product's tile is asked for with, where it is at all."""
    workload, found = WORKLOADS[product.partition(".")[0]], {}
    for dtype in (torch.bfloat16, torch.float32):
        with launch.recording(chip), tiles.forced(product, Tile(64, 64, 32, 4, 2)) as asked:
            workload("meta", dtype)()
        if asked:
            found[dtype] = asked
    return found


def choose(
    fastest: Sequence[Tile], before: Sequence[Tile], chip: Target, sizes: set[int]
) -> list[Tile]:
    """The tiles of an entry: the fastest, and for a size of operands that they do not fit with the fastest that does.

    Args:
        fastest: tiles that work, fastest first.
        before: the entry that is replaced.
        chip: what they have to fit.
        sizes: of operands.
    """
    chosen = list(fastest[:KEPT])
    for size in sorted(sizes):
        fitting = [t for t in (*fastest, *before) if t.shared_bytes(size) <= chip.shared_bytes]
        if not set(fitting) & set(chosen):
            chosen += fitting[:1]
    return chosen


def rewrite(source: str, arch: int, product: str, chosen: Sequence[Tile]) -> str:
    """The source of the table with one entry replaced or added, as the formatter would leave it.

    Raises:
        ValueError: there is no dictionary TILES in the source.
    """
    lines = source.splitlines(keepends=True)
    table = _table(source)
    archs = {
        ast.literal_eval(key): value for key, value in zip(table.keys, table.values, strict=True)
    }
    entry = _entry(product, chosen)
    if arch not in archs:
        _insert(lines, table.end_lineno, [f"    {arch}: {{\n", *entry, "    },\n"])
        return "".join(lines)
    inside = archs[arch]
    keys = {ast.literal_eval(k): (k, v) for k, v in zip(inside.keys, inside.values, strict=True)}
    if product in keys:
        key, value = keys[product]
        lines[key.lineno - 1 : value.end_lineno] = entry
    elif keys:
        _insert(lines, inside.end_lineno, entry)
    else:  # an empty one lies on one line
        lines[inside.lineno - 1 : inside.end_lineno] = [f"    {arch}: {{\n", *entry, "    },\n"]
    return "".join(lines)


def _table(source: str) -> ast.Dict:
    for node in ast.parse(source).body:
        name = node.target if isinstance(node, ast.AnnAssign) else None
        if isinstance(name, ast.Name) and name.id == "TILES" and isinstance(node.value, ast.Dict):
            return node.value
    raise ValueError("no dictionary TILES in the source")


def _insert(lines: list[str], closing: int, new: list[str]) -> None:
    """Before the line, counted from 1, that closes a dictionary."""
    lines[closing - 1 : closing - 1] = new


def _entry(product: str, chosen: Sequence[Tile]) -> list[str]:
    each = [f"Tile({t.m}, {t.n}, {t.k}, {t.warps}, {t.stages})" for t in chosen]
    line = f'        "{product}": ({", ".join(each)}{"," if len(each) == 1 else ""}),\n'
    if len(line) <= 101:
        return [line]
    return [f'        "{product}": (\n', *(f"            {one},\n" for one in each), "        ),\n"]


def main() -> None:
    """Tunes the products that are asked for and rewrites the table."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("products", nargs="*", metavar="PRODUCT", help=", ".join(products()))
    options.add_argument("--dry-run", action="store_true", help="print what would be tried")
    options.add_argument(
        "--arch", type=int, choices=KNOWN_TARGETS, help="chip of a dry run without a GPU"
    )
    options = options.parse_args()
    unknown = set(options.products) - set(products())
    if unknown:
        sys.exit(f"unknown product {min(unknown)!r}; expected some of {', '.join(products())}")
    if torch.cuda.is_available():
        chip = launch.target(torch.device("cuda"))
    elif options.dry_run:
        chip = KNOWN_TARGETS[options.arch or 90]
    else:
        print(
            "tune.py measures on a GPU and finds none; --dry-run prints its plan", file=sys.stderr
        )
        sys.exit(2)
    for product in options.products or products():
        sizes = item_sizes(product, chip)
        dtype, asked = next(iter(sizes.items()))  # bfloat16, but for a product of float32 alone
        tried = grid(chip, max(asked))
        print(f"{product} on sm_{chip.arch}: {len(tried)} tiles")
        if options.dry_run:
            print("\n".join(f"  {tile}" for tile in tried))
            continue
        fastest = [tile for _, tile in tune(product, dtype, tried)]
        if not fastest:
            sys.exit(f"{product}: no tile works on sm_{chip.arch}; the table is unchanged")
        before = tiles.TILES.get(chip.arch, {}).get(product, ())
        chosen = choose(fastest, before, chip, set().union(*sizes.values()))
        TABLE.write_text(rewrite(TABLE.read_text(), chip.arch, product, chosen))


if __name__ == "__main__":
    main()
