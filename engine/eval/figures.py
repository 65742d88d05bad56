"""The headline figures of a file that `evaluate.py` wrote: instructions, win-rate, or a sweep's results.json."""

import json
from pathlib import Path
from typing import Any

from hymoe.engine.errors import UserError

Figure = dict[
    str, Any
]  # measure, value, interval (95 %, or None), count (of prompts or battles), subject


def read_figures(path: Path) -> tuple[str, list[Figure]]:
    """What was measured, and the figures.

    Raises:
        UserError: the file cannot be read, or it is none of the three kinds.
    """
    content = read_object(path)
    kinds = {
        "instructions": (("prompts_file",), _instructions),
        "win-rate": (("battles_file", "candidates"), _win_rates),
        "sweep": (("rule", "splits"), _sweep),
    }
    for kind, (keys, read) in kinds.items():
        if all(key in content for key in keys):
            try:
                return kind, read(content)
            except (KeyError, TypeError) as error:
                raise UserError(
                    f"{path}: a file of evaluate.py {kind} without {error}; measure again"
                ) from None
    raise UserError(
        f"{path}: expected what evaluate.py instructions, win-rate or sweep wrote as JSON"
    )


def _figure(measure: str, value: Any, interval: Any, count: int, subject: str) -> Figure:
    return {
        "measure": measure,
        "value": value,
        "interval": interval,
        "count": count,
        "subject": subject,
    }


def _instructions(content: dict[str, Any]) -> list[Figure]:
    found = []
    for report in content.get("files", [content]):
        subject = report.get("answers", content["prompts_file"])
        for what in ("prompts", "constraints"):
            tally = report[what]
            for way in ("strict", "loose"):
                rate, interval = tally[f"{way}_rate"], tally[f"{way}_interval"]
                name = f"instruction {what} kept, {way}"
                found.append(_figure(name, rate, interval, tally["total"], subject))
    return found


def _win_rates(content: dict[str, Any]) -> list[Figure]:
    found = []
    for candidate in content["candidates"]:
        count, subject = candidate["battles"], candidate["answers"]
        judged = f"by {content['scorer']}"
        for name, value, interval in (
            ("win rate", "rate", "rate_interval"),
            ("mean margin", "mean_margin", "margin_interval"),
            ("win rate at equal lengths", "length_controlled_rate", "length_controlled_interval"),
        ):
            figure = _figure(
                f"{name} {judged}", candidate[value], candidate[interval], count, subject
            )
            found.append(figure)
    return found


def _sweep(content: dict[str, Any]) -> list[Figure]:
    chosen = content["chosen"]
    found = []
    for split, result in content["splits"].items():
        rows = [row for row in result["settings"] if row["setting"] == chosen]
        found += [
            _figure(
                f"{result['measure']} on {split}",
                row["value"],
                row["interval"],
                result["items"],
                f"{chosen}, chosen among {len(result['settings'])}",
            )
            for row in rows
        ]
    return found


def read_object(path: Path) -> dict[str, Any]:
    """A file that holds a JSON object.

    Raises:
        UserError: it cannot be read, or holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise UserError(f"{path}: no valid JSON ({error})") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content
