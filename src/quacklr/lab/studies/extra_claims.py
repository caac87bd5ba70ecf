"""Claims that the paper does not make: one function each, with the claim as its docstring."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from statistics import mean

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
from quacklr.lab.optim import AdamWRecipe
from quacklr.lab.studies.budget_table import PAPER, BudgetTable
from quacklr.lab.studies.claims import BOTH, best_in_mla, compare_rates
from quacklr.lab.studies.names import METHOD_NAMES
from quacklr.lab.studies.questions import ADAMW_RATE
from quacklr.lab.studies.results import NotRun, Results, by_seed, compare, loss
from quacklr.lab.studies.verdicts import (
    MARGIN,
    Answer,
    Claim,
    answer,
    below,
    difference,
    less,
    mean_and_sd,
    method_label,
    more,
    place,
)

below_margin = partial(below, limit=MARGIN)
TUNING_MARGIN = 0.02
"""Nats of validation loss that tuning may be worth where a claim says that it is not needed."""


def no_need_for_quack(sentence: str, rival: type[Method] | Method, attentions: Sequence[str] = BOTH) -> Claim:
    """The claim that the loss of a rival is at most MARGIN above that of QuacK at the highest rate."""

    def claim(results: Results) -> Answer:
        lr, tested, texts = results.scale.high, [], []
        for attention in attentions:
            other, quack = results.best(attention, rival, lr), results.best(attention, Quack, lr)
            tested.append((below_margin, difference(place(attention, lr), other, quack)))
            means = ", ".join(f"{method_label(runs)} {mean_and_sd(runs)}" for runs in (other, quack))
            texts.append(f"{attention.upper()} {means}")
        return answer(f"at lr {lr:g}: {'; '.join(texts)}", *tested)

    claim.__doc__ = sentence
    return claim


def latent_cut(results: Results) -> Answer:
    """Where latents have norms, cutting the paths there beats Algorithm 2 taken literally."""
    lr = results.scale.high
    methods: dict[str, Method] = {"cut": Quack(), "literal": Quack(literal=True), "default": Default()}
    runs = {name: results.best("mla", method, lr, latent_norm=True) for name, method in methods.items()}
    better = difference(f"MLA with latent norms, lr {lr:g}", runs["cut"], runs["literal"])
    text = ", ".join(f"{name} {mean_and_sd(each)}" for name, each in runs.items())
    return answer(f"MLA with latent norms at lr {lr:g}: {text}", (less, better))


def with_adamw(results: Results) -> Answer:
    """With AdamW instead of Muon, QuacK beats the default and a constant tau too."""
    runs = {
        method: results.best("mha", method, ADAMW_RATE, optimizer=AdamWRecipe)
        for method in (Default, QKNorm, ConstantTau, Quack)
    }
    where = f"MHA, AdamW lr {ADAMW_RATE:g}"
    tested = [(less, difference(where, runs[Quack], runs[each])) for each in (Default, ConstantTau)]
    text = ", ".join(f"{method_label(each)} {mean_and_sd(each)}" for each in runs.values())
    return answer(f"MHA with AdamW at lr {ADAMW_RATE:g}: {text}", *tested)


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
    lr = results.scale.high
    costs = {method: _cost_of_wrong_tau(results, method, lr) for method in (ConstantTau, Quack)}
    gap = compare(f"MHA, lr {lr:g}: constant tau - QuacK, worst loss of a threefold error", *costs.values())
    text = ", ".join(f"{METHOD_NAMES[method]} {mean(each.values()):.3f}" for method, each in costs.items())
    return answer(f"MHA at lr {lr:g}, loss added by the worse of a third and three times tau: {text}", (more, gap))


def _cost_of_wrong_tau(results: Results, method: type[ConstantTau | Quack], lr: float) -> dict[int, float]:
    """By seed: the increase of the loss at the worse neighbour of the best tau."""
    losses = {
        setting.tau: by_seed(runs, loss)
        for (setting, _), runs in results.runs("mha", method, lr).items()
        if isinstance(setting, ConstantTau | Quack)
    }
    taus, name = sorted(losses), METHOD_NAMES[method]
    if len(taus) < 3:
        raise NotRun(f"{name} was run with {len(taus)} values of tau, and an error on both sides needs three")
    best = min(range(1, len(taus) - 1), key=lambda index: mean(losses[taus[index]].values()))
    near = taus[best - 1 : best + 2]
    if max(larger / smaller for smaller, larger in pairwise(near)) > 4:
        raise NotRun(f"{name} was not run with a third and three times its best tau, {taus[best]:g}")
    below_it, at_it, above_it = (losses[tau] for tau in near)
    seeds = below_it.keys() & at_it.keys() & above_it.keys()
    return {seed: max(below_it[seed], above_it[seed]) - at_it[seed] for seed in seeds}


def budget_needs_no_tuning(results: Results) -> Answer:
    """One budget is enough: in every cell its loss is at most 0.02 above that of the paper's best method there."""
    table, tested, behind = BudgetTable.of(results), [], []
    for cell in table.cells:
        runs = {name: table.runs(cell, name) for name in PAPER if name in table.columns(cell)}
        best = min(runs.values(), key=lambda each: mean(by_seed(each, loss).values()))
        compared = difference(str(cell), table.runs(cell, "budget"), best)
        tested.append((partial(below, limit=TUNING_MARGIN), compared))
        behind += [f"{compared.mean:+.3f} in {cell}"] if compared.mean > TUNING_MARGIN else []
    counts = f"the mean is within {TUNING_MARGIN:g} in {len(tested) - len(behind)} of {len(tested)} cells"
    return answer(f"{counts}; others: {', '.join(behind)}" if behind else counts, *tested)


def budget_and_learning_rate(results: Results) -> Answer:
    """With one budget the loss depends less on the learning rate than with QK norm."""
    table, tested, texts = BudgetTable.of(results), [], []
    for model, cells in table.by_model().items():
        one, other = (table.lr_sensitivity(cells, name) for name in ("budget", "QK norm"))
        tested.append((less, compare(f"{model}: budget - QK norm, lr sensitivity", one, other)))
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
}
