"""What a study found out about one claim: a verdict, and the comparisons that it rests on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["holds", "fails", "undecided", "not run"]
ClaimSource = Literal["paper", "own"]


@dataclass(frozen=True)
class Comparison:
    """A difference between two things measured with the same seeds, and the interval that it lies in."""

    label: str
    """Which minus which, such as `MLA, lr 0.1: QuacK (tau 1) - constant tau (tau 0.1), validation loss`."""
    mean: float
    low: float
    high: float
    """Ends of the 95 % interval of the mean over seeds (Student's t)."""
    seeds: int
    spread: float
    """Standard deviation over the seeds."""

    def __str__(self) -> str:
        interval = f"[{self.low:+.3g}, {self.high:+.3g}]"
        return f"{self.label}: {self.mean:+.3g} {interval}, {self.seeds} seeds, sd {self.spread:.2g}"


@dataclass(frozen=True)
class ClaimResult:
    """One claim, and what the ledger says about it."""

    name: str
    """A letter for the paper's claims, a word for our own questions."""
    claim: str
    """The sentence that is checked."""
    source: ClaimSource
    verdict: Verdict
    scale: str
    """At which size: `cpu`, `100m`, `paper`."""
    summary: str
    """What was found, in a sentence with its numbers."""
    evidence: tuple[Comparison, ...] = ()
