"""Makes the embedded default: a small random base checkpoint, chat data, prompts with rules, a recipe."""

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from hymoe.engine.demo import FOLDER, ensure_demo
from hymoe.engine.errors import UserError


@dataclass(frozen=True)
class Arguments:
    """Makes the embedded default: a small random base checkpoint, chat data, prompts with rules, a recipe."""

    out: Path = FOLDER
    """Folder to make; one that is there already and whole is kept."""


def main() -> int:
    """Returns the exit status: 0 done, 2 bad input."""
    arguments = tyro.cli(Arguments)
    try:
        made = ensure_demo(arguments.out)
    except UserError as error:
        print(f"make_demo.py: {error}", file=sys.stderr)
        return 2
    print(f"{arguments.out}: {'made' if made else 'is there already'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
