"""Measures answers: by the rules of their prompts, against recorded answers, and over a table of settings.

python scripts/evaluate.py instructions --prompts P.jsonl --answers A.jsonl [B.jsonl ...] [--json OUT.json]

python scripts/evaluate.py win-rate --battles B.jsonl [--answers A.jsonl ...] [--reward-model DIR] [--json OUT.json]

python scripts/evaluate.py sweep SWEEP.toml
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from hymoe.engine.errors import UserError
from hymoe.engine.eval import report
from hymoe.engine.eval.instruct import read_answers, read_prompts, score
from hymoe.engine.eval.judge import Rules, judge
from hymoe.engine.eval.scores import LengthScorer, ScoreCache, Scorer
from hymoe.engine.eval.sweep import read_sweep, run_sweep

LINE_SECONDS = 30.0  # between lines of progress in a log
Out = Annotated[Path | None, tyro.conf.arg(name="json")]


@dataclass(frozen=True, kw_only=True)
class Instructions:
    """Checks answers by the rules of their prompts: pass rates by kind of constraint, one column an answers file."""

    prompts: Path
    """JSONL: key, prompt, instruction_id_list, kwargs (IFEval's layout)."""
    answers: tuple[Path, ...]
    """JSONL files: key (or id) and response, an answer to each prompt."""
    show: int = 0
    """Number of prompts to print with their answers and the reasons of the verdicts."""
    out: Out = None
    """File to write every verdict and total to."""

    def run(self) -> None:
        """Scores each answers file, prints the table, writes the JSON."""
        if not self.answers:
            raise UserError("--answers: found no file, expected one or more")
        report.check_out(self.out, "--json")
        prompts = read_prompts(self.prompts)
        answers = [read_answers(path, prompts) for path in self.answers]
        reports = [score(prompts, found) for found in answers]
        for prompt in prompts[: self.show]:
            print(f"prompt    {prompt.prompt}")
            for found, verdicts in zip(answers, reports, strict=True):
                mark = "kept" if all(verdicts.strict[prompt.key]) else "BROKEN"
                reasons = "; ".join(verdicts.reasons[prompt.key])
                print(f"  {mark:<7} {found[prompt.key]!r}: {reasons}")
        show(report.instructions_table(self.prompts, self.answers, prompts, reports))
        if self.out is not None:
            files = [
                {"answers": str(path), **found.as_dict()}
                for path, found in zip(self.answers, reports, strict=True)
            ]
            # One file's verdicts stand at the top, where other tools look for them; several would be ambiguous there.
            content = reports[0].as_dict() if len(files) == 1 else {"files": files}
            report.write_json(self.out, {"prompts_file": str(self.prompts), **content})


@dataclass(frozen=True, kw_only=True)
class WinRate(Rules):
    """Scores candidates' answers to battles and the recorded ones: win rate, margin, by length, with intervals.

    Several files of answers are compared with the first by a paired t-test on their scores.
    """

    battles: Path
    """JSONL: id, messages, answer, opponent_answer, winner; or an arena's conversation_a, conversation_b, winner."""
    answers: tuple[Path, ...] = ()
    """JSONL files: id and response, an answer to each battle; none: the battles' own answers are measured."""
    reward_model: Path | None = None
    """HF sequence-classification folder that scores; absent: the stand-in scorer, the answer's length."""
    device: str = "cpu"
    """Where the reward model computes: cpu or cuda."""
    dtype: str = "auto"
    """Of the reward model: auto (as in its files), float32 or bfloat16."""
    cache: Path | None = None
    """File that keeps scores by content: a run that stopped goes on, a second one is free."""
    out: Out = None
    """File to write every score and figure to."""

    def run(self) -> None:
        """Scores, prints the table and the comparisons, writes the JSON."""
        report.check_out(self.out, "--json")
        cache = ScoreCache(self.cache)
        scorer = make_scorer(self.reward_model, self.device, self.dtype)
        found = judge(self.battles, self.answers, scorer, cache, self, ShowProgress())
        show(report.win_rate_table(found))
        for line in report.win_rate_lines(found):
            print(line)
        if self.out is not None:
            report.write_json(self.out, {"battles_file": str(self.battles), **found.as_dict()})


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Measures system prompts x penalties x checkpoints on the same items and chooses by a rule stated first."""

    sweep: tyro.conf.Positional[Path]
    """TOML file; engine/eval/sweep.py has an example with every key."""
    device: str = "cpu"
    """Where the reward model computes: cpu or cuda."""

    def run(self) -> None:
        """States the rule, measures, prints the table, writes results and plot."""
        asked = read_sweep(self.sweep)
        model = asked.path(asked.reward_model) if asked.reward_model else None
        result = run_sweep(asked, make_scorer(model, self.device, "auto"), say, ShowProgress())
        show(report.sweep_table(result))
        plot = asked.path(asked.out) / "plot.png"
        report.plot_sweep(result, plot)
        print(f"chosen: {result.chosen} ({result.why})")
        print(f"{plot.parent}: rule.json, results.json, plot.png")


def main() -> int:
    """Returns the exit status: 0 done, 2 bad input."""
    commands = {"instructions": Instructions, "win-rate": WinRate, "sweep": Sweep}
    arguments = tyro.extras.subcommand_cli_from_dict(commands, description=__doc__)
    try:
        arguments.run()
    except UserError as error:
        print(f"evaluate.py: {error}", file=sys.stderr)
        return 2
    return 0


def make_scorer(reward_model: Path | None, device: str, dtype: str) -> Scorer:
    """The reward model of a folder, or the stand-in."""
    if reward_model is None:
        return LengthScorer()
    from hymoe.engine.eval.reward import (
        RewardModel,
    )  # imports torch: seconds that others need not wait

    return RewardModel(reward_model, device=device, dtype=dtype)


def say(line: str) -> None:
    """A line on the screen, at once."""
    print(line, flush=True)


def show(table: Table) -> None:
    """A table, as wide as the terminal; 120 columns in a log."""
    Console(width=None if sys.stdout.isatty() else 120).print(table)


class ShowProgress:
    """One line that is overwritten on a terminal; in a log, a line now and then."""

    def __init__(self) -> None:
        """Starts the clock."""
        self._shown = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        """Shows how many scores are made."""
        now, is_terminal = time.monotonic(), sys.stderr.isatty()
        if now - self._shown < (0.2 if is_terminal else LINE_SECONDS) and done < total:
            return
        self._shown = now
        if is_terminal:
            end = "\n" if done == total else ""
            print(f"\r{done}/{total} scores", end=end, file=sys.stderr, flush=True)
        elif done < total:
            print(f"{done}/{total} scores", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
