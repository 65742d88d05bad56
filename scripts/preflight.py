"""Looks at a machine before a long run does: cards, memory, versions, arithmetic, and every link between cards.

    python scripts/preflight.py                              starts a process for each GPU; about 20 seconds
    torchrun --nproc_per_node 8 scripts/preflight.py         the same from under torchrun, with its environment
    python scripts/preflight.py --ranks 2                    without a GPU: two processes on the CPU

A link that hangs or corrupts what it carries is named, with the known remedies. Exit status: 0 nothing is bad,
1 something is, 2 bad options.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from hymoe.engine.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to test, and where to write it."""

    ranks: int | None = None
    """Processes, one a GPU; default: all GPUs, or as many as torchrun has started."""
    timeout: float = 20.0
    """Seconds for each test; one that takes longer hangs."""
    folder: Path = Path()
    """Where runs will write: its free disk space is looked at."""
    out: Annotated[Path | None, tyro.conf.arg(name="json")] = None
    """File to write every finding to."""


def main() -> int:
    """Returns the exit status."""
    options = tyro.cli(Options, description=__doc__)
    try:
        return _preflight(options)
    except UserError as error:
        print(f"preflight.py: {error}", file=sys.stderr)
        return 2


def _preflight(options: Options) -> int:
    from hymoe.engine import run
    from hymoe.engine.eval.report import check_out, write_json
    from hymoe.engine.preflight import check, report

    here = run.world()
    if here.rank:  # rank 0 starts processes of its own, which it can end when one hangs
        return 0
    ranks = options.ranks
    if here.size > 1:
        if ranks not in (None, here.size):
            raise UserError(
                f"--ranks {ranks}: torchrun has started {here.size}; leave one of them out"
            )
        ranks = here.size
    asked = check.Asked(ranks=ranks, timeout_s=options.timeout, folder=options.folder)
    check_out(options.out, "--json")
    result = check.preflight(asked, say)
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    console.print(report.table(result))
    for line in report.summary(result):
        console.print(line, markup=False)
    if options.out is not None:
        write_json(options.out, result.as_dict())
    sys.stdout.flush()
    if result.stuck:  # waiting for them, as the interpreter would at its end, takes for ever
        os._exit(1)
    return 0 if result.is_good else 1


def say(line: str) -> None:
    """What is being done, at once, apart from the result."""
    print(f"preflight: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
