"""Wilson's interval of a rate: the one statistic that needs no package."""

from math import sqrt
from statistics import NormalDist


def wilson(passed: int, total: int, confidence: float = 0.95) -> tuple[float, float]:
    """The interval of a rate, of independent trials; it stays inside 0 to 1 and is no point at either end.

    Args:
        passed: trials that passed.
        total: all trials, at least 1.
        confidence: share of such intervals that hold the true rate.
    """
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    rate = passed / total
    centre = (rate + z * z / (2 * total)) / (1 + z * z / total)
    half = z * sqrt(rate * (1 - rate) / total + z * z / (4 * total**2)) / (1 + z * z / total)
    low = 0.0 if passed == 0 else centre - half
    return low, 1.0 if passed == total else centre + half
