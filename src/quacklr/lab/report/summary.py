"""A summary of the study in a few lines, computed from the ledger."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from quacklr.lab.methods import (
    AbsorbedQKNorm,
    ConstantTau,
    Default,
    Method,
    QKClipping,
    QKNorm,
    Quack,
    SigmaReparametrised,
)
from quacklr.lab.studies.comparison import difference, less
from quacklr.lab.studies.measures import largest_logit
from quacklr.lab.studies.names import METHOD_NAMES
from quacklr.lab.studies.results import MethodRuns, Results, available
from quacklr.lab.studies.verdicts import ClaimResult, geometric_mean


def summary(results: Results, claims: Sequence[ClaimResult]) -> str:
    """Lines on the unstable default, the other methods, the best learning rate, and the verdicts on claims."""
    high = results.scale.high
    default, quack = (results.best("mla", method, high) for method in (Default, Quack))
    paper = Counter(each.verdict for each in claims if each.source == "paper")
    verdicts = ", ".join(
        f"{verdict} {paper[verdict]}"
        for verdict in ("holds", "fails", "the same", "undecided", "not run")
        if paper[verdict]
    )
    lines = [
        f"At lr {high:g}, which is too high for MLA, the default ends at a validation loss of {_loss(default)} with "
        f"logits of {geometric_mean(default, largest_logit)}; QuacK ends at {_loss(quack)} with logits of "
        f"{geometric_mean(quack, largest_logit)}.",
        f"Beside QuacK in MLA at lr {high:g}: "
        + _compared(results, "mla", high, [QKClipping, ConstantTau, QKNorm, AbsorbedQKNorm, SigmaReparametrised]),
        f"In MHA at lr {high:g} QuacK ends at {_loss(results.best('mha', Quack, high))}; beside it: "
        + _compared(results, "mha", high, [QKClipping, ConstantTau, QKNorm, SigmaReparametrised]),
        *(_lowest(results, attention) for attention in results.scale.attentions),
        f"Verdicts on the {paper.total()} claims of the paper's experiments: {verdicts}.",
    ]
    return "".join(f"- {line}\n" for line in lines)


def _lowest(results: Results, attention: str) -> str:
    """The learning rate at which QuacK is best, with its loss and that of the default."""
    by_rate = {lr: results.best(attention, Quack, lr) for lr in results.scale.rates}
    lr = min(by_rate, key=lambda lr: by_rate[lr].mean())
    default = results.best(attention, Default, lr)
    return f"In {attention.upper()} QuacK is best at lr {lr:g}: {_loss(by_rate[lr])}; the default has {_loss(default)}."


def _loss(runs: MethodRuns) -> str:
    return f"{runs.mean():.3f}"


def _compared(results: Results, attention: str, lr: float, methods: Sequence[type[Method]]) -> str:
    """The loss of each method that was run, and whether QuacK's is lower, by the interval over paired seeds."""
    quack = results.best(attention, Quack, lr)
    parts = []
    for method, runs in available(methods, lambda method: results.best(attention, method, lr)).items():
        verdict = less(difference(quack, runs))
        word = {"holds": "worse", "fails": "better", "the same": "the same", "undecided": "undecided"}[verdict]
        parts.append(f"{METHOD_NAMES[method]} {_loss(runs)} ({word})")
    return ", ".join(parts) + "."
