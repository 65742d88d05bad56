"""Writes a trained model as an HF folder, on a machine with no GPU.

    python scripts/convert_to_hf.py RUN --out DIR                                  the newest whole state of a run
    python scripts/convert_to_hf.py RUN/checkpoints/step_00000100 --out DIR        this state
    python scripts/convert_to_hf.py HF_FOLDER --out DIR --shards 16                the same model in other files
    python scripts/convert_to_hf.py RUN --out DIR --bundle BUNDLE.toml             all that is served
    python scripts/convert_to_hf.py BUNDLE_FOLDER --check                          is a bundle still whole?

The files are what the run's own export writes of the same state, byte for byte.
"""

import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from hymoe.engine import convert
from hymoe.engine.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """What to convert, and where to."""

    source: Annotated[Path, tyro.conf.Positional]
    """Run folder, saved state, or HF folder."""
    out: Path | None = None
    """The folder to be: absent or empty. It appears whole or not at all."""
    max_shard_size: str | None = None
    """Most bytes of a file, such as 4GB (10^9) or 500MiB (2^20); 5GB where neither this nor --shards is given."""
    shards: int | None = None
    """Exactly so many files, of about one size."""
    base: Path | None = None
    """The HF folder that the run began with, where it has moved since."""
    verify: bool = False
    """Read everything back, compare it with the state, and compare a forward pass in transformers with ours."""
    bundle: Path | None = None
    """TOML file that says what else is served: prompts, template, evidence, model card."""
    check: bool = False
    """Writes nothing: checks a bundle as when it was made, hashes, stop ids, template and a load included."""


def main() -> int:
    """Returns the exit status: 0 done, 2 bad input, or --verify found a difference."""
    arguments = tyro.cli(Arguments, description=__doc__)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # cleans up
    try:
        _run(arguments)
    except UserError as error:
        print(f"convert_to_hf.py: {error}", file=sys.stderr)
        return 2
    return 0


def _run(asked: Arguments) -> None:
    if asked.check:
        from hymoe.engine.bundle.check import check_bundle

        if asked.out is not None:
            raise UserError("--out and --check: expected one of them")
        print("\n".join(check_bundle(asked.source, say=_say)))
        return
    if asked.out is None:
        raise UserError("--out is missing: name the folder to be")
    if asked.shards is not None and asked.max_shard_size is not None:
        raise UserError("--shards and --max-shard-size: expected one of them")
    if asked.bundle is None:
        size = asked.max_shard_size or "5GB"
        done = convert.convert(
            asked.source,
            asked.out,
            max_shard_size=size,
            shards=asked.shards,
            base=asked.base,
            say=_say,
        )
        state = done.state
    else:
        state = _bundle(asked)
    if asked.verify:
        from hymoe.engine.verify import verify

        verify(state, asked.out, base=asked.base, say=_say)


def _bundle(asked: Arguments) -> Path:
    """Writes the bundle; returns the state that is in it."""
    from hymoe.engine.bundle.make import make_bundle

    if asked.base is not None:
        raise UserError("--base and --bundle: expected one of them")
    # Chosen here, so that what is verified is what was written even where the run goes on.
    state = convert.choose(asked.source, _say) if asked.verify else asked.source
    size, shards = asked.max_shard_size, asked.shards
    make_bundle(asked.bundle, state, asked.out, max_shard_size=size, shards=shards, say=_say)
    return state


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
