"""`make study`: from the ledger it runs nothing; from an empty one it comes to the same verdicts.

The runs themselves are not repeated here (`make repeat` does it with some): a run that is asked for is taken from the
ledger of results/.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import tyro

from quacklr.lab.config import fingerprint
from quacklr.lab.ledger import Entry, Ledger
from quacklr.lab.options import OPTIONS
from quacklr.lab.studies.all_claims import CLAIM_NAMES, claim_results
from quacklr.lab.studies.limits import LIMIT_CLAIMS
from quacklr.lab.studies.results import Results
from quacklr.lab.studies.scale import Size, scale_of
from quacklr.lab.studies.undecided import plan
from quacklr.lab.sweep.command import ClaimsGoal, Sweep, goal_of

ROOT = Path(__file__).parent.parent
COMMANDS = re.findall(r"^\t\$\(BIN\)/quacklr sweep (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
SCALE = scale_of(Size())


@pytest.fixture(scope="module")
def ledger() -> dict[str, Entry]:
    return Ledger(ROOT / "results/ledger.jsonl").entries()


def given(words: str) -> Sweep:
    return tyro.cli(Sweep, args=shlex.split(words), config=OPTIONS)


def verdicts(known: dict[str, Entry]) -> dict[str, str]:
    return {claim.name: claim.verdict for claim in claim_results(Results(known.values(), SCALE))}


def test_from_the_ledger_nothing_is_left_to_run_but_of_claims_that_are_open(ledger: dict[str, Entry]) -> None:
    assert len(COMMANDS) == 4
    assert any(isinstance(goal_of(given(words)), ClaimsGoal) for words in COMMANDS)
    new = [name for name in LIMIT_CLAIMS if verdicts(ledger)[name] in ("not run", "undecided")]
    decided = " ".join(shlex.quote(name) for name in CLAIM_NAMES if name not in new)
    for words in COMMANDS:
        words = f"{words} {decided}" if isinstance(goal_of(given(words)), ClaimsGoal) else words
        assert goal_of(given(words)).next(ledger) == [], words


def test_from_an_empty_ledger_the_verdicts_are_the_same(ledger: dict[str, Entry]) -> None:
    known = dict[str, Entry]()
    for words in COMMANDS:
        goal = goal_of(given(words))
        while True:
            # of claims one more seed at a time, as on one core
            asked = plan(goal.claims(known), known).runs if isinstance(goal, ClaimsGoal) else goal.next(known)
            done = {key: ledger[key] for key in map(fingerprint, asked) if key in ledger}
            if not done:
                break
            known |= done
    assert len(known) < len(ledger)
    assert verdicts(known) == verdicts(ledger)
