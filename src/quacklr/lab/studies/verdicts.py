"""Verdicts on claims, from the intervals of comparisons. Margins are constants; docs/log.md has the date of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Literal, NamedTuple

from quacklr.lab.config import Config
from quacklr.lab.studies.comparison import Comparison, Test, Verdict, compare
from quacklr.lab.studies.measures import Measure, NotRun, largest_logit, loss
from quacklr.lab.studies.names import readable_number
from quacklr.lab.studies.results import AnyMethod, MethodRuns, Results, as_tuned

ClaimSource = Literal["paper", "own"]
LOGIT = "log10 of the largest logit"
STABLE = 2.0
"""A run is stable while log10 of its largest logit is below this: a logit of 100, the default threshold of QK clip."""


class ClaimPart(NamedTuple):
    """A comparison, and the test that it must pass."""

    test: Test
    comparison: Comparison

    @property
    def verdict(self) -> Verdict:
        """Whether the comparison passes its test."""
        return self.test(self.comparison)


class Answer(NamedTuple):
    """The result of a claim function."""

    summary: str
    """A sentence with the numbers."""
    parts: list[ClaimPart]

    @property
    def verdict(self) -> Verdict:
        """The claim holds if every comparison passes its test."""
        return all_of(each.verdict for each in self.parts)


Claim = Callable[[Results], Answer]


@dataclass(frozen=True)
class ClaimResult:
    """A claim and its verdict, with the evidence."""

    name: str
    """A letter for the paper's claims, a word for the others."""
    claim: str
    """The sentence that is checked."""
    source: ClaimSource
    verdict: Verdict
    scale: str
    """The name of the scale, such as `cpu`."""
    summary: str
    """A sentence with the numbers, or why the claim was not run."""
    parts: tuple[ClaimPart, ...] = ()
    needed: tuple[Config, ...] = ()
    """If the claim was not run: the runs that it needs next."""

    @property
    def evidence(self) -> tuple[Comparison, ...]:
        """The comparisons."""
        return tuple(each.comparison for each in self.parts)


def all_of(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict on a conjunction: it fails if a part fails, and holds if all parts hold.

    It is `the same` if at least one part is `the same` and all others hold.
    """
    found = set(verdicts)
    for verdict in ("fails", "undecided", "the same"):
        if verdict in found:
            return verdict
    return "holds"


def answer(summary: str, *tested: tuple[Test, Comparison]) -> Answer:
    """The answer to a claim that holds if every comparison passes its test."""
    return Answer(summary, [ClaimPart(*each) for each in tested])


def logit_above_stable(runs: MethodRuns) -> Comparison:
    """The largest logits of some runs minus STABLE, both as log10: negative if the runs are stable."""
    label = f"{runs.cell}: {runs}, {LOGIT} - {STABLE:g}"
    return compare(label, runs.by_seed(largest_logit), dict.fromkeys(runs.runs, STABLE), runs)


def mean_and_sd(runs: MethodRuns) -> str:
    """The mean loss, its standard deviation, the number of seeds, and how many diverged: `2.393 (sd 0.012, n 3)`."""
    values = list(runs.by_seed(loss).values())
    diverged = sum(entry.status == "diverged" for entry in runs.runs.values())
    parts = [f"sd {stdev(values):.3f}"] if len(values) > 1 else []
    parts += [f"n {len(values)}"]
    parts += [f"{diverged} diverged"] if diverged else []
    return f"{mean(values):.3f} ({', '.join(parts)})"


def method_means(results: Results, attention: str, methods: Iterable[AnyMethod], lr: float | None) -> str:
    """Such as `MHA at lr 0.1: default 2.393 (sd 0.012), ...`: the loss of each method at its best setting.

    If `lr` is None, each method is at its best learning rate too.
    """
    each = (f"{as_tuned(method).name} {mean_and_sd(results.best(attention, method, lr))}" for method in methods)
    return f"{attention.upper()} at {'its best lr' if lr is None else f'lr {lr:g}'}: {', '.join(each)}"


def geometric_mean(runs: MethodRuns, log10_measure: Measure) -> str:
    """The geometric mean over the seeds of a measure that is given as log10."""
    return readable_number(10 ** mean(runs.by_seed(log10_measure).values()))


def check(name: str, source: ClaimSource, claim: Claim, results: Results) -> ClaimResult:
    """Check a claim, whose sentence is its docstring; the verdict is `not run` if the ledger lacks runs."""
    sentence = " ".join((claim.__doc__ or "").split())
    try:
        found = claim(results)
    except NotRun as reason:
        needed = tuple(reason.needed)
        return ClaimResult(name, sentence, source, "not run", results.scale.name, str(reason), needed=needed)
    return ClaimResult(name, sentence, source, found.verdict, results.scale.name, found.summary, tuple(found.parts))
