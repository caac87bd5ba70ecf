"""From intervals to verdicts. What counts as "the same" is fixed here, before anything is run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from statistics import mean, stdev
from typing import NamedTuple

from quacklr.lab.methods import Method
from quacklr.lab.studies.finding import ClaimResult, ClaimSource, Comparison, Verdict
from quacklr.lab.studies.names import NAMES, method_name, plain
from quacklr.lab.studies.results import Measure, NotRun, Results, Seeds, chosen, compare, loss, measured

MARGIN = 0.05
"""Nats of validation loss: two methods agree when the whole interval of their difference is within this."""
STABLE = 2.0
"""A run is stable while its largest logit is below ten to this: 100, where QK clip would step in."""


class Answer(NamedTuple):
    """What the ledger says about a claim."""

    verdict: Verdict
    summary: str
    evidence: list[Comparison]


Claim = Callable[[Results], Answer]


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
    """Whether the two are the same up to a margin."""
    if -margin < comparison.low and comparison.high < margin:
        return "holds"
    return "fails" if comparison.low > margin or comparison.high < -margin else "undecided"


def all_of(verdicts: Iterable[Verdict]) -> Verdict:
    """A claim of several parts holds when all of them do, and fails when one does."""
    found = set(verdicts)
    return "fails" if "fails" in found else "undecided" if "undecided" in found else "holds"


def title(runs: Seeds) -> str:
    """A method with the settings it was best at: `QuacK (tau 1)`."""
    method: Method = next(iter(runs.values())).config.method
    settings = chosen(runs)
    return method_name(method) + (f" ({settings})" if settings else "")


def differ(where: str, one: Seeds, other: Seeds, measure: Measure = loss, what: str = "validation loss") -> Comparison:
    """One method's runs against another's, by seed."""
    label = f"{where}: {title(one)} - {title(other)}, {what}"
    return compare(label, measured(one, measure), measured(other, measure))


def against(where: str, one: Seeds, limit: float, measure: Measure, what: str) -> Comparison:
    """One method's runs against a fixed number."""
    return compare(f"{where}: {title(one)}, {what}", measured(one, measure), dict.fromkeys(one, limit))


def level(runs: Seeds, measure: Measure = loss, digits: int = 3) -> str:
    """A method's mean, its standard deviation over the seeds, and how many were lost: `2.393 (sd 0.012)`."""
    values = list(measured(runs, measure).values())
    lost = sum(entry.status == "diverged" for entry in runs.values())
    parts = [f"sd {stdev(values):.{digits}f}"] if len(values) > 1 else []
    parts += [f"{lost} of {len(values)} diverged"] if lost else []
    return f"{mean(values):.{digits}f}" + (f" ({', '.join(parts)})" if parts else "")


def levels(results: Results, attention: str, methods: Iterable[type[Method]], lr: float | None) -> str:
    """`MHA at lr 0.1: default 2.393 (sd 0.012), ...`: each method at its best setting (and its best rate)."""
    each = (f"{NAMES[method]} {level(results.best(attention, method, lr))}" for method in methods)
    return f"{attention.upper()} at {'its best lr' if lr is None else f'lr {lr:g}'}: {', '.join(each)}"


def power(runs: Seeds, measure: Measure) -> str:
    """Of a measure that is a power of ten: the geometric mean over the seeds."""
    return plain(10 ** mean(measured(runs, measure).values()))


def check(name: str, source: ClaimSource, claim: Claim, results: Results) -> ClaimResult:
    """The finding for a claim, whose docstring is its sentence; `not run` where the ledger lacks runs."""
    sentence = " ".join((claim.__doc__ or "").split())
    try:
        answer = claim(results)
    except NotRun as reason:
        answer = Answer("not run", str(reason), [])
    return ClaimResult(
        name, sentence, source, answer.verdict, results.scale.name, answer.summary, tuple(answer.evidence)
    )
