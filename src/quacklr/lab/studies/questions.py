"""The studies: each is a question, and the methods and cells whose runs answer it.

`quacklr sweep` first does the runs with seed 0, which select settings, then the runs with the seeds 1, 2, ... It skips
runs that are in the ledger. A run that is in two studies is done once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from quacklr.lab.config import Config
from quacklr.lab.methods import (
    AbsorbedQKNorm,
    Budget,
    CompositionalMuon,
    ConstantTau,
    Default,
    Limit,
    Method,
    MuonSplit,
    QKClipping,
    QKNorm,
    Quack,
    SigmaReparametrised,
    SoftCap,
)
from quacklr.lab.optim import Constant
from quacklr.lab.studies.budget_table import methods_in
from quacklr.lab.studies.cell import Cell
from quacklr.lab.studies.conditions import longer as in_longer_runs
from quacklr.lab.studies.limits import TRANSFERS, harmless, muon_scale, stress, transfers
from quacklr.lab.studies.measures import NotRun
from quacklr.lab.studies.names import PAPER_METHODS
from quacklr.lab.studies.results import AnyMethod, MethodRuns, Results, as_tuned
from quacklr.lab.studies.scale import StudyScale, seeded
from quacklr.lab.studies.sizes import JUDGED, WIDTHS, above_critical, bracket, tau_of_size
from quacklr.lab.studies.tuned_methods import LITERAL, QUACK
from quacklr.lab.studies.tuning import Runs

Study = Callable[[StudyScale], Iterator[tuple[Cell, AnyMethod]]]
AdaptiveStudy = Callable[[Results, str], Iterator[tuple[Cell, AnyMethod]]]
"""A part of a study, such as one size of the model; its cells depend on the results so far."""
Grid = Callable[[StudyScale], Iterator[Config]]
"""Runs without a setting to select, so their first seed is 0."""

DECADES = (0.01, 0.1, 1.0, 10.0)  # the paper's values of tau
QUACK_TAUS = (0.01, 0.1, 0.3, 1.0, 3.0, 10.0)  # DECADES, and values between them near the best tau
CONSTANT_TAUS = (0.01, 0.03, 0.1, 0.3, 1.0)  # a constant tau of 1 is the method `default`
OTHERS: tuple[type[Method], ...] = (MuonSplit, SoftCap, SigmaReparametrised, CompositionalMuon)  # not in the paper
TIMED_STEPS = 60


def critical(scale: StudyScale) -> Iterator[tuple[Cell, AnyMethod]]:
    """Figure 1: does lowering the learning rate of queries and keys alone stabilise a high learning rate?

    Scientific: the learning rate of query and key weights. Fixed: MHA, the highest learning rate for everything else.
    """
    for method in (Default(), QKNorm(), ConstantTau(0.1), ConstantTau(0.01)):
        yield scale.cell("mha", scale.high), method


def interventions(scale: StudyScale) -> Iterator[tuple[Cell, AnyMethod]]:
    """Figures 2 and 4: which of the paper's methods reaches the lowest loss, in MHA and in MLA, and at which rate?

    Scientific: the method, the attention, the learning rate. Nuisance, best of each: tau, threshold. Fixed: model,
    data, steps; the answer holds for those only.
    """
    for lr in reversed(scale.rates):
        for method in PAPER_METHODS:
            for attention in scale.attentions:
                yield scale.cell(attention, lr), method


def norms(scale: StudyScale) -> Iterator[tuple[Cell, AnyMethod]]:
    """Figure 3: does the norm matter, and how sensitive is the loss to tau?

    Scientific: Frobenius norm, spectral norm, or a constant tau; tau. Fixed: MHA at the highest rate.
    """
    spectral = (Quack(tau, norm="spectral") for tau in DECADES)
    constant = (ConstantTau(tau) if tau != 1 else Default() for tau in CONSTANT_TAUS)
    for method in (*constant, *spectral, *(Quack(tau) for tau in QUACK_TAUS)):
        yield scale.cell("mha", scale.high), method


def rivals(scale: StudyScale) -> Iterator[tuple[Cell, AnyMethod]]:
    """Does per-head or Compositional Muon, soft-capping or sigma-Reparam remove the need for QuacK at a high rate?

    Scientific: the method, the attention, which weights sigma-Reparam normalises. Nuisance: the cap. Fixed: the
    learning rate.
    """
    for method in (*OTHERS, SigmaReparametrised("qk")):
        for attention in scale.attentions:
            yield scale.cell(attention, scale.high), method


def sensitivity(scale: StudyScale) -> Iterator[tuple[Cell, AnyMethod]]:
    """How sensitive is each method to the learning rate? (Together with the runs of `interventions` and `rivals`.)

    Scientific: the method, the learning rate. Nuisance: the cap. Fixed: the attention's sizes.
    """
    for lr in reversed(scale.rates[:-1]):
        for method in OTHERS:
            for attention in scale.attentions:
                yield scale.cell(attention, lr), method


def latents(scale: StudyScale) -> Iterator[tuple[Cell, AnyMethod]]:
    """If latents have norms, does QuacK do better with paths that end at the norms, without dq and dkv?

    Scientific: Algorithm 2 literally, or with the shorter paths. Nuisance: tau. Fixed: MLA with latent norms, the
    highest rate.
    """
    for method in (Default, QUACK, LITERAL):
        yield scale.cell("mla", scale.high, latent_norm=True), method


def absorbed(scale: StudyScale) -> Iterator[tuple[Cell, AnyMethod]]:
    """Does the QK norm that keeps latent decoding (arXiv 2606.16310) remove the need for QuacK in MLA?

    Scientific: the method; the runs of QuacK to compare with are in `interventions`. Fixed: MLA, the learning rates.
    """
    for lr in reversed(scale.rates):
        yield scale.cell("mla", lr), AbsorbedQKNorm


def adamw(scale: StudyScale) -> Iterator[tuple[Cell, AnyMethod]]:
    """Do the results hold with AdamW instead of Muon?

    Scientific: the method. Nuisance: tau. Fixed: MHA, AdamW for all weights at a rate where the default is unstable.
    """
    for method in (Default, QKNorm, ConstantTau, Quack):
        yield scale.cell("mha", scale.high, adamw=True), method


def budgets(scale: StudyScale) -> Iterator[tuple[Cell, AnyMethod]]:
    """Does one budget fit all learning rates, kinds of attention and optimizers?

    Scientific: the attention, the optimizer, the learning rate, and the budget itself. Nuisance: tau. Fixed: model,
    data, steps.
    """
    for cell in scale.cells():
        for method in methods_in(cell):
            yield cell, method


def longer(scale: StudyScale) -> Iterator[tuple[Cell, AnyMethod]]:
    """Does the order of the methods stay in runs of ten times as many steps?

    Scientific: the method. Fixed: MLA at the highest rate; tau and budget are not selected again.
    """
    for method in (Default(), Quack(), Budget(), QKNorm()):
        yield in_longer_runs(scale.cell("mla", scale.high)), method


def sizes(results: Results, size: str) -> Iterator[tuple[Cell, AnyMethod]]:
    """What changes with the size of the model: the critical learning rate, and what each method gains above it?

    Scientific: the width, the method. Fixed: MHA, heads of the same size, tau * lr = 0.1. The critical learning rate
    is searched for on seed 0. NotRun if it is not known yet. The largest model is trained with two methods only.
    """
    found, cell = bracket(results, size), above_critical(results, size)
    yield from ((each, Default()) for each in (found.low, found.high))
    others = (Budget(), QKNorm()) if size in JUDGED else ()
    yield from ((cell, method) for method in (Default(), Quack(tau_of_size(cell)), *others))


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
    """What `quacklr demo` runs: the default, QK clip, QuacK with a limit and with tau, and QK norm, at the highest
    learning rate.

    Scientific: the method, the attention. Fixed: everything else, each method at its default setting.
    """
    for attention in reversed(scale.attentions):
        for method in (Default(), QKClipping(), Limit(), Quack(), QKNorm()):
            yield scale.run(attention, method, scale.high)


STUDIES: dict[str, Study] = {
    study.__name__: study
    for study in (
        *(critical, interventions, rivals, latents, absorbed, norms, adamw, sensitivity, budgets, longer),
        *(harmless, muon_scale),
    )
}
ADAPTIVE: dict[str, AdaptiveStudy] = {"sizes": sizes, "stress": stress, "transfers": transfers}
PARTS: dict[str, Sequence[str]] = {"sizes": tuple(WIDTHS), "stress": ("mla", "mha"), "transfers": TRANSFERS}
"""The parts of each adaptive study."""
GRIDS: dict[str, Grid] = {"speed": speed, "demo": demo}


def runs_of(study: str, scale: StudyScale, known: Runs, seeds: int) -> Iterator[Config]:
    """All runs of a study that are known to be needed. More may follow when settings are selected."""
    if study in GRIDS:
        yield from seeded(GRIDS[study](scale), seeds)
        return
    results, judged = Results(known.values(), scale), list[MethodRuns]()
    if study in ADAPTIVE:
        for part in PARTS[study]:
            try:
                judged += [results.planned(cell, method) for cell, method in ADAPTIVE[study](results, part)]
            except NotRun as not_known:
                yield from not_known.needed
    for cell, method in STUDIES[study](scale) if study in STUDIES else ():
        tuned = as_tuned(method)
        if tuned.first is not None and not tuned.same_in_all_cells:
            yield from results.selection(cell, tuned).tried
        try:
            judged.append(results.planned(cell, tuned))
        except NotRun as not_selected:
            yield from not_selected.needed
    for seed in results.seeds[:seeds]:
        yield from (each.config(seed) for each in judged)
