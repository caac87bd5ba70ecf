"""Differences between methods, paired by seed, and the tests that decide claims by their intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import mean, stdev
from typing import Literal, NamedTuple

from quacklr.lab.config import Config
from quacklr.lab.studies.intervals import FEWEST_SEEDS, half_width, intersection, interval
from quacklr.lab.studies.measures import Measure, NotRun, loss
from quacklr.lab.studies.results import JUDGING_SEEDS, MethodRuns

Verdict = Literal["holds", "fails", "the same", "undecided", "not run"]
MARGIN = 0.05
"""In nats of validation loss. Two methods agree when the whole interval of their difference is within this of zero."""
SAME = 0.02
"""In nats of validation loss. Two methods are `the same` when neither is better and the interval is within this."""


@dataclass(frozen=True)
class Comparison:
    """A mean difference between two quantities measured with the same seeds, and its interval."""

    label: str
    """What is subtracted from what, such as `MLA, Muon, lr 0.1: QuacK (tau 1) - default, validation loss`."""
    mean: float
    low: float
    high: float
    """`low` and `high` are the ends of the interval, which stays valid when seeds are added."""
    differences: tuple[float, ...] = ()
    """One for each seed, in the order of the seeds."""
    same_within: float = 0.0
    """The two are `the same` if the interval contains zero and is within this distance of it; 0: no such verdict."""
    compared: tuple[MethodRuns, ...] = ()
    """The methods that are compared; one more seed needs a run of each."""

    @property
    def seeds(self) -> int:
        """The number of seeds."""
        return len(self.differences)

    @property
    def spread(self) -> float:
        """Standard deviation over the seeds."""
        return stdev(self.differences) if self.seeds > 1 else math.inf

    def __str__(self) -> str:
        ends = f" [{self.low:+.3g}, {self.high:+.3g}]" if math.isfinite(self.high - self.low) else ""
        spread = f", sd {self.spread:.2g}" if self.seeds > 1 else ""
        return f"{self.label}: {self.mean:+.3g}{ends}, {self.seeds} seed{'s' * (self.seeds != 1)}{spread}"


Test = Callable[[Comparison], Verdict]


def compare(
    label: str, one: Mapping[int, float], other: Mapping[int, float], *compared: MethodRuns, same_within: float = 0.0
) -> Comparison:
    """The mean difference over the seeds that both have, with its interval."""
    differences = tuple(one[seed] - other[seed] for seed in sorted(one.keys() & other.keys()))
    if not differences:
        raise NotRun(f"{label}: no seed in common", next_runs(compared))
    return Comparison(label, mean(differences), *interval(differences), differences, same_within, compared)


def difference(
    one: MethodRuns, other: MethodRuns, measure: Measure = loss, what: str = "validation loss", where: str = ""
) -> Comparison:
    """The runs of one method compared with those of another, by seed."""
    label = f"{where or one.cell}: {one} - {other}, {what}"
    same_within = SAME if measure is loss else 0.0
    return compare(label, one.by_seed(measure), other.by_seed(measure), one, other, same_within=same_within)


def seeds_to_come(compared: Iterable[MethodRuns]) -> Iterator[list[Config]]:
    """For each seed that some method lacks and that crashed for none: the runs that add it to a comparison."""
    columns = list(compared)
    for seed in JUDGING_SEEDS:
        lacking = [each.config(seed) for each in columns if seed not in each.runs]
        if lacking and not any(seed in each.crashed for each in columns):
            yield lacking


def next_runs(compared: Iterable[MethodRuns]) -> list[Config]:
    """The runs that add one seed to a comparison; empty if there is no seed left."""
    return next(seeds_to_come(compared), [])


def less(comparison: Comparison) -> Verdict:
    """Whether the first quantity is below the second; `the same` if undecided and within `same_within` of zero."""
    found = below(comparison, 0.0)
    return "the same" if found == "undecided" and within(comparison, comparison.same_within) else found


def more(comparison: Comparison) -> Verdict:
    """Whether the first quantity is above the second; `the same` if undecided and within `same_within` of zero."""
    mirrored = replace(comparison, mean=-comparison.mean, low=-comparison.high, high=-comparison.low)
    return less(mirrored)


def below(comparison: Comparison, limit: float) -> Verdict:
    """Whether the difference is below a limit."""
    return "holds" if comparison.high < limit else "fails" if comparison.low > limit else "undecided"


def agree(comparison: Comparison, margin: float = MARGIN) -> Verdict:
    """Whether the two quantities are equal up to a margin."""
    if within(comparison, margin):
        return "holds"
    return "fails" if comparison.low > margin or comparison.high < -margin else "undecided"


def within(comparison: Comparison, margin: float) -> bool:
    """Whether the whole interval is closer to zero than a margin."""
    return -margin < comparison.low and comparison.high < margin


class Decision(NamedTuple):
    """When a comparison is expected to be decided, and how."""

    seeds: int | None
    """The number of seeds in all; None if it is not expected to be decided."""
    verdict: Verdict


def expected_decision(comparison: Comparison, test: Test, most: int) -> Decision:
    """With how many seeds a comparison would be decided, up to `most`, if its mean and spread did not change.

    With fewer than two seeds nothing is known of the spread: FEWEST_SEEDS, and a verdict of `not run`.
    """
    if comparison.seeds < 2:
        return Decision(FEWEST_SEEDS, "not run")
    for seeds in range(max(comparison.seeds + 1, FEWEST_SEEDS), most + 1):
        half = half_width(comparison.spread, seeds)
        last = comparison.mean - half, comparison.mean + half
        low, high = intersection([(comparison.low, comparison.high), last])
        verdict = test(replace(comparison, low=low, high=high))
        if verdict != "undecided":
            return Decision(seeds, verdict)
    return Decision(None, "undecided")
