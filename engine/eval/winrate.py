"""Win rate of a candidate against recorded answers, from the scores of both.

A battle is won where the candidate scores higher; equal scores are a tie, counted apart, and half a win in
every rate. The margin is the candidate's score minus the recorded one's.

**Interval**: percentile bootstrap over battles, from a seed.

**Length-controlled rate**: judges follow length, so a plain rate can be bought with longer answers. A
logistic regression takes that part out: the chance to win a battle is

    p = 1 / (1 + exp(-(a + b * d / s)))

with d the candidate's length minus the recorded one's in characters and s the root mean square of d over the
battles. a and b maximise sum(y log p + (1 - y) log(1 - p)) - b^2 / 2, where y is 1, 1/2 or 0; the last term
keeps b finite where length alone decides. The rate is 1 / (1 + exp(-a)): what is won at equal lengths.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hymoe.engine.errors import UserError

BUCKETS = (200, 500, 1500)  # characters; very short and very long answers fare differently
RESAMPLES = 10_000
CHUNK = 50  # resamples at once: they fit a core's cache, which is faster than more of them
NEWTON_STEPS = 100
STEP_END = 1e-10  # in log odds; the convergence is quadratic, so the next step would be nothing
FORMULA = (
    "p(win) = 1/(1+exp(-(a + b*d/s))), d = candidate's minus recorded characters, s = root mean square of d; "
    "a, b by maximum likelihood less b^2/2, ties half; the rate is 1/(1+exp(-a)), at equal lengths"
)


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts of one set of battles; `rate` and `mean_margin` are None where there are none."""

    battles: int
    wins: int
    ties: int
    losses: int
    rate: float | None  # (wins + ties / 2) / battles
    mean_margin: float | None


@dataclass(frozen=True, slots=True)
class WinRate:
    """A candidate's result."""

    total: Tally
    rate_interval: tuple[float, float]  # 95 %
    margin_interval: tuple[float, float]
    buckets: dict[str, Tally]  # by the candidate's characters
    length_controlled_rate: float | None  # None where one length difference is everywhere
    length_controlled_interval: tuple[float, float] | None
    length_slope: float | None  # b of the formula
    mean_length_difference: float  # characters
    resamples: int
    seed: int

    def as_dict(self) -> dict[str, Any]:
        """For a JSON file."""
        made = asdict(self)
        return {**made.pop("total"), **made, "length_formula": FORMULA}


def win_rate(
    candidate: Sequence[float],
    recorded: Sequence[float],
    candidate_lengths: Sequence[int],
    recorded_lengths: Sequence[int],
    *,
    buckets: Sequence[int] = BUCKETS,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> WinRate:
    """Compares scores battle by battle.

    Args:
        candidate: scores, one a battle.
        recorded: scores of the answers to beat, in the same order.
        candidate_lengths: characters.
        recorded_lengths: characters.
        buckets: rising bounds of the candidate's length.
        resamples: of the bootstrap.
        seed: of the bootstrap.

    Raises:
        UserError: no battle, lists of different lengths, bounds that do not rise.
    """
    sizes = {len(x) for x in (candidate, recorded, candidate_lengths, recorded_lengths)}
    if len(sizes) != 1 or 0 in sizes:
        raise UserError(f"a win rate needs one or more battles, found {sorted(sizes)} scores")
    if list(buckets) != sorted(set(buckets)) or any(bound < 1 for bound in buckets):
        raise UserError(f"buckets {list(buckets)}, expected rising numbers of characters")
    if resamples < 1:
        raise UserError(f"{resamples} resamples, expected 1 or more")
    margin = np.asarray(candidate, np.float64) - np.asarray(recorded, np.float64)
    outcome = (np.sign(margin) + 1) / 2
    length = np.asarray(candidate_lengths, np.int64)
    longer = (length - np.asarray(recorded_lengths, np.int64)).astype(np.float64)
    place = np.searchsorted(np.asarray(buckets), length, side="right")
    rng = np.random.default_rng(seed)
    fit = length_controlled(outcome, longer)
    means, controlled = _bootstrap(margin, outcome, longer, resamples, rng, fit)
    return WinRate(
        total=_tally(margin),
        rate_interval=_percentiles(means[0]),
        margin_interval=_percentiles(means[1]),
        buckets={
            name: _tally(margin[place == number])
            for number, name in enumerate(bucket_names(buckets))
        },
        length_controlled_rate=None if fit is None else fit[0],
        length_controlled_interval=None if fit is None else _percentiles(controlled),
        length_slope=None if fit is None else fit[1],
        mean_length_difference=float(longer.mean()),
        resamples=resamples,
        seed=seed,
    )


def bucket_names(bounds: Sequence[int]) -> list[str]:
    """Names of the ranges between the bounds, in characters."""
    lows, highs = [0, *bounds], [*bounds, None]
    return [
        f"{low} or more" if high is None else f"{low} to {high - 1}"
        for low, high in zip(lows, highs, strict=True)
    ]


def length_controlled(outcome: np.ndarray, longer: np.ndarray) -> tuple[float, float] | None:
    """The rate at equal lengths, and the slope; see the head of this file.

    Args:
        outcome: (N,) float, 1 won, 0.5 tie, 0 lost.
        longer: (N,) float, the candidate's characters minus the recorded ones.

    Returns:
        Rate and slope; None where all battles have one and the same difference that is not 0.
    """
    if longer[0] != 0 and (longer == longer[0]).all():
        return None
    rate, slope = _fit(outcome, _scaled(longer), np.ones((1, len(outcome))), (0.0, 0.0))
    return float(rate[0]), float(slope[0])


def _scaled(longer: np.ndarray) -> np.ndarray:
    size = np.sqrt(np.mean(longer**2))
    return longer / size if size else longer


def _fit(
    outcome: np.ndarray, x: np.ndarray, weights: np.ndarray, start: tuple[float, float]
) -> tuple[np.ndarray, np.ndarray]:
    """Newton's method for several weightings of the battles at once.

    Args:
        outcome: (N,) float.
        x: (N,) float, or (B, N), scaled length differences.
        weights: (B, N) float, how often each battle counts.
        start: a and b to begin with.

    Returns:
        (B,) rates at equal lengths and (B,) slopes.
    """
    total = weights.sum(1)
    won = weights @ outcome
    is_all = (won == 0) | (won == total)  # a has no maximum: the rate is 0 or 1
    a, b = np.full(len(weights), start[0]), np.full(len(weights), start[1])
    for _ in range(NEWTON_STEPS):
        p = 1 / (1 + np.exp(-np.clip(a[:, None] + b[:, None] * x, -700, 700)))
        rest = weights * (outcome - p)
        da, db = rest.sum(1), (rest * x).sum(1) - b
        q = weights * p * (1 - p)
        aa, ab, bb = q.sum(1) + 1e-12, (q * x).sum(1), (q * x * x).sum(1) + 1
        det = aa * bb - ab * ab
        step_a = np.where(is_all, 0, np.clip((bb * da - ab * db) / det, -2, 2))
        step_b = np.where(is_all, 0, np.clip((aa * db - ab * da) / det, -2, 2))
        a, b = a + step_a, b + step_b
        if max(np.abs(step_a).max(), np.abs(step_b).max()) < STEP_END:
            break
    rate = np.where(is_all, won / total, 1 / (1 + np.exp(-a)))
    return rate, b


def _bootstrap(
    margin: np.ndarray,
    outcome: np.ndarray,
    longer: np.ndarray,
    resamples: int,
    rng: np.random.Generator,
    fit: tuple[float, float] | None,
) -> tuple[np.ndarray, np.ndarray]:
    """(2, B) mean outcome and margin, and (B,) length-controlled rates, of battles drawn with replacement."""
    size, means, rates = len(margin), [], []
    rate, slope = fit or (0.5, 0.0)
    start = (float(np.log(rate / (1 - rate))) if 0 < rate < 1 else 0.0, slope)
    for done in range(0, resamples, CHUNK):
        drawn = rng.integers(0, size, (min(CHUNK, resamples - done), size))
        means.append(np.stack([outcome[drawn].mean(1), margin[drawn].mean(1)]))
        row = np.arange(len(drawn))[:, None] * size
        counts = np.bincount((row + drawn).ravel(), minlength=drawn.size).reshape(drawn.shape) * 1.0
        rms = np.sqrt(counts @ longer**2 / size)
        scaled = longer / np.where(rms > 0, rms, 1)[:, None]
        if fit is not None:
            rates.append(_fit(outcome, scaled, counts, start)[0])
    return np.concatenate(means, axis=1), np.concatenate(rates or [np.zeros(0)])


def _percentiles(values: np.ndarray) -> tuple[float, float]:
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


def _tally(margin: np.ndarray) -> Tally:
    wins, ties = int((margin > 0).sum()), int((margin == 0).sum())
    count = len(margin)
    rate = (wins + ties / 2) / count if count else None
    mean = float(margin.mean()) if count else None
    return Tally(count, wins, ties, count - wins - ties, rate, mean)
