"""A summary of the study in a few lines, computed from the ledger."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import mean

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
from quacklr.lab.studies.names import METHOD_NAMES
from quacklr.lab.studies.results import Results, RunsBySeed, by_seed, largest_logit, loss
from quacklr.lab.studies.verdicts import ClaimResult, difference, geometric_mean, less


def summary(results: Results, claims: Sequence[ClaimResult]) -> str:
    """Lines on the unstable default, the other methods, the best learning rate, and the verdicts on claims."""
    high = results.scale.high
    default, quack = (results.best("mla", method, high) for method in (Default, Quack))
    paper = Counter(each.verdict for each in claims if each.source == "paper")
    verdicts = ", ".join(f"{verdict} {paper[verdict]}" for verdict in ("holds", "fails", "undecided"))
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
    lr = min(by_rate, key=lambda lr: mean(by_seed(by_rate[lr], loss).values()))
    default = results.best(attention, Default, lr)
    return f"In {attention.upper()} QuacK is best at lr {lr:g}: {_loss(by_rate[lr])}; the default has {_loss(default)}."


def _loss(runs: RunsBySeed) -> str:
    return f"{mean(by_seed(runs, loss).values()):.3f}"


def _compared(results: Results, attention: str, lr: float, methods: Sequence[type[Method]]) -> str:
    """The loss of each method, and whether QuacK's is lower, by the interval over paired seeds."""
    quack = results.best(attention, Quack, lr)
    parts = []
    for method in methods:
        runs = results.best(attention, method, lr)
        verdict = less(difference(attention, quack, runs))
        word = {"holds": "worse", "fails": "better", "undecided": "not decided"}[verdict]
        parts.append(f"{METHOD_NAMES[method]} {_loss(runs)} ({word})")
    return ", ".join(parts) + "."
