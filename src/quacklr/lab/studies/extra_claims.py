"""Claims that the paper does not make: one function each, with the claim as its docstring."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import mean

from quacklr.lab.methods import (
    AbsorbedQKNorm,
    BoundedStep,
    Budget,
    CompositionalMuon,
    ConstantTau,
    Default,
    MuonSplit,
    QKClipping,
    QKNorm,
    Quack,
    SigmaReparametrised,
    SoftCap,
)
from quacklr.lab.studies.budget_table import PAPER, by_model, methods_in
from quacklr.lab.studies.claims import BOTH, best_in_mla, compare_rates
from quacklr.lab.studies.comparison import MARGIN, SAME, Comparison, Test, below, compare, difference, less, more
from quacklr.lab.studies.measures import lr_sensitivity
from quacklr.lab.studies.names import METHOD_NAMES
from quacklr.lab.studies.results import AnyMethod, MethodRuns, Results, as_tuned
from quacklr.lab.studies.tuned_methods import (
    EVERYWHERE,
    ISOTROPIC,
    LITERAL,
    QUACK,
    SAME_TAU_LR,
    WITH_CLIP,
    WITH_QK_NORM,
    WITH_SIGMA,
    fixed,
)
from quacklr.lab.studies.tuning import neighbour
from quacklr.lab.studies.verdicts import Answer, Claim, answer, mean_and_sd, method_means

below_margin, below_same = partial(below, limit=MARGIN), partial(below, limit=SAME)


def no_need_for_quack(
    sentence: str, rival: AnyMethod, attentions: Sequence[str] = BOTH, *, adamw: bool = False
) -> Claim:
    """The claim that the loss of a rival is at most MARGIN above that of QuacK at the highest rate."""

    def claim(results: Results) -> Answer:
        lr, tested, texts = results.scale.high, [], []
        for attention in attentions:
            other, quack = (results.best(attention, method, lr, adamw=adamw) for method in (rival, Quack))
            tested.append((below_margin, difference(other, quack)))
            means = ", ".join(f"{runs} {mean_and_sd(runs)}" for runs in (other, quack))
            texts.append(f"{attention.upper()} {means}")
        rate = results.scale.cell(attentions[0], lr, adamw=adamw).lr
        return answer(f"at lr {rate:g}: {'; '.join(texts)}", *tested)

    claim.__doc__ = sentence
    return claim


def better_than_all(sentence: str, one: AnyMethod, *others: AnyMethod, attentions: Sequence[str] = BOTH) -> Claim:
    """The claim that a method has a lower loss than each of the others at the highest rate."""

    def claim(results: Results) -> Answer:
        lr, tested, texts = results.scale.high, [], []
        for attention in attentions:
            first, *rest = (results.best(attention, method, lr) for method in (one, *others))
            tested += [(less, difference(first, other)) for other in rest]
            texts.append(method_means(results, attention, (one, *others), lr))
        return answer("; ".join(texts), *tested)

    claim.__doc__ = sentence
    return claim


def everywhere_closes_the_gap(results: Results) -> Answer:
    """QuacK for all products of weights closes the gap to sigma-Reparam at the highest rate, up to 0.02."""
    lr, sigma = results.scale.high, SigmaReparametrised
    pairs = [(results.best(attention, EVERYWHERE, lr), results.best(attention, sigma, lr)) for attention in BOTH]
    text = "; ".join(method_means(results, attention, (EVERYWHERE, sigma, QUACK), lr) for attention in BOTH)
    return answer(text, *((below_same, difference(*pair)) for pair in pairs))


def best_tau_and_rate(results: Results) -> Answer:
    """The best tau is proportional to 1 / lr: with one tau * lr for all learning rates the loss is at most 0.02 above
    that with tau selected at each, in MHA and in MLA."""
    cells = [results.scale.cell(attention, lr) for attention in BOTH for lr in results.scale.rates]
    pairs = [(results.runs(cell, SAME_TAU_LR), results.runs(cell, QUACK)) for cell in cells]
    texts = [f"tau {one.value:g} {mean_and_sd(one)}, selected {best.value:g} in {one.cell}" for one, best in pairs]
    return answer("; ".join(texts), *((below_same, difference(*pair)) for pair in pairs))


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
    tested, behind, cells = list[tuple[Test, Comparison]](), list[str](), results.scale.cells()
    for cell in cells:
        budget = results.runs(cell, Budget)
        compared = [difference(budget, results.runs(cell, method)) for method in methods_in(cell, PAPER)]
        tested += [(below_same, each) for each in compared]
        worst = max(each.mean for each in compared)
        behind += [f"{worst:+.3f} in {cell}"] if worst > SAME else []
    enough = f"{len(cells) - len(behind)} of {len(cells)} cells"
    counts = f"the mean is at most {SAME:g} above that of each method of the paper in {enough}"
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
    "compositional Muon": no_need_for_quack(f"Compositional Muon {NO_NEED} in MHA.", CompositionalMuon, ["mha"]),
    "isotropic compositional Muon": no_need_for_quack(
        f"The isotropic form of Compositional Muon {NO_NEED} in MHA.", ISOTROPIC, ["mha"]
    ),
    "compositional Muon in MLA": no_need_for_quack(
        f"Compositional Muon of the pairs uq . uk, qr . kr and uv . o {NO_NEED} in MLA.", CompositionalMuon, ["mla"]
    ),
    "AdamW^2": no_need_for_quack(
        f"AdamW^2, which bounds each step relative to its own weight, {NO_NEED} with AdamW.", BoundedStep, adamw=True
    ),
    "everywhere": better_than_all(
        "QuacK for all products of weights (also value . output projection, and those of the MLP) beats QuacK for the "
        "logits alone, at the highest learning rate.",
        EVERYWHERE,
        QUACK,
    ),
    "everywhere and sigma-Reparam": everywhere_closes_the_gap,
    "with QK norm": better_than_all(
        "QuacK together with QK norm beats both alone, at the highest learning rate.", WITH_QK_NORM, QUACK, QKNorm
    ),
    "with sigma-Reparam": better_than_all(
        "QuacK for queries and keys together with sigma-Reparam of all other linear layers beats both alone, at the "
        "highest learning rate.",
        WITH_SIGMA,
        QUACK,
        SigmaReparametrised,
    ),
    "with sigma-Reparam in MLA": better_than_all(
        "In MLA, QuacK for queries and keys together with sigma-Reparam of all other linear layers beats both alone, "
        "at the highest learning rate.",
        WITH_SIGMA,
        QUACK,
        SigmaReparametrised,
        attentions=("mla",),
    ),
    "with QK clip": better_than_all(
        "A budget together with QK clip beats both alone, at the highest learning rate.", WITH_CLIP, Budget, QKClipping
    ),
    "tau and learning rate": best_tau_and_rate,
    "latent norms": latent_cut,
    "AdamW": with_adamw,
    "highest rate": highest_is_best,
    "tuned": best_when_tuned,
    "tau": tau_is_forgiving,
    "budget": budget_needs_no_tuning,
    "budget and learning rate": budget_and_learning_rate,
}
