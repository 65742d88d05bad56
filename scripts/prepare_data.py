"""Turns raw chat sets into packed token shards, as a mixture's recipe says; or looks at such a folder.

    python scripts/prepare_data.py MIXTURE.toml --out DIR --base CHECKPOINT
    python scripts/prepare_data.py DIR --show 3 --base CHECKPOINT    prints three conversations, trained tokens apart
    python scripts/prepare_data.py DIR --check                       reads everything and says what is wrong

The same recipe, seed and files give the same bytes on any machine and with any number of workers.
"""

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from hymoe.engine.data.mixture import load_mixture
from hymoe.engine.data.pipeline import prepare
from hymoe.engine.data.show import document_of, styled
from hymoe.engine.data.statistics import COLUMNS, table
from hymoe.engine.data.store import PackedRows, read_manifest
from hymoe.engine.data.tokenizer import Tokenizer
from hymoe.engine.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """What to prepare, or which folder to look at."""

    source: Annotated[Path, tyro.conf.Positional]
    """A mixture's recipe (TOML), or a prepared folder for --show and --check."""
    out: Path | None = None
    """Folder to make; it must not exist."""
    base: Path | None = None
    """The checkpoint's folder, where the recipe says "base", and for --show."""
    workers: int = os.cpu_count() or 1
    """Processes that render and tokenise; the result does not depend on it."""
    show: int = 0
    """Prints so many conversations of a prepared folder, chosen by --seed."""
    seed: int = 0
    """Of the choice of --show."""
    check: bool = False
    """Reads a whole prepared folder and compares it with its manifest."""


def main() -> int:
    """Returns the exit status: 0 done, 1 a folder that --check finds wrong, 2 bad input."""
    arguments = tyro.cli(Arguments, description=__doc__)
    try:
        if arguments.show:
            return show(arguments)
        if arguments.check:
            return check(arguments)
        return make(arguments)
    except UserError as error:
        print(f"prepare_data.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("prepare_data.py: interrupted, nothing was written", file=sys.stderr)
        return 130


def make(arguments: Arguments) -> int:
    """Prepares a mixture and prints its statistics."""
    if arguments.out is None:
        raise UserError("--out is missing: the folder to make")
    if arguments.workers < 1:
        raise UserError(f"--workers {arguments.workers}: expected 1 or more")
    started = time.monotonic()
    mixture = load_mixture(arguments.source)
    prepare(mixture, arguments.base, arguments.out, arguments.workers, _say)
    _summary(arguments.out)
    print(f"done in {time.monotonic() - started:.1f} s with {arguments.workers} workers")
    return 0


def show(arguments: Arguments) -> int:
    """Prints conversations with their mask."""
    if arguments.base is None:
        raise UserError(
            "--base is missing: the checkpoint's folder, whose tokenizer turns ids into text"
        )
    rows, tokenizer = PackedRows(arguments.source), Tokenizer(arguments.base)
    total = rows.manifest["documents"]
    chosen = np.random.default_rng(arguments.seed).permutation(total)[: arguments.show]
    console = Console(highlight=False)
    for number in chosen:
        ids, trained, where = document_of(rows, int(number))
        title = f"document {number} of {total}: {where}, {int(trained.sum())} of {len(ids)} tokens trained on"
        console.rule(title, align="left")
        console.print(styled(ids, trained, tokenizer, console.is_terminal), soft_wrap=True)
    return 0


def check(arguments: Arguments) -> int:
    """Prints what is wrong with a folder; status 1 where something is."""
    found = PackedRows(arguments.source).verify()
    for line in found:
        print(f"{arguments.source}: {line}", file=sys.stderr)
    if not found:
        _summary(arguments.source)
        print(f"{arguments.source}: all as the manifest says")
    return 1 if found else 0


def _summary(folder: Path) -> None:
    manifest = read_manifest(folder)
    grid = Table(*COLUMNS)
    for row in table(manifest["sources"]):
        grid.add_row(*row)
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(grid)
    print(
        f"{folder}: {manifest['rows']:,} rows of {manifest['seq_len']:,}, {manifest['documents']:,} documents, "
        f"{manifest['tokens']:,} tokens, {manifest['supervised_tokens']:,} supervised, "
        f"{manifest['packing_efficiency']:.2%} full"
    )
    print(f"dataset_sha256 {manifest['dataset_sha256']}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
