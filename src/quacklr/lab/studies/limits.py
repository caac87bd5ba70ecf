"""Is a limit of 0.02 nats for all runs harmless, enough at high rates, and the same for all sizes and lengths?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from quacklr.lab.methods import Default, Limit, Method, QKClipping, QKNorm, Quack
from quacklr.lab.optim import MuonRecipe
from quacklr.lab.studies.cell import Cell
from quacklr.lab.studies.comparison import SAME, below, compare, difference, less, more
from quacklr.lab.studies.conditions import longer
from quacklr.lab.studies.measures import largest_logit
from quacklr.lab.studies.results import AnyMethod, MethodRuns, Results
from quacklr.lab.studies.scale import ADAMW_RELATIVE_RATE, StudyScale
from quacklr.lab.studies.sizes import JUDGED, WIDTHS, above_critical
from quacklr.lab.studies.tuned_methods import TUNED_LIMIT
from quacklr.lab.studies.verdicts import Answer, Claim, answer, geometric_mean, logit_above_stable, mean_and_sd

CellAndMethod = tuple[Cell, AnyMethod]
MUON_RATES = (0.1, 0.01, 0.001, 0.03, 0.003, 0.02)
ADAMW_RATES = (0.03, 0.003, 0.0003, 0.001)
MODELS = (("mha", False), ("mla", False), ("mla", True))
TIMES_BEST = (1, 2, 4, 8)
STRESSED: tuple[type[Method], ...] = (Default, Limit, Quack, QKNorm, QKClipping)
below_same = partial(below, limit=SAME)


def grid(scale: StudyScale) -> list[Cell]:
    """The cells of the claim that a limit does not hurt."""
    rates = [(lr, False) for lr in MUON_RATES] + [(lr / ADAMW_RELATIVE_RATE, True) for lr in ADAMW_RATES]
    return [
        scale.cell(attention, lr, adamw=adamw, latent_norm=norms) for lr, adamw in rates for attention, norms in MODELS
    ]


def harmless(scale: StudyScale) -> Iterator[CellAndMethod]:
    """Does a limit of 0.02 nats cost anything where the default is stable, and is it enough where that is not?

    Scientific: the method, the attention, the optimizer, the learning rate. Fixed: the limit, model, data, steps.
    """
    for cell in grid(scale):
        for method in (Limit, Default):
            yield cell, method


def by_ratio(scale: StudyScale, attention: str, lr: float) -> Cell:
    """Muon whose updates are scaled by sqrt(rows / columns)."""
    cell = scale.cell(attention, lr)
    assert isinstance(cell.base.optimizer, MuonRecipe)
    return cell.changed("scale sqrt(rows / columns)", optimizer=replace(cell.base.optimizer, scale="ratio"))


def muon_scale(scale: StudyScale) -> Iterator[CellAndMethod]:
    """Does the scale sqrt(rows / columns) of Muon's updates keep the logits of the default bounded?

    Scientific: the attention, the learning rate. Fixed: everything else.
    """
    for attention in scale.attentions:
        for lr in dict.fromkeys((scale.high, 0.03)):
            yield by_ratio(scale, attention, lr), Default
    for attention in scale.attentions:
        yield by_ratio(scale, attention, scale.high), Limit


def stress_cell(results: Results, attention: str, method: AnyMethod, times: int) -> tuple[MethodRuns, Cell]:
    """A method at its best learning rate, without its runs, and the cell at `times` that rate."""
    best = results.planned_best(attention, method)
    return best, results.scale.cell(attention, float(f"{times * best.cell.lr:.6g}"))


def stress(results: Results, attention: str) -> Iterator[CellAndMethod]:
    """What does a learning rate that is 2, 4 or 8 times too high cost each method?

    Scientific: the method, the learning rate. Fixed: the setting that was selected at the method's best rate.
    """
    for times in reversed(TIMES_BEST):
        for method in STRESSED:
            best, cell = stress_cell(results, attention, method, times)
            yield cell, best.method


TRANSFERS = ("longer", *WIDTHS)


def transfers(results: Results, where: str) -> Iterator[CellAndMethod]:
    """Is 0.02 nats the right limit for models of other sizes, and for longer runs?

    Scientific: the limit, the size, the number of steps. Fixed: MHA at ten times the critical rate of its size; the
    longer runs are MLA at the highest rate.
    """
    cell = transfer_cell(results, where)
    for method in (Limit, TUNED_LIMIT):
        yield cell, method


def transfer_cell(results: Results, where: str) -> Cell:
    """The cell of a size; `longer` is MLA with ten times as many steps."""
    if where == "longer":
        return longer(results.scale.cell("mla", results.scale.high))
    return above_critical(results, where)


def never_worse(results: Results) -> Answer:
    """In every cell of the grid, a limit of 0.02 nats ends at most 0.02 above the default."""
    pairs = [(results.runs(cell, Limit), results.runs(cell, Default)) for cell in grid(results.scale)]
    compared = [difference(*pair) for pair in pairs]
    worse = [f"{each.mean:+.3f} in {pair[0].cell}" for each, pair in zip(compared, pairs, strict=True) if each.mean > 0]
    which = f": {', '.join(worse)}" if worse else ""
    text = f"the mean is above that of the default in {len(worse)} of {len(pairs)} cells{which}"
    return answer(text, *((below_same, each) for each in compared))


def as_good_as_tuned(results: Results) -> Answer:
    """At the highest learning rates a limit of 0.02 nats ends at most 0.02 above QuacK with the best tau, in MHA and in
    MLA, with Muon and with AdamW."""
    lr = results.scale.high
    cells = [results.scale.cell(attention, lr, adamw=adamw) for attention in ("mha", "mla") for adamw in (False, True)]
    pairs = [(results.runs(cell, Limit), results.runs(cell, Quack)) for cell in cells]
    texts = [f"{one.cell}: {one} {mean_and_sd(one)}, {other} {mean_and_sd(other)}" for one, other in pairs]
    return answer("; ".join(texts), *((below_same, difference(*pair)) for pair in pairs))


def right_everywhere(results: Results) -> Answer:
    """A limit of 0.02 nats ends at most 0.02 above the best of 0.005, 0.01, 0.02, 0.05 and 0.1, at 0.3M, 1M and 4M
    parameters, and in runs of 3,000 steps."""
    tested, texts = [], []
    for where in ("longer", *JUDGED):
        cell = transfer_cell(results, where)
        one, best = results.runs(cell, Limit), results.runs(cell, TUNED_LIMIT)
        texts.append(f"{cell}: 0.02 {mean_and_sd(one)}, selected {best.value:g} {mean_and_sd(best)}")
        tested.append((below_same, difference(one, best)))
    return answer("; ".join(texts), *tested)


def forgives_a_high_rate(results: Results) -> Answer:
    """At 8 times its best learning rate, a limit of 0.02 nats adds less loss than the default, QK clip, and QuacK with
    the tau that is best at the best learning rate, in MLA."""
    added, runs = {}, {}
    for method in STRESSED:
        best, cell = stress_cell(results, "mla", method, TIMES_BEST[-1])
        low, high = results.runs(best.cell, best.method), results.runs(cell, best.method)
        losses = low.by_seed()
        added[method] = {seed: loss - losses[seed] for seed, loss in high.by_seed().items() if seed in losses}
        runs[method] = (low, high)
    tested = []
    for other in (Default, QKClipping, Quack):
        label = f"MLA, Muon: limit - {runs[other][1]}, loss added by 8 times the best rate"
        tested.append((less, compare(label, added[Limit], added[other], *runs[Limit], *runs[other], same_within=SAME)))
    text = ", ".join(f"{high} {mean_and_sd(high)} after {mean_and_sd(low)}" for low, high in runs.values())
    return answer(f"MLA at 8 times the best rate: {text}", *tested)


def ratio_is_not_enough(results: Results) -> Answer:
    """With Muon's updates scaled by sqrt(rows / columns), the largest logit of the default is above 100 at the highest
    learning rate, in MHA and in MLA."""
    cells = [by_ratio(results.scale, attention, results.scale.high) for attention in ("mha", "mla")]
    runs = [results.runs(cell, Default) for cell in cells]
    texts = [f"{each.cell}: {geometric_mean(each, largest_logit)}, loss {mean_and_sd(each)}" for each in runs]
    return answer("; ".join(texts), *((more, logit_above_stable(each)) for each in runs))


LIMIT_CLAIMS: dict[str, Claim] = {
    "limit: harmless": never_worse,
    "limit: enough": as_good_as_tuned,
    "limit: transfers": right_everywhere,
    "limit: stress": forgives_a_high_rate,
    "Muon's scale": ratio_is_not_enough,
}
