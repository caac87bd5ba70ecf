"""Tables of advice, each line with the comparisons that it relies on."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from quacklr.lab.methods import Method, Quack
from quacklr.lab.report.deciding import clearness, limits_of, short_label
from quacklr.lab.report.markdown import table
from quacklr.lab.studies.comparison import Comparison, Verdict
from quacklr.lab.studies.undecided import seeds_text
from quacklr.lab.studies.verdicts import ClaimPart, ClaimResult

OPEN = ("undecided", "not run")
SETTINGS = re.compile(r" \([^)]*\)")
"""The settings of a method in a label, such as ` (tau 1)`."""


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

    situation: str
    advice: str
    relies_on: Sequence[Basis]


class AdviceTable(NamedTuple):
    """Lines of advice, and the names of their first two columns."""

    columns: tuple[str, str]
    lines: Sequence[Advice]


def choosing(claims: Sequence[ClaimResult], advice: AdviceTable, lr: float) -> str:
    """A table of advice, with the numbers of the claims; `lr` is the learning rate of most claims."""
    by_name = {claim.name: claim for claim in claims}
    rows = [
        (line.situation, line.advice, "<br>".join(evidence(by_name, basis, lr) for basis in line.relies_on))
        for line in advice.lines
    ]
    return table((*advice.columns, "evidence"), rows)


def outdated(claims: Sequence[ClaimResult], advice: AdviceTable) -> list[str]:
    """The lines that rely on verdicts which have changed since they were written."""
    by_name = {claim.name: claim for claim in claims}
    found = [(line, basis, verdict_on(by_name, basis)) for line in advice.lines for basis in line.relies_on]
    return [
        f"{line.situation}: {', '.join((basis.claim, *basis.about))}: {verdict}, not {basis.verdict}"
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
    """Which method minus which, the mean difference, and what it shows."""
    part = part_of(by_name, basis)
    if part is None:
        return f"*{basis.claim}*: not run yet"
    part = minus_quack(part)
    label = SETTINGS.sub("", short_label(part, lr))
    return f"{label}: {part.comparison.mean:+.3f}, **{found_text(part)}**"


def numbers(claims: Sequence[ClaimResult], tables: Iterable[AdviceTable], lr: float) -> str:
    """A table of all comparisons that the advice relies on, with settings, intervals, seeds and claims."""
    by_name, rows = {claim.name: claim for claim in claims}, dict[str, Sequence[str]]()
    for basis in (basis for each in tables for line in each.lines for basis in line.relies_on):
        part = part_of(by_name, basis)
        if part is not None:
            part = minus_quack(part)
            label, found = short_label(part, lr), part.comparison
            row = (label, f"{found.mean:+.3f}", interval_text(found), str(found.seeds), basis.claim)
            rows.setdefault(label, row)
    return table(("comparison", "difference", "interval", "seeds", "claim"), rows.values())


def found_text(part: ClaimPart) -> str:
    """The result of a comparison in one or two words: the first side is `lower`, for example."""
    comparison = part.comparison
    if comparison.high < 0:
        return "lower"
    if comparison.low > 0:
        return "higher"
    if part.verdict == "holds" and limits_of(part):
        return f"at most {comparison.high:.2g} higher"
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


def interval_text(comparison: Comparison) -> str:
    """Such as `-0.058 to -0.012`; empty if there are too few seeds for an interval."""
    known = math.isfinite(comparison.high - comparison.low)
    return f"{comparison.low:+.3f} to {comparison.high:+.3f}" if known else ""


def open_questions(claims: Sequence[ClaimResult]) -> str:
    """The claims without a verdict, as a list, with the comparisons that leave them open and the seeds these need."""
    lines = list[str]()
    for claim in (claim for claim in claims if claim.verdict in OPEN):
        lines.append(f"- *{claim.name}* ({claim.verdict}): {claim.claim}\n")
        unclear = [part for part in claim.parts if part.verdict == "undecided"]
        lines += [f"    - {part.comparison}; {seeds_text(part)}\n" for part in unclear]
    return "".join(lines) or "Every claim has a verdict.\n"
