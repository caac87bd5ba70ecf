"""The claims of the paper's Experiments section: one function each, with the claim as its docstring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from quacklr.lab.methods import ConstantTau, Default, Method, QKClipping, QKNorm, Quack
from quacklr.lab.studies.comparison import MARGIN, Comparison, Test, agree, below, compare, difference, less, more
from quacklr.lab.studies.intervals import MOST_SEEDS
from quacklr.lab.studies.measures import NotRun, largest_logit, middle_step_change, step_change, step_time
from quacklr.lab.studies.names import METHOD_NAMES, PAPER_METHODS, method_name
from quacklr.lab.studies.questions import DECADES, timed
from quacklr.lab.studies.results import Results
from quacklr.lab.studies.verdicts import (
    LOGIT,
    Answer,
    Claim,
    answer,
    geometric_mean,
    logit_above_stable,
    mean_and_sd,
    method_means,
)

BOTH = ("mha", "mla")
CHANGE, TIME = "log10 of a step's mean change of logits", "log10 of a step's time"
below_double = partial(below, limit=0.3)  # log10 of 2


def lowering_stabilises(results: Results) -> Answer:
    """Lowering the learning rates of query and key weights alone stabilises a high learning rate."""
    lr = results.scale.high
    default, lowered = results.best("mha", Default, lr), results.best("mha", ConstantTau(0.1), lr)
    text = (
        f"with a tenth of the rate on queries and keys the loss is {mean_and_sd(lowered)} instead of "
        f"{mean_and_sd(default)}, the largest logit {geometric_mean(lowered, largest_logit)} instead of "
        f"{geometric_mean(default, largest_logit)} ({default.cell})"
    )
    calm, wild = logit_above_stable(lowered), logit_above_stable(default)
    return answer(text, (less, difference(lowered, default)), (less, calm), (more, wild))


def low_rate_agreement(results: Results) -> Answer:
    """At the lowest learning rate all methods perform similarly."""
    lr, tested = results.scale.rates[0], []
    for attention in BOTH:
        norm = results.best(attention, QKNorm, lr)
        others = [results.best(attention, method, lr) for method in PAPER_METHODS if method is not QKNorm]
        tested += [(agree, difference(runs, norm)) for runs in others]
    text = "; ".join(method_means(results, attention, PAPER_METHODS, lr) for attention in BOTH)
    return answer(f"{text} (similar is within {MARGIN:g})", *tested)


def higher_is_better(results: Results) -> Answer:
    """Performance is improved by raising the learning rate above the lowest, where the method is stable."""
    lowest, *others = results.scale.rates
    return compare_rates(results, results.scale.rates, [(lr, lowest) for lr in others])


def compare_rates(results: Results, rates: Sequence[float], pairs: Sequence[tuple[float, float]]) -> Answer:
    """Whether the first rate of each pair has the lower loss, for the methods that are stable at all rates."""
    tested, texts = [], []
    for attention in BOTH:
        for method in (QKNorm, Quack):
            runs = {lr: results.best(attention, method, lr) for lr in rates}
            for one, other in pairs:
                where = f"{attention.upper()}, lr {one:g} against lr {other:g}"
                tested.append((less, difference(runs[one], runs[other], where=where)))
            means = ", ".join(f"{mean_and_sd(runs[lr])} at {lr:g}" for lr in rates)
            texts.append(f"{attention.upper()} {METHOD_NAMES[method]} {means}")
    return answer("; ".join(texts), *tested)


def clip_is_not_enough(results: Results) -> Answer:
    """QK clip is not enough at the highest learning rate: it ends above QuacK, and furthest in MLA."""
    lr, gaps, evidence = results.scale.high, {}, []
    for attention in BOTH:
        clip, quack = results.best(attention, QKClipping, lr), results.best(attention, Quack, lr)
        evidence.append(difference(clip, quack))
        clips, quacks = clip.by_seed(), quack.by_seed()
        gaps[attention] = {seed: clips[seed] - quacks[seed] for seed in clips.keys() & quacks.keys()}
    compared = [runs for each in evidence for runs in each.compared]
    evidence.append(compare(f"QK clip's gap to QuacK, MLA - MHA, lr {lr:g}", gaps["mla"], gaps["mha"], *compared))
    text = "; ".join(method_means(results, attention, (Default, QKClipping, Quack), lr) for attention in BOTH)
    return answer(text, *((more, each) for each in evidence))


def constant_loses(results: Results) -> Answer:
    """A constant tau is stable, but loses to QuacK in MHA and in MLA."""
    lr = results.scale.high
    tested: list[tuple[Test, Comparison]] = []
    for attention in BOTH:
        constant, quack = results.best(attention, ConstantTau, lr), results.best(attention, Quack, lr)
        tested += [(more, difference(constant, quack)), (less, logit_above_stable(constant))]
    text = "; ".join(method_means(results, attention, (ConstantTau, Quack), lr) for attention in BOTH)
    return answer(text, *tested)


def norm_is_slightly_better(results: Results) -> Answer:
    """QuacK is slightly worse than QK norm in MHA: behind it, but nearer to it than to the default."""
    lr = results.scale.high
    quack, norm, default = (results.best("mha", method, lr) for method in (Quack, QKNorm, Default))
    behind = difference(quack, norm)
    norms, defaults = norm.by_seed(), default.by_seed()
    middle = {seed: (norms[seed] + defaults[seed]) / 2 for seed in norms.keys() & defaults.keys()}
    label = f"{quack.cell}: {quack} - the middle of QK norm and default, validation loss"
    near = compare(label, quack.by_seed(), middle, quack, norm, default)
    return answer(method_means(results, "mha", (QKNorm, Quack, Default), lr), (more, behind), (less, near))


def best_for_latent_decoding(results: Results) -> Answer:
    """QuacK is the best of the paper's methods that allow latent decoding in MLA, at the highest learning rate."""
    return best_in_mla(results, (Default, QKClipping, ConstantTau), results.scale.high)


def best_in_mla(results: Results, others: Sequence[type[Method]], lr: float | None) -> Answer:
    """Whether QuacK has the lowest loss in MLA, at a learning rate or with each method at its best rate."""
    where = "MLA, each at its best lr" if lr is None else ""
    quack = results.best("mla", Quack, lr)
    tested = [(less, difference(quack, results.best("mla", other, lr), where=where)) for other in others]
    return answer(method_means(results, "mla", (Quack, *others, QKNorm), lr), *tested)


def norms_differ_little(results: Results) -> Answer:
    """Frobenius and spectral norm differ little, at every tau of the paper."""
    lr, evidence = results.scale.high, []
    for tau in DECADES:
        spectral, frobenius = results.best("mha", Quack(tau, norm="spectral"), lr), results.best("mha", Quack(tau), lr)
        evidence.append(difference(spectral, frobenius))
    widest = max(evidence, key=lambda each: abs(each.mean))
    text = f"over {len(evidence)} values of tau the difference is at most {abs(widest.mean):.3f} ({widest})"
    return answer(f"{text}; little is within {MARGIN:g}", *((agree, each) for each in evidence))


def both_bounded(results: Results) -> Answer:
    """QuacK controls the largest logit as well as the change in logits."""
    lr, texts = results.scale.high, []
    tested: list[tuple[Test, Comparison]] = []
    for attention in BOTH:
        quack, default = results.best(attention, Quack, lr), results.best(attention, Default, lr)
        label = f"{quack.cell}: {quack}, change at the end - in the middle of training, {CHANGE}"
        growth = compare(label, quack.by_seed(step_change), quack.by_seed(middle_step_change), quack)
        tested += [
            (less, difference(quack, default, largest_logit, LOGIT)),
            (less, difference(quack, default, step_change, CHANGE)),
            (less, logit_above_stable(quack)),
            (below_double, growth),
        ]
        logits, changes = (
            f"{geometric_mean(quack, measure)} (default {geometric_mean(default, measure)})"
            for measure in (largest_logit, step_change)
        )
        texts.append(f"{quack.cell}: largest logit {logits}, mean change of a step {changes}")
    return answer("; ".join(texts), *tested)


def faster(results: Results) -> Answer:
    """A step with QuacK is faster than one with QK norm, and than one with QK clip."""
    repetitions = (each for each in results.ledger if each.environment.get("turns"))
    interleaved = Results(repetitions, timed(results.scale), range(MOST_SEEDS))
    lr, evidence, texts = results.scale.high, [], []
    for attention in BOTH:
        try:
            quack, *rivals = (interleaved.best(attention, each, lr) for each in (Quack(), QKNorm(), QKClipping()))
        except NotRun:
            raise NotRun("needs the runs of `quacklr sweep speed`") from None
        for runs in rivals:
            found = difference(runs, quack, step_time, TIME)
            evidence.append(replace(found, compared=()))  # a repetition is run by `quacklr sweep speed` only
            texts.append(f"{attention.upper()} {method_name(runs.method)} / QuacK {10**found.mean:.3f}")
    return answer(f"time of a step, {', '.join(texts)}", *((more, each) for each in evidence))


CLAIMS: dict[str, Claim] = {
    "a": lowering_stabilises,
    "b": low_rate_agreement,
    "c": higher_is_better,
    "d": clip_is_not_enough,
    "e": constant_loses,
    "f": norm_is_slightly_better,
    "g": best_for_latent_decoding,
    "h": norms_differ_little,
    "i": both_bounded,
    "j": faster,
}
