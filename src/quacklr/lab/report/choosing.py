"""Which method to use: a table of advice, each line with the verdicts that it relies on and their numbers.

The advice is written by hand, for certain verdicts. If one of them changes, `tests/test_readme.py` fails until the line
is revised.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quacklr.lab.report.markdown import table
from quacklr.lab.studies.comparison import Comparison, Verdict
from quacklr.lab.studies.verdicts import ClaimResult

MOST_NUMBERS = 2
"""Claims with more comparisons than this show none of them."""


@dataclass(frozen=True)
class Advice:
    """A line of the table."""

    situation: str
    advice: str
    relies_on: Mapping[str, Verdict]
    """The claims that the advice follows from, with the verdicts that it was written for."""


def choosing(claims: Sequence[ClaimResult], lines: Sequence[Advice]) -> str:
    """The table of advice, with the verdicts and numbers of the claims."""
    by_name = {claim.name: claim for claim in claims}
    rows = [
        (line.situation, line.advice, "; ".join(evidence(by_name[name]) for name in line.relies_on)) for line in lines
    ]
    return table(("if", "then", "because"), rows)


def outdated(claims: Sequence[ClaimResult], lines: Sequence[Advice]) -> list[str]:
    """The lines whose verdicts have changed since they were written."""
    verdicts = {claim.name: claim.verdict for claim in claims}
    return [
        f"{line.situation}: {name} is {verdicts[name]}, not {expected}"
        for line in lines
        for name, expected in line.relies_on.items()
        if verdicts[name] != expected
    ]


def evidence(claim: ClaimResult) -> str:
    """The name of a claim, its verdict, and its differences if they are few."""
    numbers = ", ".join(map(difference_text, claim.evidence)) if len(claim.evidence) <= MOST_NUMBERS else ""
    return f"*{claim.name}* {claim.verdict}" + (f" ({numbers})" if numbers else "")


def difference_text(comparison: Comparison) -> str:
    """The mean difference and its interval: `-0.035 [-0.058, -0.012]`."""
    known = math.isfinite(comparison.high - comparison.low)
    return f"{comparison.mean:+.3f}" + (f" [{comparison.low:+.3f}, {comparison.high:+.3f}]" if known else "")


ADVICE: tuple[Advice, ...] = ()
