"""Tables of advice, each line with the comparisons that it relies on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from quacklr.lab.methods import Method, Quack
from quacklr.lab.report.deciding import clearness, limits_of, short_label
from quacklr.lab.report.markdown import table
from quacklr.lab.studies.comparison import Comparison, Verdict
from quacklr.lab.studies.verdicts import ClaimPart, ClaimResult

OPEN = ("undecided", "not run")


class Basis(NamedTuple):
    """A comparison that advice relies on."""

    claim: str
    about: Sequence[str] = ()
    """Texts that the label of this comparison has. If several comparisons have them, the least clear one is meant."""
    verdict: Verdict = "holds"
    """The verdict on this comparison that the advice was written for."""


@dataclass(frozen=True)
class Advice:
    """A line of a table."""

    situation: Sequence[str]
    """One text for each of the first columns."""
    advice: str
    relies_on: Sequence[Basis]


class AdviceTable(NamedTuple):
    """Lines of advice with the same columns."""

    columns: Sequence[str]
    lines: Sequence[Advice]


def choosing(claims: Sequence[ClaimResult], advice: AdviceTable, lr: float) -> str:
    """A table of advice, with the numbers of the claims; `lr` is the learning rate of most claims."""
    by_name = {claim.name: claim for claim in claims}
    rows = [
        (*line.situation, line.advice, "<br>".join(evidence(by_name, basis, lr) for basis in line.relies_on))
        for line in advice.lines
    ]
    return table((*advice.columns, "evidence"), rows)


def outdated(claims: Sequence[ClaimResult], advice: AdviceTable) -> list[str]:
    """The lines that rely on verdicts which have changed since they were written."""
    by_name = {claim.name: claim for claim in claims}
    found = [(line, basis, verdict_on(by_name, basis)) for line in advice.lines for basis in line.relies_on]
    return [
        f"{', '.join(line.situation)}: {', '.join((basis.claim, *basis.about))}: {verdict}, not {basis.verdict}"
        for line, basis, verdict in found
        if verdict != basis.verdict
    ]


def part_of(by_name: Mapping[str, ClaimResult], basis: Basis) -> ClaimPart | None:
    """The comparison; None if it was not run."""
    parts = by_name[basis.claim].parts
    meant = [part for part in parts if all(text in part.comparison.label for text in basis.about)]
    return min(meant, key=clearness, default=None)


def verdict_on(by_name: Mapping[str, ClaimResult], basis: Basis) -> Verdict:
    """The verdict on the comparison now."""
    part = part_of(by_name, basis)
    return "not run" if part is None else part.verdict


def evidence(by_name: Mapping[str, ClaimResult], basis: Basis, lr: float) -> str:
    """Which minus which, the mean difference, its interval, the number of seeds, what was found, and the claim."""
    part = part_of(by_name, basis)
    if part is None:
        return f"not run yet (*{basis.claim}*)"
    part = minus_quack(part)
    seeds = f"{part.comparison.seeds} seed{'s' * (part.comparison.seeds != 1)}"
    numbers = f"{short_label(part, lr)}: {difference_text(part.comparison)}, {seeds}"
    return f"{numbers}: **{found_text(part)}** (*{basis.claim}*)"


def found_text(part: ClaimPart) -> str:
    """The result of a comparison in one or two words: the first side is `lower`, for example."""
    comparison = part.comparison
    if comparison.high < 0:
        return "lower"
    if comparison.low > 0:
        return "higher"
    if part.verdict == "holds" and limits_of(part):
        return f"at most {max(limits_of(part)):g} higher"
    return "the same" if part.verdict == "the same" else "undecided"


def minus_quack(part: ClaimPart) -> ClaimPart:
    """The comparison with its sides exchanged if it is `QuacK - another method`: above zero QuacK is better."""
    found = part.comparison
    if [is_quack(runs.method) for runs in found.compared] != [True, False]:
        return part
    one, other = found.compared
    label = found.label.replace(f"{one} - {other}", f"{other} - {one}")
    return part._replace(comparison=replace(found, label=label, mean=-found.mean, low=-found.high, high=-found.low))


def is_quack(method: Method) -> bool:
    """Whether a method is QuacK, with any tau and no other option."""
    return isinstance(method, Quack) and method == Quack(method.tau)


def difference_text(comparison: Comparison) -> str:
    """The mean difference and its interval: `-0.035 [-0.058, -0.012]`."""
    known = math.isfinite(comparison.high - comparison.low)
    return f"{comparison.mean:+.3f}" + (f" [{comparison.low:+.3f}, {comparison.high:+.3f}]" if known else "")


def open_questions(claims: Sequence[ClaimResult]) -> str:
    """The claims without a verdict, as a list."""
    lines = [f"- *{claim.name}* ({claim.verdict}): {claim.claim}\n" for claim in claims if claim.verdict in OPEN]
    return "".join(lines) or "Every claim has a verdict.\n"
