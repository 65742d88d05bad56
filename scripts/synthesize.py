"""Makes instruction-following data of which only verified answers are kept.

python scripts/synthesize.py prompts --count 20000 --out prompts.jsonl

python scripts/generate.py --model DIR --prompts prompts.jsonl --out answers.jsonl

python scripts/synthesize.py filter --prompts prompts.jsonl --answers answers.jsonl --out data.jsonl --held-out 0.1
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table

from hymoe.engine.errors import UserError
from hymoe.engine.eval import synthesize, verified

LINE_SECONDS = 30.0  # between lines of progress in a log
KEYS_SHOWN = 10


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """Makes prompts with constraints that a program can check, from built-in requests or from your own prompts."""

    out: Path
    """JSONL to write: key, prompt, messages, instruction_id_list, kwargs (IFEval's layout)."""
    count: int | None = None
    """Number of prompts; by default one of each of --seeds."""
    seed: int = 0
    """The same seed gives the same prompts."""
    seeds: Path | None = None
    """JSONL of your own prompts (id, and prompt or messages), to which constraints are added."""
    kinds: str = ""
    """Constraints to use, by id or family and with commas between: count,case:upper,json:list. By default all."""
    constraints: str = "1-3"
    """How many constraints a prompt has: a number, or two with a dash."""
    words: Path | None = None
    """Text file of items, one a line, that lists to copy are made of."""
    wordings: Path | None = None
    """TOML file of your own wordings, in any language: "count:words" = ["In exactly {num_words} words."]."""
    solved: Path | None = None
    """Write here the answers of prompts that determine theirs (lists to copy): they need no model."""

    def run(self) -> None:
        """Makes the prompts and says how many have each kind."""
        fewest, _, most = self.constraints.partition("-")
        if not fewest.isdecimal() or not (most or fewest).isdecimal():
            raise UserError(
                f"--constraints {self.constraints}: expected a number, or two as in 1-3"
            )
        wanted = synthesize.Wanted(
            count=self.count,
            seed=self.seed,
            seeds=self.seeds,
            kinds=tuple(name.strip() for name in self.kinds.split(",") if name.strip()),
            fewest=int(fewest),
            most=int(most or fewest),
            words=self.words,
            wordings=self.wordings,
        )
        progress = ShowProgress("prompts")
        counts = synthesize.write_prompts(wanted, self.out, self.solved, progress)
        progress.end()
        show("constraint", ["prompts"], {kind: [f"{n:,}"] for kind, n in sorted(counts.items())})
        print(f"{self.out}: {progress.done:,} prompts")


@dataclass(frozen=True, kw_only=True)
class Filter:
    """Keeps verified answers as training conversations; the rest is counted under a reason."""

    prompts: Path
    """JSONL of prompts with constraints."""
    answers: tuple[Path, ...]
    """JSONL files of answers: key (or id) and response; any number to a prompt."""
    out: Path
    """JSONL to write: messages, and where they come from."""
    loose: bool = False
    """IFEval's loose verdict: without first or last line or asterisks also passes (the answer is kept as it is)."""
    most: int | None = None
    """Most answers kept of a prompt, the first that pass."""
    held_out: float = 0.0
    """Share of the requests to keep out of --out: OUT.heldout.jsonl and OUT.heldout_prompts.jsonl get them."""
    seed: int = 0
    """Of the held-out side."""
    rejected: Path | None = None
    """Write refused answers here, with their reasons."""
    unanswered: Path | None = None
    """Write prompts without a verified answer here, to be answered again."""

    def run(self) -> None:
        """Filters and prints what was kept and why the rest was not."""
        wanted = verified.Filter(**vars(self))
        progress = ShowProgress("answers")
        kept = verified.keep_verified(wanted, progress)
        progress.end()
        share = {name: [f"{n:,}", f"{n / kept.answers:.1%}"] for name, n in verified.rows_of(kept)}
        show("answers", ["number", "share"], share)
        kinds = {
            kind: [f"{kept.passed[kind]:,}", f"{total:,}", f"{kept.passed[kind] / total:.1%}"]
            for kind, total in sorted(kept.judged.items())
        }
        show("constraint", ["passed", "judged", "share"], kinds)
        print(f"{wanted.out}: {kept.rows:,} conversations")
        if wanted.held_out:
            print(f"{wanted.held_out_rows}: {kept.held_out_rows:,} conversations")
            print(f"{wanted.held_out_prompts}: {kept.held_out_prompts:,} prompts")
        if kept.unanswered:
            first = ", ".join(kept.unanswered[:KEYS_SHOWN])
            more = ", ..." * (len(kept.unanswered) > KEYS_SHOWN)
            total = f"{len(kept.unanswered):,} of {kept.prompts:,}"
            print(f"{total} prompts have no verified answer: {first}{more}")


def main() -> int:
    """Returns the exit status: 0 done, 2 bad input."""
    commands = {"prompts": Prompts, "filter": Filter}
    arguments = tyro.extras.subcommand_cli_from_dict(commands, description=__doc__)
    try:
        arguments.run()
    except UserError as error:
        print(f"synthesize.py: {error}", file=sys.stderr)
        return 2
    return 0


def show(first: str, columns: list[str], lines: dict[str, list[str]]) -> None:
    """A table of numbers."""
    made = Table(first)
    for name in columns:
        made.add_column(name, justify="right")
    for name, cells in lines.items():
        made.add_row(name, *cells)
    Console(width=None if sys.stdout.isatty() else 120).print(made)


class ShowProgress:
    """One line that is overwritten on a terminal; in a log, a line now and then."""

    def __init__(self, what: str) -> None:
        """Starts the clock."""
        self.done = 0
        self._what, self._shown, self._text = what, time.monotonic(), ""

    def __call__(self, done: int, kept: int | None = None) -> None:
        """Shows how far it is."""
        self.done = done
        now, is_terminal = time.monotonic(), sys.stderr.isatty()
        if now - self._shown < (0.2 if is_terminal else LINE_SECONDS):
            return
        self._shown = now
        self._text = f"{done:,} {self._what}" + ("" if kept is None else f", {kept:,} kept")
        start, end = ("\r", "") if is_terminal else ("", "\n")
        print(start + self._text, end=end, file=sys.stderr, flush=True)

    def end(self) -> None:
        """Leaves the line of a terminal."""
        if self._text and sys.stderr.isatty():
            print(file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
