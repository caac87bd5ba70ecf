"""The comparison that stands for a claim where there is room for one only: in a table or a figure."""

from __future__ import annotations

import math

from quacklr.lab.studies.comparison import MARGIN, SAME, agree
from quacklr.lab.studies.verdicts import ClaimPart, ClaimResult

IN_NATS = ", validation loss"
"""The end of the labels of comparisons of losses."""


def deciding(claim: ClaimResult) -> ClaimPart | None:
    """If the claim fails, the clearest comparison that fails; else the least clear one with the claim's verdict.

    A comparison of losses is preferred to others. None if the claim was not run.
    """
    parts = [part for part in claim.parts if part.verdict == claim.verdict]
    parts = [part for part in parts if part.comparison.label.endswith(IN_NATS)] or parts
    if not parts:
        return None
    return (max if claim.verdict == "fails" else min)(parts, key=clearness)


def clearness(part: ClaimPart) -> float:
    """How many halves of its interval the mean is away from the nearest limit."""
    comparison = part.comparison
    limits = (-SAME, SAME) if part.verdict == "the same" else limits_of(part) or (0.0,)
    distance = min(abs(comparison.mean - limit) for limit in limits)
    half = (comparison.high - comparison.low) / 2
    return distance / half if half else math.inf if distance else 0.0


def limits_of(part: ClaimPart) -> tuple[float, ...]:
    """The limits of a test that allows a difference; none for a test against zero."""
    limit = getattr(part.test, "keywords", {}).get("limit")
    return (-MARGIN, MARGIN) if part.test is agree else () if limit is None else (limit,)


def short_label(part: ClaimPart, lr: float) -> str:
    """The label without what is the same for most claims: Muon, this learning rate, and that losses are compared."""
    label = part.comparison.label.removesuffix(IN_NATS)
    return label.replace(", Muon", "").replace(f", lr {lr:g}:", ":")
