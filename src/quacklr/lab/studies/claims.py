"""The paper's Experiments section as checks on a ledger: one function a sentence, and the sentence is its docstring."""

from __future__ import annotations

from quacklr.lab.methods import ConstantTau, Default, QKClipping, QKNorm, Quack
from quacklr.lab.studies.names import NAMES, PAPERS
from quacklr.lab.studies.questions import DECADES, timed
from quacklr.lab.studies.results import (
    Results,
    compare,
    largest_logit,
    loss,
    measured,
    middle_step_change,
    step_change,
    step_time,
)
from quacklr.lab.studies.verdicts import (
    MARGIN,
    STABLE,
    Answer,
    Claim,
    against,
    agree,
    all_of,
    below,
    differ,
    less,
    level,
    levels,
    more,
    power,
)

BOTH = ("mha", "mla")
LOGIT, CHANGE, TIME = "log10 of the largest logit", "log10 of a step's mean change of logits", "log10 of a step's time"
DOUBLE = 0.3  # log10 of 2


def lowering_stabilises(results: Results) -> Answer:
    """Lowering the learning rates of query and key weights alone stabilises a high learning rate."""
    lr = results.scale.high
    default, lowered = results.best("mha", Default, lr), results.best("mha", ConstantTau(0.1), lr)
    where = f"MHA, lr {lr:g}"
    better = differ(where, lowered, default)
    calm = against(where, lowered, STABLE, largest_logit, f"{LOGIT} - {STABLE:g}")
    wild = against(where, default, STABLE, largest_logit, f"{LOGIT} - {STABLE:g}")
    verdict = all_of([less(better), less(calm), more(wild)])
    text = (
        f"with a tenth of the rate on queries and keys the loss is {level(lowered)} instead of {level(default)}, "
        f"the largest logit {power(lowered, largest_logit)} instead of {power(default, largest_logit)} ({where})"
    )
    return Answer(verdict, text, [better, calm, wild])


def low_rate_agreement(results: Results) -> Answer:
    """At the lowest learning rate all methods perform similarly."""
    lr, evidence = results.scale.rates[0], []
    for attention in BOTH:
        norm = results.best(attention, QKNorm, lr)
        for method in PAPERS:
            if method is not QKNorm:
                runs = results.best(attention, method, lr)
                evidence.append(differ(f"{attention.upper()}, lr {lr:g}", runs, norm))
    text = "; ".join(levels(results, attention, PAPERS, lr) for attention in BOTH)
    return Answer(all_of(agree(each) for each in evidence), f"{text} (the same is within {MARGIN:g})", evidence)


def higher_is_better(results: Results) -> Answer:
    """Performance is improved by raising the learning rate above the lowest, where the method is stable."""
    lowest, *others = results.scale.rates
    evidence, texts = [], []
    for attention in BOTH:
        for method in (QKNorm, Quack):
            low = results.best(attention, method, lowest)
            levels_here = [f"{level(low)} at {lowest:g}"]
            for lr in others:
                high = results.best(attention, method, lr)
                evidence.append(differ(f"{attention.upper()}, lr {lr:g} - lr {lowest:g}", high, low))
                levels_here.append(f"{level(high)} at {lr:g}")
            texts.append(f"{attention.upper()} {NAMES[method]} {', '.join(levels_here)}")
    return Answer(all_of(less(each) for each in evidence), "; ".join(texts), evidence)


def clip_is_not_enough(results: Results) -> Answer:
    """QK clip is not enough at the highest learning rate: it ends above QuacK, and furthest in MLA."""
    lr = results.scale.high
    gaps = {}
    evidence = []
    for attention in BOTH:
        clip, quack = results.best(attention, QKClipping, lr), results.best(attention, Quack, lr)
        evidence.append(differ(f"{attention.upper()}, lr {lr:g}", clip, quack))
        gaps[attention] = {seed: loss(clip[seed]) - loss(quack[seed]) for seed in clip.keys() & quack.keys()}
    worst = compare(f"QK clip's gap to QuacK, MLA - MHA, lr {lr:g}", gaps["mla"], gaps["mha"])
    text = "; ".join(levels(results, attention, (Default, QKClipping, Quack), lr) for attention in BOTH)
    return Answer(all_of(more(each) for each in [*evidence, worst]), text, [*evidence, worst])


def constant_loses(results: Results) -> Answer:
    """A constant tau is stable, but loses to QuacK in MHA and in MLA."""
    lr, verdicts, evidence = results.scale.high, [], []
    for attention in BOTH:
        where = f"{attention.upper()}, lr {lr:g}"
        constant, quack = results.best(attention, ConstantTau, lr), results.best(attention, Quack, lr)
        gap = differ(where, constant, quack)
        calm = against(where, constant, STABLE, largest_logit, f"{LOGIT} - {STABLE:g}")
        verdicts += [more(gap), less(calm)]
        evidence += [gap, calm]
    text = "; ".join(levels(results, attention, (ConstantTau, Quack), lr) for attention in BOTH)
    return Answer(all_of(verdicts), text, evidence)


def norm_is_slightly_better(results: Results) -> Answer:
    """QuacK is slightly worse than QK norm in MHA: behind it, but nearer to it than to the default."""
    lr = results.scale.high
    quack, norm, default = (results.best("mha", method, lr) for method in (Quack, QKNorm, Default))
    behind = differ(f"MHA, lr {lr:g}", quack, norm)
    losses = [measured(runs, loss) for runs in (quack, norm, default)]
    shared = set.intersection(*(set(each) for each in losses))
    middle = {seed: (losses[1][seed] + losses[2][seed]) / 2 for seed in shared}
    near = compare(f"MHA, lr {lr:g}: QuacK - the middle of QK norm and default, validation loss", losses[0], middle)
    return Answer(
        all_of([more(behind), less(near)]), levels(results, "mha", (QKNorm, Quack, Default), lr), [behind, near]
    )


def best_for_latent_decoding(results: Results) -> Answer:
    """QuacK is the best of the paper's methods that allow latent decoding in MLA, at the highest learning rate."""
    lr = results.scale.high
    quack = results.best("mla", Quack, lr)
    others = (Default, QKClipping, ConstantTau)
    evidence = [differ(f"MLA, lr {lr:g}", quack, results.best("mla", other, lr)) for other in others]
    return Answer(
        all_of(less(each) for each in evidence), levels(results, "mla", (Quack, *others, QKNorm), lr), evidence
    )


def norms_differ_little(results: Results) -> Answer:
    """Frobenius and spectral norm differ little, at every tau of the paper."""
    lr, evidence = results.scale.high, []
    for tau in DECADES:
        spectral = results.best("mha", Quack(tau, norm="spectral"), lr)
        evidence.append(differ(f"MHA, lr {lr:g}", spectral, results.best("mha", Quack(tau), lr)))
    widest = max(evidence, key=lambda each: abs(each.mean))
    text = f"over {len(evidence)} values of tau the difference is at most {abs(widest.mean):.3f} ({widest})"
    return Answer(all_of(agree(each) for each in evidence), f"{text}; little is within {MARGIN:g}", evidence)


def both_bounded(results: Results) -> Answer:
    """QuacK controls the largest logit as well as the change in logits."""
    lr, verdicts, evidence, texts = results.scale.high, [], [], []
    for attention in BOTH:
        where = f"{attention.upper()}, lr {lr:g}"
        quack, default = results.best(attention, Quack, lr), results.best(attention, Default, lr)
        lower = [
            differ(where, quack, default, largest_logit, LOGIT),
            differ(where, quack, default, step_change, CHANGE),
        ]
        label = f"{where}: QuacK's change at the end - in the middle of training, {CHANGE}"
        growth = compare(label, measured(quack, step_change), measured(quack, middle_step_change))
        calm = against(where, quack, STABLE, largest_logit, f"{LOGIT} - {STABLE:g}")
        verdicts += [*(less(each) for each in lower), less(calm), below(growth, DOUBLE)]
        evidence += [*lower, calm, growth]
        texts.append(
            f"{where}: largest logit {power(quack, largest_logit)} (default {power(default, largest_logit)}), "
            f"mean change of a step {power(quack, step_change)} (default {power(default, step_change)})"
        )
    return Answer(all_of(verdicts), "; ".join(texts), evidence)


def faster(results: Results) -> Answer:
    """A step with QuacK is faster than one with QK norm, and than one with QK clip."""
    taken = Results((each for each in results.every if each.environment.get("turns")), timed(results.scale))
    lr, evidence, texts = results.scale.high, [], []
    for attention in BOTH:
        quack = taken.best(attention, Quack, lr)
        for rival in (QKNorm, QKClipping):
            slower = differ(f"{attention.upper()}", taken.best(attention, rival, lr), quack, step_time, TIME)
            evidence.append(slower)
            texts.append(f"{attention.upper()} {NAMES[rival]} / QuacK {10**slower.mean:.3f}")
    return Answer(all_of(more(each) for each in evidence), f"time of a step, {', '.join(texts)}", evidence)


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
