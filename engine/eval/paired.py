"""Tests of two settings on the same items, and the correction for making several.

**Scores**: paired t-test on the differences. **Passes** (yes or no): McNemar's exact test, a sign test on the
items where the two settings differ. **Several** comparisons: Holm's step-down correction of their p values.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hymoe.engine.errors import UserError

ASSUMPTIONS = (
    "Paired t-test. It assumes that the items are independent draws of what is asked, and that the mean of "
    "the paired differences is about normal: true for some 30 items or more without a few huge differences. "
    "It is about the scorer's numbers; that a person would agree is another question."
)
FEW = 30  # below this the t-test leans on the differences themselves being normal
NO_DIFFERENCE = "no difference: the two lists are identical"


@dataclass(frozen=True, slots=True)
class PairedTest:
    """One comparison; `difference` is first minus second, per item."""

    test: str
    pairs: int
    difference: float
    interval: tuple[float, float] | None  # 95 %, of the difference; None where the test has none
    statistic: float | None  # None where the differences have no spread
    p_value: float
    verdict: str

    def as_dict(self) -> dict[str, Any]:
        """For a JSON file."""
        return asdict(self)


def paired_t(first: Sequence[float], second: Sequence[float]) -> PairedTest:
    """Whether two lists of scores of the same items differ in their mean.

    Lists without any difference give p = 1, not NaN. Where every item differs by one and the same amount there
    is no spread to judge by: the sign test answers instead.

    Raises:
        UserError: lists of different lengths, or fewer than two items.
    """
    stats = scipy_stats()
    a, b = np.asarray(first, np.float64), np.asarray(second, np.float64)
    if len(a) != len(b) or len(a) < 2:
        raise UserError(
            f"a paired test needs two lists of one length of 2 or more, found {len(a)}, {len(b)}"
        )
    difference = a - b
    mean, spread = float(difference.mean()), float(difference.std(ddof=1))
    if not difference.any():
        return PairedTest("paired t-test", len(a), 0.0, (0.0, 0.0), None, 1.0, NO_DIFFERENCE)
    if spread <= 1e-12 * abs(mean):
        p = min(1.0, 2 * 0.5 ** len(a))
        said = f"every item differs by {mean:.6g}; no spread for a t-test, p is the sign test's"
        return PairedTest("sign test", len(a), mean, (mean, mean), None, p, said)
    result = stats.ttest_rel(a, b)
    interval = result.confidence_interval(0.95)
    p = float(result.pvalue)
    return PairedTest(
        "paired t-test",
        len(a),
        mean,
        (float(interval.low), float(interval.high)),
        float(result.statistic),
        p,
        _verdict(mean, p) + (f"; few items ({len(a)})" if len(a) < FEW else ""),
    )


def mcnemar(first: Sequence[bool], second: Sequence[bool]) -> PairedTest:
    """Whether two lists of passes of the same items differ, by the items on which they do.

    Raises:
        UserError: lists of different lengths, or empty ones.
    """
    stats = scipy_stats()
    a, b = np.asarray(first, bool), np.asarray(second, bool)
    if len(a) != len(b) or not len(a):
        raise UserError(f"a paired test needs two lists of one length, found {len(a)}, {len(b)}")
    gained, lost = int((a & ~b).sum()), int((~a & b).sum())
    mean = (gained - lost) / len(a)
    name = "McNemar's exact test"
    if not gained + lost:
        return PairedTest(name, len(a), 0.0, None, None, 1.0, NO_DIFFERENCE)
    p = float(stats.binomtest(gained, gained + lost).pvalue)
    said = f"{_verdict(mean, p)}; {gained} items gained, {lost} lost"
    return PairedTest(name, len(a), mean, None, float(gained), p, said)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p values, in the order given."""
    order = np.argsort(p_values, kind="stable")
    adjusted, worst = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(order):
        worst = max(worst, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = worst
    return adjusted


def scipy_stats() -> Any:
    """The module scipy.stats.

    Raises:
        UserError: SciPy is not installed.
    """
    try:
        from scipy import stats
    except ModuleNotFoundError as error:
        raise UserError("paired tests need the package scipy: pip install scipy") from error
    return stats


def _verdict(mean: float, p: float) -> str:
    side = "the first is higher" if mean > 0 else "the second is higher"
    return (
        f"{side} by {abs(mean):.4g} (p = {p:.3g})" if p < 0.05 else f"not told apart (p = {p:.3g})"
    )
