"""A ledger of all studies with numbers made by hand: such that every claim holds, or others."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from quacklr.lab.config import Config
from quacklr.lab.ledger import Entry
from quacklr.lab.methods import (
    AbsorbedQKNorm,
    ConstantTau,
    Default,
    Method,
    MuonSplit,
    QKClipping,
    QKNorm,
    Quack,
    SoftCap,
)
from quacklr.lab.methods import SigmaReparametrised as Sigma
from quacklr.lab.optim import AdamWRecipe
from quacklr.lab.studies.all_claims import claim_results
from quacklr.lab.studies.questions import GRIDS, STUDIES, runs_of
from quacklr.lab.studies.results import Results
from quacklr.lab.studies.scale import ADAMW_RELATIVE_RATE
from quacklr.lab.sweep.sweep import missing
from swept_runs import made, tiny_scale

SCALE = tiny_scale(Path("nowhere"))
LOW, MIDDLE, HIGH = SCALE.rates
NOISE = (-0.004, 0.001, 0.003)  # what the seeds share, so that pairs agree better than runs do
Values = dict[tuple[str, type[Method], float], tuple[float, float, float]]  # loss, largest logit, change of a step


def as_the_paper_says(config: Config) -> tuple[float, float, float]:
    """Loss, largest logit and change of a step, such that every claim holds."""
    lr, mla = config.optimizer.lr, "MLA" in type(config.attention).__name__
    if isinstance(config.optimizer, AdamWRecipe):  # its rates are a third of Muon's
        lr = float(f"{lr / ADAMW_RELATIVE_RATE:.6g}")
    broken = (5.0 + mla, 5000.0, 50.0)
    if lr == LOW:
        return (3.0 + 0.01 * (not isinstance(config.method, QKNorm)), 5.0, 0.01)
    match config.method:
        case Default() | MuonSplit() | Sigma("qk"):
            found = broken
        case QKClipping():
            found = (3.0 + mla, 120.0, 5.0)
        case ConstantTau(tau):
            found = (2.4 + 0.5 * abs(math.log10(tau / 0.1)), 50.0, 0.5)
        case Quack(tau, _, _, literal):
            found = (2.2 + 0.01 * abs(math.log10(tau)) + 0.3 * literal, 40.0, 0.4)
        case AbsorbedQKNorm():
            found = (2.3, 10.0, 0.3)
        case SoftCap() | Sigma():
            found = (2.21, 40.0, 0.4)
        case _:
            found = (2.1, 10.0, 0.3)
    return (found[0] + (0.3 if lr == MIDDLE else 0), *found[1:])


def ledger(
    values: Callable[[Config], tuple[float, float, float]] = as_the_paper_says, budgets: bool = False
) -> list[Entry]:
    """All studies with these numbers, judged on three seeds; that of budgets, which is the largest, if asked for."""
    known: dict[str, Entry] = {}

    def run(configs: Iterable[Config], **environment: bool) -> None:
        for config in configs:
            final, top, change = values(config)
            noise = NOISE[config.training.seed % len(NOISE)]
            seconds = {Quack: 1.0, QKNorm: 1.1, QKClipping: 1.2}.get(type(config.method), 0.99)
            entry = replace(made(config, final + noise, top, change, seconds + noise), environment=environment)
            known[entry.key] = entry

    for name in (*(name for name in STUDIES if budgets or name != "budgets"), *GRIDS):
        while todo := missing(runs_of(name, SCALE, known, 3), known):
            run(todo, **{"turns": True} if name == "speed" else {})
    while todo := tuning_of_rates(known):
        run(todo)
    return list(known.values())


def tuning_of_rates(known: dict[str, Entry]) -> list[Config]:
    """The runs that select learning rates; they are in no study."""
    (claim,) = claim_results(Results(known.values(), SCALE), ["tuned"])
    return list(claim.needed)
