"""Measures answers.

python scripts/evaluate.py instructions --prompts P.jsonl --answers A.jsonl [B.jsonl ...] [--json OUT.json]
"""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from hymoe.engine.errors import UserError
from hymoe.engine.eval.instruct import Prompt, Report, read_answers, read_prompts, score


@dataclass(frozen=True, kw_only=True)
class Instructions:
    """Checks answers by the rules of their prompts: pass rates by kind of constraint, one column an answers file."""

    prompts: Path
    """JSONL: key, prompt, instruction_id_list, kwargs (IFEval's layout)."""
    answers: tuple[Path, ...]
    """JSONL files: key (or id) and response, an answer to each prompt."""
    show: int = 0
    """Number of prompts to print with their answers and the reasons of the verdicts."""
    out: Annotated[Path | None, tyro.conf.arg(name="json")] = None
    """File to write every verdict and total to."""


def main() -> int:
    """Returns the exit status: 0 done, 2 bad input."""
    commands = {"instructions": Instructions}
    arguments = tyro.extras.subcommand_cli_from_dict(commands, description=__doc__)
    try:
        instructions(arguments)
    except UserError as error:
        print(f"evaluate.py: {error}", file=sys.stderr)
        return 2
    return 0


def instructions(arguments: Instructions) -> None:
    """Scores each answers file, prints the table, writes the JSON."""
    if not arguments.answers:
        raise UserError("--answers: found no file, expected one or more")
    if arguments.out is not None and not arguments.out.parent.is_dir():
        raise UserError(f"--json {arguments.out}: no folder {arguments.out.parent}")
    prompts = read_prompts(arguments.prompts)
    answers = [read_answers(path, prompts) for path in arguments.answers]
    reports = [score(prompts, found) for found in answers]
    for prompt in prompts[: arguments.show]:
        print(f"prompt    {prompt.prompt}")
        for found, report in zip(answers, reports, strict=True):
            mark = "kept" if all(report.strict[prompt.key]) else "BROKEN"
            print(f"  {mark:<7} {found[prompt.key]!r}: {'; '.join(report.reasons[prompt.key])}")
    Console(width=None if sys.stdout.isatty() else 120).print(table(arguments, prompts, reports))
    if arguments.out is None:
        return
    files = [
        {"answers": str(path), **report.as_dict()}
        for path, report in zip(arguments.answers, reports, strict=True)
    ]
    # One file's verdicts stand at the top, where other tools look for them; several would be ambiguous there.
    content = {"prompts_file": str(arguments.prompts)}
    content |= reports[0].as_dict() if len(files) == 1 else {"files": files}
    partial = arguments.out.with_name(f".{arguments.out.name}.partial")
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, arguments.out)


def table(arguments: Instructions, prompts: list[Prompt], reports: list[Report]) -> Table:
    """Pass rates by kind; strict, with the loose rate where it differs."""
    made = Table(title=f"{len(prompts)} prompts of {arguments.prompts}: constraints kept, strict")
    made.add_column("constraint")
    made.add_column("number", justify="right")
    for path in arguments.answers:
        made.add_column(str(path), justify="right", overflow="fold")
    lines = [
        (kind, [report.by_kind[kind] for report in reports]) for kind in sorted(reports[0].by_kind)
    ]
    lines.append(("all constraints", [report.constraints for report in reports]))
    lines.append(("prompts with all kept", [report.prompts for report in reports]))
    for name, tallies in lines:
        if name == "all constraints":
            made.add_section()
        made.add_row(name, str(tallies[0].total), *(tally.shown() for tally in tallies))
    return made


if __name__ == "__main__":
    sys.exit(main())
