"""The table of advice has the verdicts and numbers of the claims, and advice for other verdicts is found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest

from made_ledger import HIGH, SCALE, ledger
from quacklr.lab.report.advice import TABLES
from quacklr.lab.report.choosing import (
    Advice,
    AdviceTable,
    Basis,
    choosing,
    found_text,
    minus_quack,
    numbers,
    outdated,
    part_of,
)
from quacklr.lab.report.deciding import deciding, short_label
from quacklr.lab.studies.all_claims import CLAIM_NAMES, claim_results
from quacklr.lab.studies.comparison import Comparison, Test, Verdict, agree, below, less
from quacklr.lab.studies.results import Results
from quacklr.lab.studies.verdicts import ClaimPart, ClaimResult

LINES = AdviceTable(
    ("if", "then"),
    (
        Advice("it can change", "QK norm", [Basis("f", ["- QK norm"])]),
        Advice(
            "it must stay", "QuacK", [Basis("e", ["MHA", "- QuacK"]), Basis("b", ["MHA"], "fails"), Basis("cosine")]
        ),
    ),
)


def results_of(claims: Sequence[ClaimResult], name: str) -> Sequence[Comparison]:
    return next(claim for claim in claims if claim.name == name).evidence


def test_each_line_has_the_numbers_of_its_comparisons_as_other_methods_minus_quack() -> None:
    claims = claim_results(Results(ledger(), SCALE))
    head, _, first, second = choosing(claims, LINES, HIGH).splitlines()
    assert head == "| if | then | evidence |"
    behind, constant = results_of(claims, "f")[0], results_of(claims, "e")[0]
    assert behind.label.startswith("MHA, Muon, lr 0.1: QuacK (tau 1) - QK norm"), "QuacK is first in the claim"
    assert first == f"| it can change | QK norm | MHA: QK norm - QuacK: {-behind.mean:+.3f}, **lower** |"
    assert f"| MHA: constant tau - QuacK: {constant.mean:+.3f}, **higher**<br>" in second
    assert second.endswith("<br>*cosine*: not run yet |")
    _, _, first, second, _ = numbers(claims, [LINES, LINES], HIGH).splitlines()
    interval = f"{-behind.high:+.3f} to {-behind.low:+.3f}"
    assert first == f"| MHA: QK norm - QuacK (tau 1) | {-behind.mean:+.3f} | {interval} | 3 | f |"
    assert second.startswith(f"| MHA: constant tau (tau 0.1) - QuacK (tau 1) | {constant.mean:+.3f} | ")


def test_only_quack_minus_another_method_is_turned_around() -> None:
    claims = claim_results(Results(ledger(), SCALE))
    for name, number in (("f", 1), ("e", 0), ("highest rate", 1), ("tau", 0)):
        claim = next(claim for claim in claims if claim.name == name)
        assert minus_quack(claim.parts[number]) is claim.parts[number], claim.parts[number].comparison.label


def test_advice_for_another_verdict_is_found() -> None:
    claims = claim_results(Results(ledger(), SCALE))
    assert outdated(claims, LINES) == [
        "it must stay: b, MHA: holds, not fails",
        "it must stay: cosine: not run, not holds",
    ]


def test_all_claims_of_the_advice_exist() -> None:
    lines = [line for each in TABLES.values() for line in each.lines]
    assert {basis.claim for line in lines for basis in line.relies_on} <= set(CLAIM_NAMES)


def part(mean: float, low: float, high: float, test: Test = less) -> ClaimPart:
    label, same_within = "MHA, Muon, lr 0.1: x - y, validation loss", 0.02 if low < 0 else 0.0
    return ClaimPart(test, Comparison(label, mean, low, high, (mean,) * 3, same_within))


@pytest.mark.parametrize(
    ("compared", "text"),
    [
        (part(-0.1, -0.2, -0.05), "lower"),
        (part(0.1, 0.05, 0.2), "higher"),
        (part(0.1, 0.01, 0.04, partial(below, limit=0.05)), "higher"),
        (part(0.0, -0.01, 0.04, partial(below, limit=0.05)), "at most 0.04 higher"),
        (part(0.0, -0.01, 0.06, partial(below, limit=0.05)), "undecided"),
        (part(0.0, -0.01, 0.01), "the same"),
        (part(0.0, -0.01, 0.03), "undecided"),
    ],
)
def test_what_a_comparison_found_in_words(compared: ClaimPart, text: str) -> None:
    assert found_text(compared) == text


def test_of_several_comparisons_the_least_clear_one_is_shown() -> None:
    clear, unclear = part(-1.0, -1.1, -0.9), part(-0.1, -0.15, -0.05)
    claim = ClaimResult("x", "A sentence.", "own", "holds", "cpu", "", (clear, unclear))
    assert part_of({"x": claim}, Basis("x", ["MHA"])) is unclear
    assert part_of({"x": claim}, Basis("x", ["MLA"])) is None


@pytest.mark.parametrize(
    ("parts", "verdict", "shown"),
    [
        ([part(-1.0, -1.2, -0.8), part(-0.1, -0.15, -0.05)], "holds", 1),
        ([part(0.1, 0.05, 0.15), part(1.0, 0.8, 1.2), part(-1.0, -1.1, -0.9)], "fails", 1),
        ([part(-0.1, -0.2, 0.1), part(-1.0, -1.1, -0.9)], "undecided", 0),
        ([part(0.02, -0.01, 0.04, partial(below, limit=0.05)), part(0.0, -0.04, 0.04, agree)], "holds", 0),
        ([part(0.0, -0.005, 0.005), part(0.008, -0.003, 0.019)], "the same", 1),
        ([part(0.0, 0.0, 0.0), part(-0.1, -0.2, 0.1)], "undecided", 0),
    ],
)
def test_the_clearest_failure_or_the_least_clear_of_the_others_is_shown(
    parts: list[ClaimPart], verdict: Verdict, shown: int
) -> None:
    claim = ClaimResult("x", "A sentence.", "own", verdict, "cpu", "", tuple(parts))
    assert deciding(claim) is parts[shown]
    assert deciding(replace(claim, parts=())) is None
    assert short_label(parts[0], 0.1) == "MHA: x - y"
