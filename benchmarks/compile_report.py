"""What the compiler makes of the Triton kernels on the real model's shapes, for chips that need not be present.

python benchmarks/compile_report.py                     every family, every chip
python benchmarks/compile_report.py norms --arch 90     one of each

Every tile that the table can choose is compiled. Columns: rows, columns and depth of the tile; warps a block, stages of
the pipeline; registers a thread; bytes of its stack and instructions that spill; shared memory a block; blocks that fit
an SM by these, and which share of its warps they are; matrix instructions and asynchronous copies, of all and of those
in the main loop. Nothing here says how fast a kernel is: that takes the chip.
"""

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import aot, harness
from hymoe.kernels import launch, tiles

# Family -> module of this folder, and its function where that is not `record`, that runs the family's operations on
# meta tensors of the real shapes.
FAMILIES = {
    "norms": "norms",
    "experts": "expert_mlp",
    "loss": "cross_entropy",
    "adamw": "adamw",
    "conv1d": "mamba.record_conv",
    "mamba": "mamba.record_ssd",
    "routing": "routing",
}


def reports(family: str, archs: Sequence[int]) -> list[aot.Report]:
    """Compiles every kernel of a family, with every tile that the table can choose, for each of the chips."""
    module, _, function = FAMILIES[family].partition(".")
    record = getattr(importlib.import_module(f"benchmarks.{module}"), function or "record")
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


HEADERS = ["kernel", "variant", "tile", "warps", "stages", "registers", "stack", "spills"]
HEADERS += ["shared", "blocks", "warps of SM", "matrix", "in loop", "async", "in loop"]


def row(report: aot.Report) -> list[str]:
    """A report as cells of the table."""
    tile = [str(v) for k, v in report.constexprs.items() if k.startswith("BLOCK")]
    flags = [k for k, v in report.constexprs.items() if v is True and k != "enable_fp_fusion"]
    matrix, copies = (aot.MATRIX_OPCODES[report.arch],), aot.ASYNC_COPIES
    in_loop = lambda opcodes: sum(report.main_loop[one] for one in opcodes)  # noqa: E731
    cells = [f"sm_{report.arch} {report.name}", " ".join(flags), "x".join(tile), report.warps]
    cells += [report.constexprs.get("num_stages", "-"), report.registers, report.stack_bytes]
    cells += [report.spills, report.shared_bytes, report.blocks_per_sm, f"{report.occupancy:.0%}"]
    cells += [report.count(*matrix), in_loop(matrix), report.count(*copies), in_loop(copies)]
    return list(map(str, cells))


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
    harness.show(HEADERS, [row(r) for r in found])
    limits = {arch: chip.shared_bytes for arch, chip in launch.KNOWN_TARGETS.items()}
    spilling = sum(r.stack_bytes > 0 or r.spills > 0 for r in found)
    too_large = sum(r.shared_bytes > limits[r.arch] for r in found)
    print(f"{len(found)} compiled, {spilling} spill, {too_large} exceed their chip's shared memory")
    if options.json is not None:
        options.json.write_text(json.dumps([vars(r) for r in found]))


if __name__ == "__main__":
    main()
