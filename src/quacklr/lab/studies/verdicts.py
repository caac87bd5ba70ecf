"""Verdicts on claims, from confidence intervals. The margins are constants, fixed before anything is run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Literal, NamedTuple

from quacklr.lab.methods import Method
from quacklr.lab.studies.names import METHOD_NAMES, method_name, readable_number
from quacklr.lab.studies.results import (
    Comparison,
    Measure,
    NotRun,
    Results,
    RunsBySeed,
    by_seed,
    compare,
    largest_logit,
    loss,
    settings_text,
)

Verdict = Literal["holds", "fails", "undecided", "not run"]
ClaimSource = Literal["paper", "own"]
LOGIT = "log10 of the largest logit"
MARGIN = 0.05
"""Nats of validation loss: two methods agree when the whole interval of their difference is within this."""
STABLE = 2.0
"""A run is stable while log10 of its largest logit is below this: a logit of 100, the default threshold of QK clip."""


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
    """A sentence with the numbers."""
    evidence: tuple[Comparison, ...] = ()


class Answer(NamedTuple):
    """The result of a claim function."""

    verdict: Verdict
    summary: str
    evidence: list[Comparison]


Claim = Callable[[Results], Answer]
Test = Callable[[Comparison], Verdict]
Tested = tuple[Test, Comparison]


def less(comparison: Comparison) -> Verdict:
    """Whether the first is below the second."""
    return below(comparison, 0.0)


def more(comparison: Comparison) -> Verdict:
    """Whether the first is above the second."""
    return "holds" if comparison.low > 0 else "fails" if comparison.high < 0 else "undecided"


def below(comparison: Comparison, limit: float) -> Verdict:
    """Whether the difference is below a limit."""
    return "holds" if comparison.high < limit else "fails" if comparison.low > limit else "undecided"


def agree(comparison: Comparison, margin: float = MARGIN) -> Verdict:
    """Whether the two are equal up to a margin."""
    if -margin < comparison.low and comparison.high < margin:
        return "holds"
    return "fails" if comparison.low > margin or comparison.high < -margin else "undecided"


def all_of(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict on a conjunction: it fails if a part fails, and holds if all parts hold."""
    found = set(verdicts)
    return "fails" if "fails" in found else "undecided" if "undecided" in found else "holds"


def answer(summary: str, *tested: Tested) -> Answer:
    """The answer to a claim that holds if every comparison passes its test."""
    return Answer(all_of(test(each) for test, each in tested), summary, [each for _, each in tested])


def place(attention: str, lr: float) -> str:
    """Such as `MHA, lr 0.1`."""
    return f"{attention.upper()}, lr {lr:g}"


def method_label(runs: RunsBySeed) -> str:
    """A method with its settings: `QuacK (tau 1)`."""
    settings = settings_text(runs)
    return method_name(next(iter(runs.values())).config.method) + (f" ({settings})" if settings else "")


def difference(
    where: str, one: RunsBySeed, other: RunsBySeed, measure: Measure = loss, what: str = "validation loss"
) -> Comparison:
    """The runs of one method compared with those of another, by seed."""
    label = f"{where}: {method_label(one)} - {method_label(other)}, {what}"
    return compare(label, by_seed(one, measure), by_seed(other, measure))


def logit_above_stable(where: str, runs: RunsBySeed) -> Comparison:
    """The largest logits compared with the limit of stability."""
    label = f"{where}: {method_label(runs)}, {LOGIT} - {STABLE:g}"
    return compare(label, by_seed(runs, largest_logit), dict.fromkeys(runs, STABLE))


def mean_and_sd(runs: RunsBySeed) -> str:
    """The mean loss, its standard deviation over the seeds, and how many diverged: `2.393 (sd 0.012)`."""
    values = list(by_seed(runs, loss).values())
    diverged = sum(entry.status == "diverged" for entry in runs.values())
    parts = [f"sd {stdev(values):.3f}"] if len(values) > 1 else []
    parts += [f"{diverged} of {len(values)} diverged"] if diverged else []
    return f"{mean(values):.3f}" + (f" ({', '.join(parts)})" if parts else "")


def method_means(results: Results, attention: str, methods: Iterable[type[Method]], lr: float | None) -> str:
    """`MHA at lr 0.1: default 2.393 (sd 0.012), ...`: each method at its best setting (and its best rate)."""
    each = (f"{METHOD_NAMES[method]} {mean_and_sd(results.best(attention, method, lr))}" for method in methods)
    return f"{attention.upper()} at {'its best lr' if lr is None else f'lr {lr:g}'}: {', '.join(each)}"


def geometric_mean(runs: RunsBySeed, log10_measure: Measure) -> str:
    """The geometric mean over the seeds of a measure that is given as log10."""
    return readable_number(10 ** mean(by_seed(runs, log10_measure).values()))


def check(name: str, source: ClaimSource, claim: Claim, results: Results) -> ClaimResult:
    """Check a claim, whose sentence is its docstring; the verdict is `not run` if the ledger lacks runs."""
    sentence = " ".join((claim.__doc__ or "").split())
    try:
        verdict, summary, evidence = claim(results)
    except NotRun as reason:
        verdict, summary, evidence = Answer("not run", str(reason), [])
    return ClaimResult(name, sentence, source, verdict, results.scale.name, summary, tuple(evidence))
