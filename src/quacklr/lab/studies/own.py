"""Questions that the paper does not ask, as claims of the same form: one function each, its sentence the docstring."""

from __future__ import annotations

from collections.abc import Sequence

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
from quacklr.lab.studies.claims import BOTH
from quacklr.lab.studies.names import NAMES
from quacklr.lab.studies.questions import ADAMW_RATE
from quacklr.lab.studies.results import NotRun, Results, compare, loss, measured
from quacklr.lab.studies.verdicts import MARGIN, Answer, Claim, all_of, below, differ, less, level, levels, more, title


def _no_worse(results: Results, rival: type[Method] | Method, attentions: Sequence[str] = BOTH) -> Answer:
    """Whether a rival ends at most a margin above QuacK at the highest rate, in MHA and in MLA."""
    lr, evidence, texts = results.scale.high, [], []
    for attention in attentions:
        other, quack = results.best(attention, rival, lr), results.best(attention, Quack, lr)
        evidence.append(differ(f"{attention.upper()}, lr {lr:g}", other, quack))
        texts.append(f"{attention.upper()} {title(other)} {level(other)}, {title(quack)} {level(quack)}")
    return Answer(all_of(below(each, MARGIN) for each in evidence), f"at lr {lr:g}: {'; '.join(texts)}", evidence)


def split(results: Results) -> Answer:
    """Per-head Muon removes the need for QuacK (as GLM-5 reports)."""
    return _no_worse(results, MuonSplit)


def soft_cap(results: Results) -> Answer:
    """Soft-capping removes the need for QuacK."""
    return _no_worse(results, SoftCap)


def sigma(results: Results) -> Answer:
    """Sigma-Reparam of all linear layers removes the need for QuacK."""
    return _no_worse(results, SigmaReparametrised("all"))


def sigma_of_logits(results: Results) -> Answer:
    """Sigma-Reparam of the query and key weights alone removes the need for QuacK."""
    return _no_worse(results, SigmaReparametrised("qk"))


def absorbed_norm(results: Results) -> Answer:
    """The QK norm that keeps latent decoding removes the need for QuacK in MLA."""
    return _no_worse(results, AbsorbedQKNorm, ["mla"])


def latent_cut(results: Results) -> Answer:
    """Where latents have norms, cutting the paths there beats Algorithm 2 taken literally."""
    lr = results.scale.high
    cut, literal, default = (
        results.best("mla", method, lr, latent_norm=True) for method in (Quack(), Quack(literal=True), Default())
    )
    better = differ(f"MLA with latent norms, lr {lr:g}", cut, literal)
    text = f"MLA with latent norms at lr {lr:g}: cut {level(cut)}, literal {level(literal)}, default {level(default)}"
    return Answer(less(better), text, [better])


def with_adamw(results: Results) -> Answer:
    """With AdamW instead of Muon, QuacK beats the default and a constant tau too."""
    runs = {
        method: results.best("mha", method, ADAMW_RATE, optimizer=AdamWRecipe)
        for method in (Default, QKNorm, ConstantTau, Quack)
    }
    evidence = [differ(f"MHA, AdamW lr {ADAMW_RATE:g}", runs[Quack], runs[each]) for each in (Default, ConstantTau)]
    text = ", ".join(f"{title(each)} {level(each)}" for each in runs.values())
    return Answer(all_of(less(each) for each in evidence), f"MHA with AdamW at lr {ADAMW_RATE:g}: {text}", evidence)


def highest_is_best(results: Results) -> Answer:
    """The highest learning rate is the best one for the methods that are stable there."""
    *_, middle, high = results.scale.rates
    evidence, texts = [], []
    for attention in BOTH:
        for method in (QKNorm, Quack):
            top, below_it = results.best(attention, method, high), results.best(attention, method, middle)
            evidence.append(differ(f"{attention.upper()}, lr {high:g} - lr {middle:g}", top, below_it))
            texts.append(
                f"{attention.upper()} {NAMES[method]} {level(top)} at {high:g}, {level(below_it)} at {middle:g}"
            )
    return Answer(all_of(less(each) for each in evidence), "; ".join(texts), evidence)


def best_when_tuned(results: Results) -> Answer:
    """When every method may choose its learning rate too, QuacK is the best for MLA of all that decode from latents."""
    quack = results.best("mla", Quack)
    others = (Default, AbsorbedQKNorm, QKClipping, ConstantTau, MuonSplit, SoftCap, SigmaReparametrised)
    evidence = [differ("MLA, each at its best lr", quack, results.best("mla", other)) for other in others]
    return Answer(
        all_of(less(each) for each in evidence), levels(results, "mla", (Quack, *others, QKNorm), None), evidence
    )


def tau_is_forgiving(results: Results) -> Answer:
    """QuacK needs its tau less well known than a constant tau: a threefold error on either side costs less."""
    lr = results.scale.high
    costs = {method: _cost_of_a_wrong_tau(results, method, lr) for method in (ConstantTau, Quack)}
    gap = compare(f"MHA, lr {lr:g}: constant tau - QuacK, worst loss of a threefold error", *costs.values())
    text = ", ".join(f"{NAMES[method]} {sum(each.values()) / len(each):.3f}" for method, each in costs.items())
    return Answer(more(gap), f"MHA at lr {lr:g}, loss added by the worse of a third and three times tau: {text}", [gap])


def _cost_of_a_wrong_tau(results: Results, method: type[ConstantTau | Quack], lr: float) -> dict[int, float]:
    """By seed: how much worse the worse neighbour of the best tau is."""
    by_tau = {
        setting.tau: measured(runs, loss)
        for (setting, _), runs in results.runs("mha", method, lr).items()
        if isinstance(setting, ConstantTau | Quack)
    }
    taus = sorted(by_tau)
    if len(taus) < 3:
        raise NotRun(f"{NAMES[method]} was run with {len(taus)} values of tau, and an error on both sides needs three")
    best = min(taus[1:-1], key=lambda tau: sum(by_tau[tau].values()) / len(by_tau[tau]))
    beside = (taus[taus.index(best) - 1], taus[taus.index(best) + 1])
    if max(best / beside[0], beside[1] / best) > 4:
        raise NotRun(f"{NAMES[method]} was not run with a third and three times its best tau, {best:g}")
    seeds = set.intersection(*(set(by_tau[tau]) for tau in (best, *beside)))
    return {seed: max(by_tau[tau][seed] for tau in beside) - by_tau[best][seed] for seed in seeds}


OWN: dict[str, Claim] = {
    "per-head Muon": split,
    "soft-capping": soft_cap,
    "sigma-Reparam": sigma,
    "sigma-Reparam of q and k": sigma_of_logits,
    "absorbed QK norm": absorbed_norm,
    "latent norms": latent_cut,
    "AdamW": with_adamw,
    "highest rate": highest_is_best,
    "tuned": best_when_tuned,
    "tau": tau_is_forgiving,
}
