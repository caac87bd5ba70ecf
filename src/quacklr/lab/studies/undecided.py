"""The runs that undecided claims need: one more seed for the comparisons that are expected to decide a claim soonest.

A claim fails as soon as one of its comparisons fails. So if a comparison is expected to fail, only it gets more seeds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from quacklr.lab.config import Config, fingerprint
from quacklr.lab.ledger import Entry
from quacklr.lab.studies.comparison import expected_decision, next_runs
from quacklr.lab.studies.intervals import MOST_SEEDS
from quacklr.lab.studies.run_cost import RunCost
from quacklr.lab.studies.verdicts import ClaimPart, ClaimResult

FAR = 200
"""An estimate above this number of seeds is printed as `over 200`."""


class Plan(NamedTuple):
    """The runs to do next, and an estimate of all runs that are left."""

    runs: list[Config]
    """The claim that is expected to be decided soonest first."""
    left: list[Config]
    """All runs until every claim is decided or has MOST_SEEDS seeds, if means and spreads do not change. Where a
    setting is not selected yet, the runs that judge it are not among them."""
    seconds: float
    """Time of the runs that are left, one after another."""


class Need(NamedTuple):
    """The runs that one claim needs."""

    next: list[Config]
    rest: dict[str, Config]
    """All runs until it is decided or has MOST_SEEDS seeds, by fingerprint."""
    seconds: float
    """The time of `rest`."""
    decides: bool
    """Whether these runs are expected to decide the claim."""


def open_comparisons(claim: ClaimResult) -> list[ClaimPart]:
    """The undecided comparisons of an undecided claim, for which one more seed can be run."""
    if claim.verdict != "undecided":
        return []
    return [each for each in claim.parts if each.verdict == "undecided" and next_runs(each.comparison.compared)]


def plan(claims: Iterable[ClaimResult], known: Mapping[str, Entry]) -> Plan:
    """The next runs of the claims that are not decided. Claims that MOST_SEEDS seeds would not decide come last."""
    cost, needs = RunCost(known.values()), list[Need]()
    for claim in claims:
        needs.append(_need(cost, claim.needed, claim.needed, known))
        needs += _needs(claim, known, cost)
    needs.sort(key=lambda need: (not need.decides, need.seconds))
    runs = {fingerprint(config): config for need in needs for config in need.next}
    rest = {key: config for need in needs for key, config in need.rest.items()}
    return Plan(list(runs.values()), list(rest.values()), sum(map(cost.seconds, rest.values())))


def _needs(claim: ClaimResult, known: Mapping[str, Entry], cost: RunCost) -> list[Need]:
    """The need of an undecided claim: that of the cheapest comparison that is expected to fail, else of all."""
    parts = [(each, _need_of_part(each, known, cost)) for each in open_comparisons(claim)]
    failing = [need for part, need in parts if expected_verdict(part) == "fails"]
    if failing:
        return [min(failing, key=lambda need: need.seconds)]
    needs = sorted((need for _, need in parts), key=lambda need: need.seconds)
    following = [config for need in needs for config in need.next]
    rest = [config for need in needs for config in need.rest.values()]
    return [_need(cost, following, rest, known, all(need.decides for need in needs))]


def _need_of_part(part: ClaimPart, known: Mapping[str, Entry], cost: RunCost) -> Need:
    decides = expected_verdict(part) != "undecided"
    return _need(cost, next_runs(part.comparison.compared), _until_decided(part), known, decides)


def _need(
    cost: RunCost, following: Iterable[Config], rest: Iterable[Config], known: Mapping[str, Entry], decides: bool = True
) -> Need:
    """The runs that are not in the ledger, each once, and their time."""
    missing = {key: config for config in rest if (key := fingerprint(config)) not in known}
    todo = [config for config in following if fingerprint(config) not in known]
    return Need(todo, missing, sum(map(cost.seconds, missing.values())), decides)


def expected_verdict(part: ClaimPart) -> str:
    """The verdict on a comparison after MOST_SEEDS seeds or fewer, if its mean and spread stay as they are."""
    return expected_decision(part.comparison, part.test, MOST_SEEDS).verdict


def _until_decided(part: ClaimPart) -> Iterator[Config]:
    """All runs that a comparison needs until it is decided, if its mean and spread stay as they are."""
    comparison = part.comparison
    last = expected_decision(comparison, part.test, MOST_SEEDS).seeds or MOST_SEEDS
    for runs in comparison.compared:
        yield from (runs.config(seed) for seed in range(1, last + 1) if seed not in runs.runs)


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
    seeds = expected_decision(part.comparison, part.test, FAR).seeds
    return f"over {FAR} seeds in all would decide it" if seeds is None else f"{seeds} seeds in all would decide it"
