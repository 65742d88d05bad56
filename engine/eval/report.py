"""What the measurements show a person: tables, a plot, and JSON files that are whole or not there."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from hymoe.engine.errors import UserError
from hymoe.engine.eval.instruct import Prompt, Report
from hymoe.engine.eval.paired import ASSUMPTIONS
from hymoe.engine.eval.winrate import FORMULA

if TYPE_CHECKING:
    from hymoe.engine.eval.judge import Judgement
    from hymoe.engine.eval.sweep import SweepResult

BAR = "#4c72b0"
CHOSEN = "#c44e52"


def check_out(path: Path | None, flag: str) -> None:
    """Refuses a file that could not be written, before the work.

    Raises:
        UserError: its folder is not there, or it is a folder.
    """
    if path is not None and (not path.parent.is_dir() or path.is_dir()):
        raise UserError(f"{flag} {path}: expected a file in a folder that exists")


def write_json(path: Path, content: Any) -> None:
    """Writes a JSON file in one step."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)


def instructions_table(
    where: Path, files: Sequence[Path], prompts: Sequence[Prompt], reports: Sequence[Report]
) -> Table:
    """Pass rates by kind; strict with the 95 % interval, and the loose rate where it differs."""
    made = Table(
        title=f"{len(prompts)} prompts of {where}: constraints kept, strict [95 % interval]"
    )
    made.add_column("constraint")
    made.add_column("number", justify="right")
    for path in files:
        made.add_column(str(path), justify="right", overflow="fold")
    lines = [
        (kind, [report.by_kind[kind] for report in reports]) for kind in sorted(reports[0].by_kind)
    ]
    lines.append(("all constraints", [report.constraints for report in reports]))
    lines.append(("prompts with all kept", [report.prompts for report in reports]))
    for name, tallies in lines:
        if name == "all constraints":
            made.add_section()
        shown = [tally.shown().replace("[", r"\[") for tally in tallies]  # rich reads [ as markup
        made.add_row(name, str(tallies[0].total), *shown)
    return made


def win_rate_table(judgement: "Judgement") -> Table:
    """One column a candidate."""
    made = Table(
        title=f"{len(judgement.ids)} battles against the recorded {judgement.rules.against}, by "
        f"{judgement.scorer[:32]}; ties are half a win"
    )
    made.add_column("")
    for candidate in judgement.candidates:
        made.add_column(candidate.name, justify="right", overflow="fold")
    results = [candidate.result for candidate in judgement.candidates]
    made.add_row("win rate", *(_rate(r.total.rate, r.rate_interval) for r in results))
    made.add_row(
        "at equal lengths",
        *(_rate(r.length_controlled_rate, r.length_controlled_interval) for r in results),
    )
    made.add_row(
        "won / tie / lost",
        *(f"{r.total.wins} / {r.total.ties} / {r.total.losses}" for r in results),
    )
    made.add_row(
        "mean margin",
        *(_number(r.total.mean_margin, r.margin_interval) for r in results),
    )
    made.add_row("mean length difference", *(f"{r.mean_length_difference:+.0f}" for r in results))
    made.add_section()
    for name in results[0].buckets:
        tallies = [result.buckets[name] for result in results]
        made.add_row(
            f"{name} characters",
            *("-" if t.rate is None else f"{t.rate:.3f} of {t.battles}" for t in tallies),
        )
    return made


def win_rate_lines(judgement: "Judgement") -> list[str]:
    """What the table does not hold, in words: battles left out, voters, the formula, comparisons."""
    lines = [
        f"left out: {count} battles ({reason})" for reason, count in judgement.left_out.items()
    ]
    if judgement.agreement is not None:
        agreed, decisive = judgement.agreement
        lines.append(f"the scorer agrees with the voter in {agreed} of {decisive} decisive battles")
    lines.append(f"at equal lengths: {FORMULA}")
    first = judgement.candidates[0].name
    others = zip(judgement.candidates[1:], judgement.tests, judgement.adjusted, strict=True)
    lines += [
        f"{first} against {other.name}: {test.verdict}, {p:.3g} after Holm; mean score {test.difference:+.4g}"
        for other, test, p in others
    ]
    return lines + [ASSUMPTIONS] * bool(judgement.tests)


def sweep_table(result: "SweepResult") -> Table:
    """One row a setting, two columns a split."""
    made = Table(
        title="settings (checkpoint/system prompt/penalty); p of the paired test, after Holm"
    )
    made.add_column("setting")
    for name, measure in result.measures.items():
        items = len(next(iter(result.found[name].values())).items)
        made.add_column(f"{name}: {measure} of {items}", justify="right")
        made.add_column(f"p against {result.tests[name].baseline}", justify="right")
    for setting in next(iter(result.found.values())):
        cells = []
        for name, rows in result.found.items():
            measured, adjusted = rows[setting], result.tests[name].adjusted
            cells.append(_number(measured.value, measured.interval))
            cells.append(f"{adjusted[setting]:.3g}" if setting in adjusted else "baseline")
        mark = " <- chosen" if setting == result.chosen else ""
        made.add_row(setting + mark, *cells)
    return made


def plot_sweep(result: "SweepResult", path: Path) -> None:
    """A PNG: one panel a split, one line a setting, with 95 % intervals; the chosen one in red.

    Raises:
        UserError: matplotlib is not installed.
    """
    names = list(next(iter(result.found.values())))
    places = range(len(names), 0, -1)
    figure = figure_class()(figsize=(2.5 + 4 * len(result.found), 1.6 + 0.32 * len(names)), dpi=120)
    panels = figure.subplots(1, len(result.found), sharey=True, squeeze=False)[0]
    for panel, (split, rows) in zip(panels, result.found.items(), strict=True):
        for place, name in zip(places, names, strict=True):
            measured = rows[name]
            colour = CHOSEN if name == result.chosen else BAR
            if measured.interval is not None:
                panel.plot(measured.interval, (place, place), color=colour, linewidth=2)
            panel.plot([measured.value], [place], "o", color=colour)
        panel.axvline(rows[result.tests[split].baseline].value, color="0.6", linestyle=":")
        items = len(next(iter(rows.values())).items)
        decides = ", decides" if split == result.choice.split else ""
        panel.set_title(f"{split} ({items} items{decides})", fontsize=10)
        panel.set_xlabel(f"{result.measures[split]}, 95 % interval", fontsize=9)
        panel.grid(axis="x", alpha=0.3)
    panels[0].set_yticks(list(places), names, fontsize=8)
    panels[0].set_ylim(0.4, len(names) + 0.6)
    figure.suptitle(f"chosen: {result.chosen} (red); dotted: the baseline", fontsize=10)
    figure.tight_layout()
    partial = path.with_name(f".{path.name}.partial")
    figure.savefig(partial, format="png")
    os.replace(partial, path)


def figure_class() -> Any:
    """Matplotlib's figure, drawn without a screen.

    Raises:
        UserError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise UserError("a plot needs the package matplotlib: pip install matplotlib") from error
    return Figure


def _rate(value: float | None, interval: tuple[float, float] | None) -> str:
    return "not to be had" if value is None else _number(value, interval)


def _number(value: float | None, interval: tuple[float, float] | None) -> str:
    shown = f"{value:.3f}"
    return shown if interval is None else rf"{shown} \[{interval[0]:.3f}, {interval[1]:.3f}]"
