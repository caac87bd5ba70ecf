"""Intervals that stay valid while seeds are added. Coverage is judged by simulation, quantiles by a printed table."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from quacklr.lab.studies.comparison import SAME, Comparison, Verdict, less
from quacklr.lab.studies.intervals import FEWEST_SEEDS, MOST_SEEDS, interval, t_interval, t_quantile


@pytest.mark.parametrize(
    ("freedom", "level", "value"),
    [
        (1, 0.975, 12.7062), (2, 0.975, 4.30265), (4, 0.975, 2.77645), (9, 0.975, 2.26216), (30, 0.975, 2.04227),
        (2, 0.995, 9.92484), (15, 0.995, 2.94671), (199, 0.995, 2.60076),
    ],
)  # fmt: skip
def test_quantiles_are_those_of_the_printed_table(freedom: int, level: float, value: float) -> None:
    assert t_quantile(freedom, level) == pytest.approx(value, abs=1e-5)


def test_an_interval_needs_three_seeds_and_is_students() -> None:
    assert interval([1.0, 2.0]) == (-math.inf, math.inf)
    # differences 1, 2, 6: mean 3, sd sqrt(7); with 2 degrees of freedom the quantile has a closed form
    half = 0.995 * math.sqrt(2 / (1 - 0.995**2)) * math.sqrt(7 / 3)
    assert interval([1.0, 2.0, 6.0]) == pytest.approx((3 - half, 3 + half), rel=1e-6)


def test_one_more_seed_never_makes_an_interval_wider() -> None:
    """The fourth seed is far off: the interval of all four contains that of the first three, which is kept."""
    values = [0.1, 0.1001, 0.0999, 0.3]
    (low, high), (wider_low, wider_high) = t_interval(values[:3]), t_interval(values)
    assert wider_low < low < high < wider_high
    assert interval(values) == (low, high)
    noise = random.Random(0)
    for _ in range(200):
        values = [noise.gauss(0.1, 1.0) for _ in range(MOST_SEEDS)]
        looks = [t_interval(values[:count]) for count in range(FEWEST_SEEDS, MOST_SEEDS + 1)]
        if all(low <= other_high for low, _ in looks for _, other_high in looks):
            ends = [interval(values[:count]) for count in range(FEWEST_SEEDS, MOST_SEEDS + 1)]
            for (low, high), (next_low, next_high) in pairwise(ends):
                assert low <= next_low <= next_high <= high


def test_an_interval_that_contradicts_the_earlier_ones_replaces_them() -> None:
    values = [0.0, 0.001, -0.001, *[5.0] * 20]
    assert interval(values[:3])[1] < 0.1
    assert interval(values) == t_interval(values)
    assert interval(values)[0] > 1.0


def misses(noise: Callable[[random.Random], float], runs: int, seed: int) -> float:
    """How often the interval excludes the true difference, 0, after some number of seeds: at any look."""
    source, missed = random.Random(seed), 0
    quantiles = {count: t_quantile(count - 1, (1 + 0.995) / 2) for count in range(FEWEST_SEEDS, MOST_SEEDS + 1)}
    for _ in range(runs):
        total = squares = 0.0
        for count in range(1, MOST_SEEDS + 1):
            value = noise(source)
            total, squares = total + value, squares + value * value
            if count >= FEWEST_SEEDS:
                mean = total / count
                spread = math.sqrt(max(squares - count * mean * mean, 1e-300) / (count - 1))
                if abs(mean) > quantiles[count] * spread / math.sqrt(count):
                    missed += 1
                    break
    return missed / runs


def test_looking_after_every_seed_misses_no_difference_in_5_percent_of_cases() -> None:
    # 20,000 cases: the standard error is 0.15 %
    assert misses(lambda source: source.gauss(0, 1), 20_000, seed=0) == pytest.approx(0.0492, abs=0.006)
    # noise with bounded tails is worse, with heavy ones (mixed variances) better, and skewed noise much worse
    assert misses(lambda source: source.uniform(-1, 1), 20_000, seed=1) == pytest.approx(0.0724, abs=0.008)
    assert misses(lambda source: source.gauss(0, source.choice((1, 3))), 20_000, seed=2) == pytest.approx(
        0.0315, abs=0.005
    )
    assert misses(lambda source: source.expovariate(1) - 1, 20_000, seed=3) == pytest.approx(0.166, abs=0.01)


@pytest.mark.parametrize(("difference", "wrong"), [(0.0, {"holds", "fails"}), (0.05, {"holds", "the same"})])
def test_verdicts_after_every_seed_are_wrong_in_5_percent_of_cases(difference: float, wrong: set[Verdict]) -> None:
    """Seeds are added until the comparison is decided, as `--until-decided` does, with our own intervals and test.

    With a true difference of 0 `holds` and `fails` are wrong, with one of 0.05 `holds` (it is lower) and `the same`.
    """
    source, cases, found = random.Random(4), 2_000, list[Verdict]()
    for _ in range(cases):
        values = [source.gauss(difference, 0.03) for _ in range(MOST_SEEDS)]
        verdicts = (
            less(Comparison("", sum(values[:count]) / count, *interval(values[:count]), same_within=SAME))
            for count in range(FEWEST_SEEDS, MOST_SEEDS + 1)
        )
        found.append(next((verdict for verdict in verdicts if verdict != "undecided"), "undecided"))
    assert sum(verdict in wrong for verdict in found) / cases < 0.06  # the standard error is 0.5 %
    assert found.count("fails" if difference else "the same") / cases > 0.9, "the right verdict is found"


def test_the_simulated_interval_is_ours() -> None:
    noise = random.Random(3)
    for _ in range(100):
        values = [noise.gauss(0.3, 1.0) for _ in range(MOST_SEEDS)]
        for count in range(FEWEST_SEEDS, MOST_SEEDS + 1):
            part = values[:count]
            mean = sum(part) / count
            spread = math.sqrt(sum((value - mean) ** 2 for value in part) / (count - 1))
            half = t_quantile(count - 1, (1 + 0.995) / 2) * spread / math.sqrt(count)
            assert t_interval(part) == pytest.approx((mean - half, mean + half))
