"""All claims, and their verdicts from a ledger."""

from __future__ import annotations

from collections.abc import Collection

from quacklr.lab.studies.claims import CLAIMS
from quacklr.lab.studies.condition_claims import CONDITION_CLAIMS
from quacklr.lab.studies.extra_claims import EXTRA_CLAIMS
from quacklr.lab.studies.limits import LIMIT_CLAIMS
from quacklr.lab.studies.results import Results
from quacklr.lab.studies.size_claims import SIZE_CLAIMS
from quacklr.lab.studies.verdicts import Claim, ClaimResult, ClaimSource, check

ALL_CLAIMS: dict[ClaimSource, dict[str, Claim]] = {
    "paper": CLAIMS,
    "own": EXTRA_CLAIMS | CONDITION_CLAIMS | SIZE_CLAIMS | LIMIT_CLAIMS,
}
"""By source: the claims of the paper, then our own."""
CLAIM_NAMES = [name for claims in ALL_CLAIMS.values() for name in claims]


def claim_results(results: Results, names: Collection[str] = ()) -> list[ClaimResult]:
    """Check the claims with these names; all claims if no name is given."""
    return [
        check(name, source, claim, results)
        for source, claims in ALL_CLAIMS.items()
        for name, claim in claims.items()
        if not names or name in names
    ]
