"""Claims that the paper does not make: one function each, with the claim as its docstring."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import mean

from quacklr.lab.methods import (
    AbsorbedQKNorm,
    Budget,
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
from quacklr.lab.studies.budget_table import PAPER, by_model, methods_in
from quacklr.lab.studies.claims import BOTH, best_in_mla, compare_rates
from quacklr.lab.studies.comparison import MARGIN, SAME, below, compare, difference, less, more
from quacklr.lab.studies.measures import lr_sensitivity
from quacklr.lab.studies.names import METHOD_NAMES
from quacklr.lab.studies.results import AnyMethod, MethodRuns, Results, as_tuned
from quacklr.lab.studies.tuned_methods import LITERAL, QUACK, fixed
from quacklr.lab.studies.tuning import neighbour
from quacklr.lab.studies.verdicts import Answer, Claim, answer, mean_and_sd

below_margin = partial(below, limit=MARGIN)


def no_need_for_quack(sentence: str, rival: type[Method] | Method, attentions: Sequence[str] = BOTH) -> Claim:
    """The claim that the loss of a rival is at most MARGIN above that of QuacK at the highest rate."""

    def claim(results: Results) -> Answer:
        lr, tested, texts = results.scale.high, [], []
        for attention in attentions:
            other, quack = results.best(attention, rival, lr), results.best(attention, Quack, lr)
            tested.append((below_margin, difference(other, quack)))
            means = ", ".join(f"{runs} {mean_and_sd(runs)}" for runs in (other, quack))
            texts.append(f"{attention.upper()} {means}")
        return answer(f"at lr {lr:g}: {'; '.join(texts)}", *tested)

    claim.__doc__ = sentence
    return claim


def latent_cut(results: Results) -> Answer:
    """Where latents have norms, cutting the paths there beats Algorithm 2 taken literally."""
    lr = results.scale.high
    methods: dict[str, AnyMethod] = {"cut": QUACK, "literal": LITERAL, "default": Default}
    runs = {name: results.best("mla", method, lr, latent_norm=True) for name, method in methods.items()}
    text = ", ".join(f"{name} {mean_and_sd(each)}" for name, each in runs.items())
    return answer(f"{runs['cut'].cell}: {text}", (less, difference(runs["cut"], runs["literal"])))


def with_adamw(results: Results) -> Answer:
    """With AdamW instead of Muon, QuacK beats the default and a constant tau too."""
    methods = (Default, QKNorm, ConstantTau, Quack)
    runs = {method: results.best("mha", method, results.scale.high, adamw=True) for method in methods}
    tested = [(less, difference(runs[Quack], runs[each])) for each in (Default, ConstantTau)]
    text = ", ".join(f"{each} {mean_and_sd(each)}" for each in runs.values())
    return answer(f"{runs[Quack].cell}: {text}", *tested)


def highest_is_best(results: Results) -> Answer:
    """The highest learning rate is the best one for the methods that are stable there."""
    *_, middle, high = results.scale.rates
    return compare_rates(results, (high, middle), [(high, middle)])


def best_when_tuned(results: Results) -> Answer:
    """When every method may choose its learning rate too, QuacK is the best for MLA of all that decode from latents."""
    others = (Default, AbsorbedQKNorm, QKClipping, ConstantTau, MuonSplit, SoftCap, SigmaReparametrised)
    return best_in_mla(results, others, None)


def tau_is_forgiving(results: Results) -> Answer:
    """QuacK needs its tau less well known than a constant tau: a threefold error on either side costs less."""
    lr, costs, compared = results.scale.high, {}, list[MethodRuns]()
    for method in (ConstantTau, Quack):
        best = results.best("mha", method, lr)
        assert best.value is not None
        others = [as_tuned(method).of_value(neighbour(best.value, steps)) for steps in (-1, 1)]
        wrong = [results.runs(best.cell, fixed(other)) for other in others]
        compared += [best, *wrong]
        low, at_it, high = (runs.by_seed() for runs in (wrong[0], best, wrong[1]))
        seeds = low.keys() & at_it.keys() & high.keys()
        costs[method] = {seed: max(low[seed], high[seed]) - at_it[seed] for seed in seeds}
    label = f"{compared[0].cell}: {compared[0]} - {compared[3]}, worst loss of a threefold error"
    gap = compare(label, costs[ConstantTau], costs[Quack], *compared, same_within=SAME)
    text = ", ".join(f"{METHOD_NAMES[method]} {mean(each.values()):.3f}" for method, each in costs.items())
    return answer(f"MHA at lr {lr:g}, loss added by the worse of a third and three times tau: {text}", (more, gap))


def budget_needs_no_tuning(results: Results) -> Answer:
    """One budget is enough: in every cell its loss is at most 0.02 above that of the paper's best method there."""
    tested, behind = [], []
    for cell in results.scale.cells():
        best = min((results.runs(cell, method) for method in methods_in(cell, PAPER)), key=MethodRuns.mean)
        compared = difference(results.runs(cell, Budget), best)
        tested.append((partial(below, limit=SAME), compared))
        behind += [f"{compared.mean:+.3f} in {cell}"] if compared.mean > SAME else []
    counts = f"the mean is within {SAME:g} in {len(tested) - len(behind)} of {len(tested)} cells"
    return answer(f"{counts}; others: {', '.join(behind)}" if behind else counts, *tested)


def budget_and_learning_rate(results: Results) -> Answer:
    """With one budget the loss depends less on the learning rate than with QK norm."""
    tested, texts = [], []
    for model, cells in by_model(results.scale).items():
        budget, norm = ([results.runs(cell, method) for cell in cells] for method in (Budget, QKNorm))
        one, other = (lr_sensitivity(runs.by_seed() for runs in each) for each in (budget, norm))
        label = f"{model}: budget - QK norm, lr sensitivity"
        tested.append((less, compare(label, one, other, *budget, *norm, same_within=SAME)))
        texts.append(f"{model} {mean(one.values()):.3f} (QK norm {mean(other.values()):.3f})")
    return answer(f"lr sensitivity: {'; '.join(texts)}", *tested)


NO_NEED = "removes the need for QuacK"
EXTRA_CLAIMS: dict[str, Claim] = {
    "per-head Muon": no_need_for_quack(f"Per-head Muon {NO_NEED} (as GLM-5 reports).", MuonSplit),
    "soft-capping": no_need_for_quack(f"Soft-capping {NO_NEED}.", SoftCap),
    "sigma-Reparam": no_need_for_quack(f"Sigma-Reparam of all linear layers {NO_NEED}.", SigmaReparametrised("all")),
    "sigma-Reparam of q and k": no_need_for_quack(
        f"Sigma-Reparam of the query and key weights alone {NO_NEED}.", SigmaReparametrised("qk")
    ),
    "absorbed QK norm": no_need_for_quack(
        f"The QK norm that keeps latent decoding {NO_NEED} in MLA.", AbsorbedQKNorm, ["mla"]
    ),
    "latent norms": latent_cut,
    "AdamW": with_adamw,
    "highest rate": highest_is_best,
    "tuned": best_when_tuned,
    "tau": tau_is_forgiving,
    "budget": budget_needs_no_tuning,
    "budget and learning rate": budget_and_learning_rate,
}
