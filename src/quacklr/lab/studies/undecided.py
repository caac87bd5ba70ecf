"""The runs that undecided claims need: one more seed for the comparisons that are expected to decide a claim soonest.

A claim fails as soon as one of its comparisons fails. So if a comparison is expected to fail, only it gets more seeds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from quacklr.lab.config import Config, fingerprint
from quacklr.lab.ledger import Entry
from quacklr.lab.studies.comparison import expected_decision, next_runs, seeds_to_come
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
    """All runs until every claim is decided or has MOST_SEEDS seeds, if means and spreads do not change. For a claim
    that was not run, only the runs that are known to be needed."""
    seconds: float | None
    """Time of the runs that are left, one after another; None if the ledger has no times."""


class Need(NamedTuple):
    """Runs that are expected to decide a comparison or a claim, or to bring it to MOST_SEEDS seeds."""

    next: Sequence[Config]
    """The runs that add one seed."""
    all: Sequence[Config]
    decides: bool
    """Whether they are expected to decide it."""
    fails: bool = False
    """Whether they are expected to decide that it fails."""


def open_comparisons(claim: ClaimResult) -> list[ClaimPart]:
    """The undecided comparisons of an undecided claim, for which one more seed can be run."""
    if claim.verdict != "undecided":
        return []
    return [each for each in claim.parts if each.verdict == "undecided" and next_runs(each.comparison.compared)]


def plan(claims: Iterable[ClaimResult], known: Mapping[str, Entry]) -> Plan:
    """The next runs of the claims that are not decided. Claims that MOST_SEEDS seeds would not decide come last."""
    cost, needs = RunCost(known.values()), list[tuple[float, Need]]()
    for claim in claims:
        need = need_of_claim(claim, cost)
        needs.append((sum(map(cost.seconds, missing(need.all, known).values())), need))
    needs.sort(key=lambda each: (not each[1].decides, each[0]))
    runs = missing((config for _, need in needs for config in need.next), known)
    left = missing((config for _, need in needs for config in need.all), known)
    return Plan(list(runs.values()), list(left.values()), cost.total(left.values()))


def missing(configs: Iterable[Config], known: Mapping[str, Entry]) -> dict[str, Config]:
    """The runs that are not in the ledger, each once, by fingerprint."""
    return {key: config for config in configs if (key := fingerprint(config)) not in known}


def need_of_claim(claim: ClaimResult, cost: RunCost) -> Need:
    """The runs of the cheapest comparison that is expected to fail; if there is none, those of all comparisons."""
    if claim.needed:
        return Need(claim.needed, claim.needed, decides=True)
    needs = sorted(map(need_of_part, open_comparisons(claim)), key=lambda need: sum(map(cost.seconds, need.all)))
    for need in needs:
        if need.fails:
            return need
    undecided = sum(part.verdict == "undecided" for part in claim.parts)  # some may have all of their seeds already
    return Need(
        [config for need in needs for config in need.next],
        [config for need in needs for config in need.all],
        decides=len(needs) == undecided and all(need.decides for need in needs),
    )


def need_of_part(part: ClaimPart) -> Need:
    """The runs of one comparison, if its mean and spread stay as they are."""
    comparison, expected = part.comparison, expected_decision(part.comparison, part.test, MOST_SEEDS)
    more = (expected.seeds or MOST_SEEDS) - comparison.seeds
    following = [runs for _, runs in zip(range(more), seeds_to_come(comparison.compared), strict=False)]
    return Need(
        following[0],
        [config for runs in following for config in runs],
        decides=expected.verdict != "undecided" and len(following) == more,
        fails=expected.verdict == "fails" and len(following) == more,
    )


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
    most = f"; {MOST_SEEDS} is the most that we run" if seeds is None or seeds > MOST_SEEDS else ""
    return f"{f'over {FAR}' if seeds is None else seeds} seeds in all would decide it{most}"
