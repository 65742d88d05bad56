"""Choosing a setting: what is measured on a split, how settings are tested, and the rule that decides.

A rule is data and a sentence, so that it can be written down before there is a number. It names the split, the
measure and the baseline; every other setting is compared with the baseline item by item, and the p values are
corrected for their number (Holm).

| measure | of | items | test |
|---|---|---|---|
| win_rate | battles | 1, 1/2, 0 for won, tie, lost | paired t-test |
| length_controlled_rate | battles | the same | the same: of the plain outcomes |
| mean_margin | battles | margins | paired t-test |
| prompts_strict, prompts_loose | prompts | all constraints kept or not | McNemar's exact test |
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from hymoe.engine.errors import UserError
from hymoe.engine.eval.instruct import Report
from hymoe.engine.eval.intervals import wilson
from hymoe.engine.eval.paired import PairedTest, holm, mcnemar, paired_t
from hymoe.engine.eval.winrate import WinRate

Measure = Literal[
    "win_rate", "length_controlled_rate", "mean_margin", "prompts_strict", "prompts_loose"
]
OF_BATTLES = ("win_rate", "length_controlled_rate", "mean_margin")
OF_PROMPTS = ("prompts_strict", "prompts_loose")


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The rule; the table `[choice]` of a sweep."""

    split: str
    measure: Measure
    rule: Literal["highest", "better_than_baseline"] = "better_than_baseline"
    baseline: str = ""  # name of a setting; empty: the first
    alpha: float = 0.05

    def sentence(self, baseline: str) -> str:
        """The rule in words."""
        best = f"the setting with the highest {self.measure} on split {self.split!r}; of equal ones the earlier"
        if self.rule == "highest":
            return f"Chosen is {best}."
        return (
            f"Chosen is {best}, if its paired test against {baseline} has a Holm-corrected p below "
            f"{self.alpha:g}; else {baseline} stays."
        )


@dataclass(frozen=True, slots=True)
class Measured:
    """One setting on one split."""

    value: float
    interval: tuple[float, float] | None
    items: tuple[float, ...]  # one number an item, in the split's order
    values: dict[str, float | None]  # every measure of the split


@dataclass(frozen=True, slots=True)
class Tests:
    """Each setting but the baseline against the baseline, by name."""

    baseline: str
    tests: dict[str, PairedTest]
    adjusted: dict[str, float]


def measure_battles(
    result: WinRate, scores: Sequence[float], recorded: Sequence[float], measure: str
) -> Measured:
    """What a split of battles says about a setting."""
    margins = np.asarray(scores, np.float64) - np.asarray(recorded, np.float64)
    values = {
        "win_rate": result.total.rate,
        "length_controlled_rate": result.length_controlled_rate,
        "mean_margin": result.total.mean_margin,
    }
    intervals = {
        "win_rate": result.rate_interval,
        "length_controlled_rate": result.length_controlled_interval,
        "mean_margin": result.margin_interval,
    }
    value = values[measure]
    if value is None:
        raise UserError(
            f"{measure}: every battle has the same difference of lengths, nothing to control for"
        )
    items = margins if measure == "mean_margin" else (np.sign(margins) + 1) / 2
    return Measured(value, intervals[measure], tuple(items.tolist()), values)


def measure_prompts(report: Report, measure: str) -> Measured:
    """What a split of prompts with constraints says about a setting."""
    verdicts = report.strict if measure == "prompts_strict" else report.loose
    items = [float(all(found)) for found in verdicts.values() if found]
    if not items:
        raise UserError(f"{measure}: no prompt has a constraint")
    total = len(items)
    values = {
        "prompts_strict": report.prompts.strict / total,
        "prompts_loose": report.prompts.loose / total,
        "constraints_strict": report.constraints.strict / report.constraints.total,
        "constraints_loose": report.constraints.loose / report.constraints.total,
    }
    return Measured(values[measure], wilson(int(sum(items)), total), tuple(items), values)


def compare(found: dict[str, Measured], baseline: str, measure: str) -> Tests:
    """Tests every setting against the baseline.

    Args:
        found: by name of the setting.
        baseline: one of the names.
        measure: decides the test.
    """
    base = found[baseline].items
    tests: dict[str, PairedTest] = {}
    for name, measured in found.items():
        if name == baseline:
            continue
        if measure in OF_PROMPTS:
            pair = [[bool(item) for item in items] for items in (measured.items, base)]
            tests[name] = mcnemar(*pair)
        else:
            tests[name] = paired_t(measured.items, base)
    adjusted = holm([test.p_value for test in tests.values()])
    return Tests(baseline, tests, dict(zip(tests, adjusted, strict=True)))


def choose(choice: Choice, found: dict[str, Measured], tests: Tests) -> tuple[str, str]:
    """The name of the chosen setting, and why, by the rule.

    Args:
        choice: the rule.
        found: by name, in the order of the settings, on the split of the rule.
        tests: of the same.
    """
    best = max(found, key=lambda name: found[name].value)  # the first of equal ones
    value = f"{choice.measure} {found[best].value:.4g}"
    if choice.rule == "highest":
        return best, f"{value} is the highest of {len(found)}"
    if best == tests.baseline:
        return best, f"the baseline has the highest {value}"
    p = tests.adjusted[best]
    test = tests.tests[best]
    if p < choice.alpha and test.difference > 0:
        return best, f"{value} is the highest of {len(found)}, p = {p:.3g} after Holm"
    return (
        tests.baseline,
        f"the highest is {best} with {value}, but p = {p:.3g} after Holm does not tell it from the baseline",
    )


def as_rows(found: dict[str, Measured], tests: Tests) -> list[dict[str, Any]]:
    """One object a setting, for a JSON file."""
    rows = []
    for name, measured in found.items():
        row: dict[str, Any] = {
            "setting": name,
            "value": measured.value,
            "interval": measured.interval,
            **measured.values,
        }
        if name in tests.tests:
            row |= {"test": tests.tests[name].as_dict(), "p_holm": tests.adjusted[name]}
        rows.append(row)
    return rows
