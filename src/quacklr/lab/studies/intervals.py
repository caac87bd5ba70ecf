"""Intervals of a mean difference that stay valid when seeds are added until a comparison is decided.

Repeated confidence intervals (Jennison and Turnbull 1989, "Interim analyses: the repeated confidence interval
approach"): a Student t interval after each seed from FEWEST_SEEDS to MOST_SEEDS, all at the same LEVEL. LEVEL is chosen
so that with normal noise all of these intervals contain the true difference in 95 % of cases. So one may stop after any
seed, and each interval is wider than a 95 % interval for a fixed number of seeds. docs/study.md has the simulated
coverage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from statistics import fmean

FEWEST_SEEDS, MOST_SEEDS = 3, 48
LEVEL = 0.995


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """The interval of the mean, from the differences of the seeds in the order in which they were added.

    It is the intersection of the intervals after each number of seeds, so it never grows. Infinite for fewer than
    FEWEST_SEEDS seeds.
    """
    counts = range(FEWEST_SEEDS, len(differences) + 1)
    return intersection([t_interval(differences[:count]) for count in counts] or [(-math.inf, math.inf)])


def intersection(intervals: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The intersection of intervals; if it is empty, which is rare, the last of them."""
    lows, highs = zip(*intervals, strict=True)
    low, high = max(lows), min(highs)
    return (low, high) if low <= high else intervals[-1]


def t_interval(differences: Sequence[float]) -> tuple[float, float]:
    """The Student t interval at LEVEL."""
    center, seeds = fmean(differences), len(differences)
    spread = math.hypot(*(each - center for each in differences)) / math.sqrt(seeds - 1)
    half = half_width(spread, seeds)
    return center - half, center + half


def half_width(spread: float, seeds: int) -> float:
    """Half the width of an interval, from the standard deviation of the differences over the seeds."""
    return t_quantile(seeds - 1, (1 + LEVEL) / 2) * spread / math.sqrt(seeds)


@cache
def t_quantile(freedom: int, level: float) -> float:
    """Quantile of Student's t distribution, by bisection of its integral; scipy is not a dependency of the lab."""
    log_scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)
    scale = math.exp(log_scale) / math.sqrt(freedom * math.pi)

    def cdf(t: float) -> float:
        # substituting t = sqrt(freedom) tan(a) makes the density a power of cos(a), which Simpson's rule integrates
        angle, parts = math.atan(t / math.sqrt(freedom)), 400
        values = [math.cos(angle * k / parts) ** (freedom - 1) for k in range(parts + 1)]
        simpson = values[0] + values[-1] + 4 * sum(values[1:-1:2]) + 2 * sum(values[2:-1:2])
        return 0.5 + scale * math.sqrt(freedom) * simpson * angle / parts / 3

    low, high = 0.0, 1e3
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if cdf(middle) < level else (low, middle)
    return low
