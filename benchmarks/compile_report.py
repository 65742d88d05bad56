"""What the compiler makes of the Triton kernels on the real model's shapes, for chips that need not be present.

python benchmarks/compile_report.py                     every family, every chip
python benchmarks/compile_report.py norms --arch 90     one of each

Every tile that the table can choose is compiled. Columns: registers a thread, bytes of stack a thread (spills), shared
memory a block, blocks that fit an SM by these, matrix instructions, asynchronous copies.
"""

import argparse
import dataclasses
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import aot, harness
from hymoe.kernels import launch, tiles

# Family -> module of this folder whose `record()` runs the family's operations on meta tensors of the real shapes.
FAMILIES = {
    "norms": "norms",
    "experts": "expert_mlp",
    "loss": "cross_entropy",
    "adamw": "adamw",
    "mamba": "mamba",
}


def reports(family: str, archs: Sequence[int]) -> list[aot.Report]:
    """Compiles every kernel of a family, with every tile that the table can choose, for each of the chips."""
    record = importlib.import_module(f"benchmarks.{FAMILIES[family]}").record
    found = []
    for arch in archs:
        launches: list[launch.Launch] = []
        most = max((len(fitting) for fitting in tiles.TILES[arch].values()), default=1)
        for n in range(most):
            with launch.recording(launch.KNOWN_TARGETS[arch]) as recorded, tiles.nth_best(n):
                record()
            launches += recorded
        found += [aot.compile_variant(one, arch) for one in aot.variants(launches)]
    return found


def main() -> None:
    """Prints the table."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("families", nargs="*", metavar="FAMILY", help=", ".join(FAMILIES))
    options.add_argument("--arch", type=int, nargs="+", default=list(launch.KNOWN_TARGETS))
    options.add_argument("--json", type=Path, help="file that gets the reports with their code")
    options = options.parse_args()
    unknown = set(options.families) - set(FAMILIES)
    if unknown:
        sys.exit(f"unknown family {sorted(unknown)[0]!r}; expected some of {', '.join(FAMILIES)}")
    found = [r for f in options.families or FAMILIES for r in reports(f, options.arch)]
    rows = [
        [
            f"sm_{r.arch} {r.name}",
            " ".join(
                str(v)
                for k, v in r.constexprs.items()
                if k in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_warps", "num_stages")
            ),
            str(r.registers),
            str(r.stack_bytes),
            str(r.shared_bytes),
            str(r.blocks_per_sm),
            str(r.count(aot.MATRIX_OPCODES[r.arch])),
            str(r.count(*aot.ASYNC_COPIES)),
        ]
        for r in found
    ]
    harness.show(
        ["kernel", "tile", "registers", "stack", "shared", "blocks", "matrix", "async"], rows
    )
    if options.json is not None:
        options.json.write_text(json.dumps([dataclasses.asdict(r) for r in found]))


if __name__ == "__main__":
    main()
