"""The table of advice has the verdicts and numbers of the claims, and advice for other verdicts is found."""

from __future__ import annotations

from made_ledger import SCALE, ledger
from quacklr.lab.report.choosing import ADVICE, Advice, choosing, outdated
from quacklr.lab.studies.all_claims import CLAIM_NAMES, claim_results
from quacklr.lab.studies.results import Results

LINES = [
    Advice("it can change", "QK norm", {"f": "holds"}),
    Advice("you cannot", "QuacK", {"e": "holds", "b": "fails"}),
]


def test_each_line_has_the_verdicts_and_the_numbers_of_its_claims() -> None:
    claims = claim_results(Results(ledger(), SCALE))
    behind, middle = next(claim for claim in claims if claim.name == "f").evidence
    head, _, first, second = choosing(claims, LINES).splitlines()
    assert head == "| if | then | because |"
    assert first == (
        f"| it can change | QK norm | *f* holds ({behind.mean:+.3f} [{behind.low:+.3f}, {behind.high:+.3f}], "
        f"{middle.mean:+.3f} [{middle.low:+.3f}, {middle.high:+.3f}]) |"
    )
    assert second == "| you cannot | QuacK | *e* holds; *b* holds |", "many comparisons are left out"


def test_advice_for_another_verdict_is_found() -> None:
    claims = claim_results(Results(ledger(), SCALE))
    assert outdated(claims, LINES) == ["you cannot: b is holds, not fails"]


def test_all_claims_of_the_advice_exist() -> None:
    assert {name for line in ADVICE for name in line.relies_on} <= set(CLAIM_NAMES)
