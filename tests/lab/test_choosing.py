"""The table of advice has the verdicts and numbers of the claims, and advice for other verdicts is found."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from made_ledger import HIGH, SCALE, ledger
from quacklr.lab.report.choosing import ADVICE, Advice, choosing, outdated
from quacklr.lab.studies.all_claims import CLAIM_NAMES, claim_results
from quacklr.lab.studies.comparison import Comparison, Test, Verdict, agree, below, less
from quacklr.lab.studies.deciding import deciding, short_label
from quacklr.lab.studies.results import Results
from quacklr.lab.studies.verdicts import ClaimPart, ClaimResult

LINES = [
    Advice("it can change", "QK norm", {"f": "holds"}),
    Advice("you cannot", "QuacK", {"e": "holds", "b": "fails"}),
]


def test_each_line_has_the_verdicts_and_the_numbers_of_its_claims() -> None:
    claims = claim_results(Results(ledger(), SCALE))
    shown = deciding(next(claim for claim in claims if claim.name == "f"))
    assert shown is not None
    middle = shown.comparison
    head, _, first, second = choosing(claims, LINES, HIGH).splitlines()
    assert head == "| if | then | because |"
    assert first == (
        "| it can change | QK norm | *f* holds (MHA: QuacK (tau 1) - the middle of QK norm and default: "
        f"{middle.mean:+.3f} [{middle.low:+.3f}, {middle.high:+.3f}]) |"
    )
    assert second.startswith("| you cannot | QuacK | *e* holds (M")
    assert "constant tau (tau 0.1) - QuacK (tau 1): +0.200 [" in second
    assert "<br>*b* holds (" in second


def test_advice_for_another_verdict_is_found() -> None:
    claims = claim_results(Results(ledger(), SCALE))
    assert outdated(claims, LINES) == ["you cannot: b is holds, not fails"]


def test_all_claims_of_the_advice_exist() -> None:
    assert {name for line in ADVICE for name in line.relies_on} <= set(CLAIM_NAMES)


def part(mean: float, low: float, high: float, test: Test = less) -> ClaimPart:
    return ClaimPart(test, Comparison("MHA, Muon, lr 0.1: x - y, validation loss", mean, low, high, (mean,) * 3))


@pytest.mark.parametrize(
    ("parts", "verdict", "shown"),
    [
        ([part(-1.0, -1.2, -0.8), part(-0.1, -0.15, -0.05)], "holds", 1),
        ([part(0.1, 0.05, 0.15), part(1.0, 0.8, 1.2), part(-1.0, -1.1, -0.9)], "fails", 1),
        ([part(-0.1, -0.2, 0.1), part(-1.0, -1.1, -0.9)], "undecided", 0),
        ([part(0.02, -0.01, 0.04, partial(below, limit=0.05)), part(0.0, -0.04, 0.04, agree)], "holds", 0),
    ],
)
def test_the_clearest_failure_or_the_least_clear_of_the_others_is_shown(
    parts: list[ClaimPart], verdict: Verdict, shown: int
) -> None:
    claim = ClaimResult("x", "A sentence.", "own", verdict, "cpu", "", tuple(parts))
    assert deciding(claim) is parts[shown]
    assert deciding(replace(claim, parts=())) is None
    assert short_label(parts[0], 0.1) == "MHA: x - y"
