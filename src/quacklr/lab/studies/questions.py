"""The studies: each is a question, and the grid of runs that answers it.

`quacklr sweep` adds the seeds, and skips runs that are in the ledger. A run that is in two studies is run once. An
adaptive study selects settings by the runs that have ended, so its later runs depend on its earlier ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from quacklr.lab.config import Config
from quacklr.lab.methods import (
    AbsorbedQKNorm,
    ConstantTau,
    Default,
    Method,
    MuonSplit,
    QKClipping,
    QKNorm,
    Quack,
    SigmaReparametrised,
    SoftCap,
)
from quacklr.lab.optim import AdamWRecipe, Constant
from quacklr.lab.studies.budget_table import BudgetTable
from quacklr.lab.studies.scale import StudyScale, seeded
from quacklr.lab.studies.tuning import Runs

Study = Callable[[StudyScale], Iterator[Config]]
AdaptiveStudy = Callable[[StudyScale, Runs, int], Iterator[Config]]
"""Gives the runs, with their seeds, from the runs that have ended and the number of seeds."""

DECADES = (0.01, 0.1, 1.0, 10.0)  # the paper's values of tau
QUACK_TAUS = (0.01, 0.1, 0.3, 1.0, 3.0, 10.0)  # and values between, near the best
CONSTANT_TAUS = (0.01, 0.03, 0.1, 0.3, 1.0)  # 1 is the default
OTHERS: tuple[Method, ...] = (MuonSplit(), SoftCap(), SigmaReparametrised())  # not tested by the paper
TIMED_STEPS = 60
ADAMW_RATE = 3e-2  # where the default is unstable with AdamW, at the scale `cpu`


def critical(scale: StudyScale) -> Iterator[Config]:
    """Figure 1: does lowering the learning rate of queries and keys alone stabilise a high learning rate?

    Scientific: the learning rate of query and key weights. Fixed: MHA, the highest learning rate for everything else.
    """
    for method in (Default(), QKNorm(), ConstantTau(0.1), ConstantTau(0.01)):
        yield scale.run("mha", method, scale.high)


def method_settings(rank: int) -> list[Method]:
    """The paper's methods with the settings to select from; `rank` 0 is the highest learning rate.

    The lower the learning rate, the larger the best tau. A constant tau of 1 is the default.
    """
    thresholds = ((100.0, 30.0), (100.0,), (100.0,))[rank]
    constant = ((0.1, 0.3, 0.03), (3.0,), (3.0, 10.0))[rank]
    quack = ((1.0, 3.0, 0.3), (3.0, 10.0), (3.0, 10.0))[rank]
    return [
        Default(),
        QKNorm(),
        *(QKClipping(threshold) for threshold in thresholds),
        *(ConstantTau(tau) for tau in constant),
        *(Quack(tau) for tau in quack),
    ]


def interventions(scale: StudyScale) -> Iterator[Config]:
    """Figures 2 and 4: which of the paper's methods reaches the lowest loss, in MHA and in MLA, and at which rate?

    Scientific: the method, the attention, the learning rate. Nuisance, best of each: tau, threshold. Fixed: model,
    data, steps; the answer holds for those only.
    """
    for rank, lr in enumerate(reversed(scale.rates)):
        for method in method_settings(rank):
            for attention in scale.attentions:
                yield scale.run(attention, method, lr)


def norms(scale: StudyScale) -> Iterator[Config]:
    """Figure 3: does the norm matter, and how sensitive is the loss to tau?

    Scientific: Frobenius norm, spectral norm, or a constant tau; tau. Fixed: MHA at the highest rate.
    """
    spectral = (Quack(tau, norm="spectral") for tau in DECADES)
    constant = (ConstantTau(tau) if tau != 1 else Default() for tau in CONSTANT_TAUS)
    for method in (*constant, *spectral, *(Quack(tau) for tau in QUACK_TAUS)):
        yield scale.run("mha", method, scale.high)


def rivals(scale: StudyScale) -> Iterator[Config]:
    """Does per-head Muon, soft-capping or sigma-Reparam remove the need for QuacK at the highest learning rate?

    Scientific: the method, the attention. Nuisance: which weights sigma-Reparam normalises. Fixed: the learning rate.
    """
    for method in (*OTHERS, SigmaReparametrised("qk")):
        for attention in scale.attentions:
            yield scale.run(attention, method, scale.high)


def sensitivity(scale: StudyScale) -> Iterator[Config]:
    """With `interventions` and `rivals`: how sensitive is each method to the learning rate?

    Scientific: the method, the learning rate. Fixed: the rivals' settings.
    """
    for lr in reversed(scale.rates[:-1]):
        for method in OTHERS:
            for attention in scale.attentions:
                yield scale.run(attention, method, lr)


def latents(scale: StudyScale) -> Iterator[Config]:
    """If latents have norms, does QuacK do better with paths that end at the norms, without dq and dkv?

    Scientific: Algorithm 2 literally, or with the shorter paths. Fixed: MLA with latent norms, the highest rate, tau 1.
    """
    for method in (Default(), Quack(), Quack(literal=True)):
        yield scale.with_latent_norms().run("mla", method, scale.high)


def absorbed(scale: StudyScale) -> Iterator[Config]:
    """Does the QK norm that keeps latent decoding (arXiv 2606.16310) remove the need for QuacK in MLA?

    Scientific: the norm on both parts of queries and keys; the runs to compare with are in `interventions`. Fixed:
    MLA, the learning rates.
    """
    for lr in reversed(scale.rates):
        yield scale.run("mla", AbsorbedQKNorm(), lr)


def adamw(scale: StudyScale) -> Iterator[Config]:
    """Do the results hold with AdamW instead of Muon?

    Scientific: the method. Nuisance: tau. Fixed: MHA, AdamW for all weights at a rate where the default is unstable.
    """
    for method in (Default(), QKNorm(), Quack(0.3), Quack(0.1), ConstantTau(0.1)):
        yield scale.run("mha", method, ADAMW_RATE, optimizer=AdamWRecipe())


def budgets(scale: StudyScale, known: Runs, seeds: int) -> Iterator[Config]:
    """Does one budget fit all learning rates, kinds of attention and optimizers?

    Scientific: the attention, the optimizer, the learning rate, and the budget itself. Nuisance: tau, selected on seed
    0 for each learning rate. All methods are judged on the seeds from 1 on.
    """
    return BudgetTable(scale, known).needed(seeds)


def timed(scale: StudyScale) -> StudyScale:
    """The scale with shorter runs, to measure the time of a step."""
    training = replace(scale.base.training, steps=TIMED_STEPS)
    schedule = Constant(min(TIMED_STEPS // 2, scale.base.schedule.warmup))
    return replace(scale, base=replace(scale.base, training=training, schedule=schedule))


def speed(scale: StudyScale) -> Iterator[Config]:
    """What does a step of each method cost? The steps are interleaved in one process; a seed is a repetition.

    Scientific: the method, the attention. Fixed: everything else.
    """
    for attention in scale.attentions:
        for method in (Default(), Quack(), QKNorm(), QKClipping()):
            yield timed(scale).run(attention, method, scale.high)


def demo(scale: StudyScale) -> Iterator[Config]:
    """What `quacklr demo` runs: the default, QK clip, QuacK and QK norm at the highest learning rate.

    Scientific: the method, the attention. Fixed: everything else, each method at its default setting.
    """
    for attention in reversed(scale.attentions):
        for method in (Default(), QKClipping(), Quack(), QKNorm()):
            yield scale.run(attention, method, scale.high)


STUDIES: dict[str, Study] = {
    study.__name__: study
    for study in (critical, interventions, rivals, latents, absorbed, norms, adamw, sensitivity, speed, demo)
}
ADAPTIVE_STUDIES: dict[str, AdaptiveStudy] = {"budgets": budgets}


def runs_of(study: str, scale: StudyScale, known: Runs, seeds: int) -> Iterator[Config]:
    """All runs of a study that are known to be needed; for an adaptive study that depends on the runs that ended."""
    if study in ADAPTIVE_STUDIES:
        return ADAPTIVE_STUDIES[study](scale, known, seeds)
    return seeded(STUDIES[study](scale), seeds)
