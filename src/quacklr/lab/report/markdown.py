"""Markdown tables: the claims with their evidence, and the results of each method."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import mean

from quacklr.lab.methods import Budget, QKNorm, SigmaReparametrised
from quacklr.lab.studies.budget_table import PAPER, by_model, methods_in
from quacklr.lab.studies.cell import Cell
from quacklr.lab.studies.comparison import SAME
from quacklr.lab.studies.measures import largest_logit, lr_sensitivity
from quacklr.lab.studies.names import settings_of
from quacklr.lab.studies.results import Results, available
from quacklr.lab.studies.tuned_methods import (
    EVERYWHERE,
    ISOTROPIC,
    TUNED,
    WITH_CLIP,
    WITH_QK_NORM,
    WITH_SIGMA,
    TunedMethod,
    fixed,
)
from quacklr.lab.studies.verdicts import ClaimResult, geometric_mean, mean_and_sd

VARIANTS = (fixed(SigmaReparametrised("qk")), ISOTROPIC, EVERYWHERE, WITH_QK_NORM, WITH_SIGMA, WITH_CLIP)
"""Methods of the study that are variants or combinations of others."""
HEADINGS = {"paper": "The paper's claims", "own": "Questions of our own"}


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |\n" for line in lines)


def claims(results: Sequence[ClaimResult]) -> str:
    """Every claim with its verdict, in two tables."""
    parts = []
    for source, heading in HEADINGS.items():
        rows = [(each.name, each.claim, f"**{each.verdict}**") for each in results if each.source == source]
        if rows:
            parts.append(f"## {heading}\n\n{table(('', 'claim', 'verdict'), rows)}")
    return "\n".join(parts)


def evidence(results: Sequence[ClaimResult]) -> str:
    """The summary of each claim, and the comparisons that decide it."""
    parts = []
    for each in results:
        lines = "".join(f"- {comparison}\n" for comparison in each.evidence)
        text = f"### {each.name}: {each.verdict}\n\n{each.claim}\n\nFound: {each.summary}.\n"
        parts.append(text + (f"\n{lines}" if lines else ""))
    return "\n".join(parts)


def methods(results: Results) -> str:
    """For each kind of attention a table of methods at their best settings, with a column for each learning rate."""
    rates, high = results.scale.rates, f"lr {results.scale.high:g}"
    head = (
        "method",
        *(f"lr {lr:g}" for lr in rates),
        f"largest logit at {high}",
        "lr sensitivity",
        f"setting at {high}",
    )
    parts = []
    for attention in results.scale.attentions:
        rows = [method_row(results, attention, method) for method in (*TUNED.values(), *VARIANTS)]
        parts.append(f"## {attention.upper()}, validation loss\n\n{table(head, filter(None, rows))}")
    return "\n".join(parts)


def method_row(results: Results, attention: str, method: TunedMethod) -> list[str]:
    """The row of a method in `methods`; empty if it was not run."""
    rates, high = results.scale.rates, results.scale.high
    losses = available(rates, lambda lr: mean_and_sd(results.best(attention, method, lr)))
    logit = available([high], lambda lr: geometric_mean(results.best(attention, method, lr), largest_logit))
    sensitivity = available([high], lambda _: f"{mean(results.lr_sensitivity(attention, method).values()):.3f}")
    setting = available([high], lambda lr: settings_of(results.best(attention, method, lr).method))
    cells = [losses.get(lr, "") for lr in rates] + [each.get(high, "") for each in (logit, sensitivity, setting)]
    return [method.name, *cells] if losses else []


def budget(results: Results) -> str:
    """One budget beside methods that are tuned: a table for each kind of attention and optimizer."""
    parts = list[str]()
    for model, cells in by_model(results.scale).items():
        head = ("method", *(f"lr {cell.lr:g}" for cell in cells), "lr sensitivity", "tau", "seeds")
        rows = [budget_row(results, method, cells) for method in methods_in(cells[0])]
        parts.append(f"## {model}\n\n{table(head, filter(None, rows))}")
    return f"## In short\n\n{budget_summary(results)}\n" + "\n".join(parts)


def budget_summary(results: Results) -> str:
    """For each cell: the budget, the best method that leaves the model as it is, and QK norm, which changes it."""
    cells = [cell for of_model in by_model(results.scale).values() for cell in of_model]
    head = ("", f"budget {Budget().budget:g}", "best tuned method", "budget - best", "QK norm")
    rows = {cell: row for cell in cells if (row := budget_summary_row(results, cell))}
    counts = []
    for latent_norm, name in ((False, "without latent norms"), (True, "with latent norms")):
        gaps = [float(row[3]) for cell, row in rows.items() if cell.latent_norm == latent_norm and row[3]]
        counts += [f"{sum(gap <= SAME for gap in gaps)} of {len(gaps)} cells {name}"] if gaps else []
    found = (
        f"\nThe budget is at most {SAME:g} above the best tuned method in {' and '.join(counts)}.\n" if counts else ""
    )
    return table(head, rows.values()) + found


def budget_summary_row(results: Results, cell: Cell) -> list[str]:
    """The row of a cell in `budget_summary`; empty if methods are missing. The difference is over common seeds."""
    runs = available(methods_in(cell), lambda method: results.runs(cell, method))
    tuned = [each for method, each in runs.items() if method in PAPER and method is not TUNED[QKNorm]]
    one, norm = runs.get(TUNED[Budget]), runs.get(TUNED[QKNorm])
    if not tuned or one is None or norm is None:
        return []
    best = min(tuned, key=lambda each: each.mean())
    losses, others = one.by_seed(), best.by_seed()
    shared = losses.keys() & others.keys()
    gap = f"{mean(losses[seed] - others[seed] for seed in shared):+.3f}" if shared else ""
    return [str(cell), mean_and_sd(one), f"{best.tuned.name} {mean_and_sd(best)}", gap, mean_and_sd(norm)]


def budget_row(results: Results, method: TunedMethod, cells: Sequence[Cell]) -> list[str]:
    """The row of a method in `budget`; empty if it was not run."""
    runs = available(cells, lambda cell: results.runs(cell, method))
    if not runs:
        return []
    losses = [mean_and_sd(runs[cell]) if cell in runs else "" for cell in cells]
    sensitivity = available([method], lambda _: mean(lr_sensitivity(each.by_seed() for each in runs.values()).values()))
    taus = [f"{each.value:g}" for each in runs.values() if each.value is not None]
    seeds = {len(each.runs) for each in runs.values()}
    return [
        method.name,
        *losses,
        f"{sensitivity[method]:.3f}" if sensitivity and len(runs) == len(cells) else "",
        ", ".join(taus),
        " to ".join(str(n) for n in sorted({min(seeds), max(seeds)})),
    ]
