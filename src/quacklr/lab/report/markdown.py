"""Markdown tables: the claims with their evidence, and the results of each method."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import mean

from quacklr.lab.methods import Method
from quacklr.lab.studies.budget_table import BUDGET, COLUMNS, PAPER, BudgetTable, Cell
from quacklr.lab.studies.names import METHOD_NAMES
from quacklr.lab.studies.results import Results, available, by_seed, largest_logit, loss, settings_text
from quacklr.lab.studies.verdicts import ClaimResult, geometric_mean, mean_and_sd

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
        rows = [method_row(results, attention, method) for method in METHOD_NAMES]
        parts.append(f"## {attention.upper()}, validation loss\n\n{table(head, filter(None, rows))}")
    return "\n".join(parts)


def method_row(results: Results, attention: str, method: type[Method]) -> list[str]:
    """The row of a method in `methods`; empty if it was not run."""
    rates, high = results.scale.rates, results.scale.high
    losses = available(rates, lambda lr: mean_and_sd(results.best(attention, method, lr)))
    logit = available([high], lambda lr: geometric_mean(results.best(attention, method, lr), largest_logit))
    sensitivity = available([high], lambda _: f"{mean(results.lr_sensitivity(attention, method).values()):.3f}")
    setting = available([high], lambda lr: settings_text(results.best(attention, method, lr)))
    cells = [losses.get(lr, "") for lr in rates] + [each.get(high, "") for each in (logit, sensitivity, setting)]
    return [METHOD_NAMES[method], *cells] if losses else []


def budget(results: Results) -> str:
    """One budget beside methods that are tuned: a table for each kind of attention and optimizer."""
    budget_table, parts = BudgetTable.of(results), list[str]()
    for title, cells in budget_table.by_model().items():
        head = ("method", *(f"lr {cell.lr:g}" for cell in cells), "lr sensitivity", "tau", "seeds")
        rows = [budget_row(budget_table, name, cells) for name in budget_table.columns(cells[0])]
        parts.append(f"## {title}\n\n{table(head, filter(None, rows))}")
    return f"## In short\n\n{budget_summary(budget_table)}\n" + "\n".join(parts)


def budget_summary(budget_table: BudgetTable) -> str:
    """For each cell: the budget, the best method that leaves the model as it is, and QK norm, which changes it."""
    cells = [cell for of_model in budget_table.by_model().values() for cell in of_model]
    head = ("", f"budget {BUDGET:g}", "best tuned method", "budget - best", "QK norm")
    return table(head, filter(None, (budget_summary_row(budget_table, cell) for cell in cells)))


def budget_summary_row(budget_table: BudgetTable, cell: Cell) -> list[str]:
    """The row of a cell in `budget_summary`; empty if methods are missing."""
    runs = available(budget_table.columns(cell), lambda name: budget_table.runs(cell, name))
    losses = {name: by_seed(each, loss) for name, each in runs.items()}
    tuned = [name for name in losses if name in PAPER and name != "QK norm"]
    if not tuned or not {"budget", "QK norm"} <= losses.keys():
        return []
    best = min(tuned, key=lambda name: mean(losses[name].values()))
    shared = losses["budget"].keys() & losses[best].keys()
    gap = f"{mean(losses['budget'][seed] - losses[best][seed] for seed in shared):+.3f}" if shared else ""
    return [
        str(cell),
        mean_and_sd(runs["budget"]),
        f"{best} {mean_and_sd(runs[best])}",
        gap,
        mean_and_sd(runs["QK norm"]),
    ]


def budget_row(budget_table: BudgetTable, name: str, cells: Sequence[Cell]) -> list[str]:
    """The row of a method in `budget`; empty if it was not run."""
    runs = available(cells, lambda cell: budget_table.runs(cell, name))
    if not runs:
        return []
    losses = [mean_and_sd(runs[cell]) if cell in runs else "" for cell in cells]
    sensitivity = available([name], lambda name: f"{mean(budget_table.lr_sensitivity(cells, name).values()):.3f}")
    tuned = COLUMNS[name].first is not None
    taus = [f"{budget_table.value(cell, name):g}" for cell in runs] if tuned else []
    seeds = sorted({len(each) for each in runs.values()})
    return [name, *losses, sensitivity.get(name, ""), ", ".join(taus), " to ".join(str(n) for n in seeds)]
