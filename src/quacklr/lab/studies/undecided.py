"""The runs that undecided claims need: one more seed for each comparison that is not decided."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from statistics import median
from typing import NamedTuple

from quacklr.lab.config import Config, fingerprint
from quacklr.lab.ledger import Entry
from quacklr.lab.studies.comparison import next_runs, seeds_to_decide
from quacklr.lab.studies.intervals import MOST_SEEDS
from quacklr.lab.studies.verdicts import ClaimPart, ClaimResult

FAR = 200
"""An estimate above this number of seeds is printed as `over 200`."""


class Plan(NamedTuple):
    """The runs to do next, and an estimate of all runs that are left."""

    runs: list[Config]
    """The cheapest comparison first."""
    left: int
    """Number of runs until all claims are decided or have MOST_SEEDS seeds, if means and spreads do not change. Where a
    setting is not selected yet, the runs that judge it are not counted."""
    seconds: float
    """Time of the runs that are left, one after another."""


def open_comparisons(claim: ClaimResult) -> list[ClaimPart]:
    """The undecided comparisons of an undecided claim, for which one more seed can be run."""
    if claim.verdict != "undecided":
        return []
    return [each for each in claim.parts if each.verdict == "undecided" and next_runs(each.comparison.compared)]


def plan(claims: Iterable[ClaimResult], known: Mapping[str, Entry]) -> Plan:
    """The next runs of the claims that are not decided."""
    cost = RunCost(known.values())
    next_of, rest = list[tuple[float, list[Config]]](), dict[str, Config]()
    for claim in claims:
        for config in claim.needed:
            next_of.append((cost.seconds(config), [config]))
            rest[fingerprint(config)] = config
        for each in open_comparisons(claim):
            configs = list(_until_decided(each))
            next_of.append((sum(map(cost.seconds, configs)), next_runs(each.comparison.compared)))
            rest |= {fingerprint(config): config for config in configs}
    rest = {key: config for key, config in rest.items() if key not in known}
    wanted = [config for _, configs in sorted(next_of, key=lambda each: each[0]) for config in configs]
    runs = {key: config for config in wanted if (key := fingerprint(config)) not in known}
    return Plan(list(runs.values()), len(rest), sum(map(cost.seconds, rest.values())))


def _until_decided(part: ClaimPart) -> Iterator[Config]:
    """All runs that a comparison needs until it is decided, if its mean and spread stay as they are."""
    comparison = part.comparison
    last = seeds_to_decide(comparison, part.test, MOST_SEEDS) or MOST_SEEDS
    for runs in comparison.compared:
        yield from (runs.config(seed) for seed in range(1, last + 1) if seed not in runs.runs)


class RunCost:
    """Estimates the time of a run from the runs of the ledger with the same attention, model size and batch."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        times: dict[object, list[float]] = {}
        for entry in entries:
            if entry.step_seconds:
                times.setdefault(self._kind(entry.config), []).append(entry.step_seconds)
        self._step = {kind: median(values) for kind, values in times.items()}
        self._usual = median(self._step.values()) if self._step else 1.0

    @staticmethod
    def _kind(config: Config) -> object:
        return config.shape, config.attention, config.training.batch_tokens

    def seconds(self, config: Config) -> float:
        """The time of a run."""
        return self._step.get(self._kind(config), self._usual) * config.training.steps


def describe_open(claims: Iterable[ClaimResult]) -> str:
    """The verdict of every claim. For an undecided claim, also how many seeds each undecided comparison would need."""
    lines = []
    for claim in claims:
        lines.append(f"{claim.verdict:>9}  {claim.name}: {claim.claim}")
        lines += [f"{'':11}{claim.summary}"] if claim.verdict == "not run" else []
        lines += [f"{'':11}{each.comparison}; {seeds_text(each)}" for each in open_comparisons(claim)]
    return "\n".join(lines)


def seeds_text(part: ClaimPart) -> str:
    """Such as `7 seeds in all would decide it`, if mean and standard deviation do not change."""
    seeds = seeds_to_decide(part.comparison, part.test, FAR)
    return f"over {FAR} seeds in all would decide it" if seeds is None else f"{seeds} seeds in all would decide it"
