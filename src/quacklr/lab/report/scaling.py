"""Markdown tables of the studies `sizes` and `longer`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import mean

from quacklr.lab.methods import Budget, Default, Method, QKNorm, Quack
from quacklr.lab.report.markdown import table
from quacklr.lab.studies.cell import Cell
from quacklr.lab.studies.comparison import difference
from quacklr.lab.studies.conditions import longer
from quacklr.lab.studies.measures import largest_logit
from quacklr.lab.studies.names import METHOD_NAMES
from quacklr.lab.studies.results import MethodRuns, Results, available
from quacklr.lab.studies.sizes import WIDTHS, above_critical, bracket, critical_rate, runs_above
from quacklr.lab.studies.verdicts import geometric_mean, mean_and_sd

COMPARED = (Default, Budget, QKNorm)


def scaling(results: Results) -> str:
    """Both tables. A size or a length that was not run is left out."""
    return f"## Size of the model\n\n{sizes(results)}\n## Longer runs\n\n{lengths(results)}"


def sizes(results: Results) -> str:
    """For each size the critical learning rate of the default, and the methods at about ten times this rate."""
    others = [f"{METHOD_NAMES[method]} - QuacK" for method in COMPARED]
    head = ("", "critical lr", "lr", "lr / critical lr of seed 0", "QuacK", "largest logit of QuacK", *others)
    return table(head, available(WIDTHS, partial(size_row, results)).values())


def size_row(results: Results, size: str) -> list[str]:
    """The row of a size. The critical learning rate is the geometric mean over the judging seeds;
    `lr` was computed from that of seed 0."""
    cell, quack = above_critical(results, size), runs_above(results, Quack, size)
    rates = critical_rate(results, size).by_seed().values()
    critical = f"{10 ** mean(rates):.2g} (n {len(rates)})" if rates else ""
    gaps = available(COMPARED, lambda method: gap(runs_above(results, method, size), quack))
    return [
        size,
        critical,
        f"{cell.lr:g}",
        f"{cell.lr / 10 ** bracket(results, size).critical:.1f}",
        mean_and_sd(quack),
        geometric_mean(quack, largest_logit),
        *(gaps.get(method, "") for method in COMPARED),
    ]


def lengths(results: Results) -> str:
    """The methods in MLA at the highest learning rate, with the study's number of steps and with ten times as many."""
    short = results.scale.cell("mla", results.scale.high)
    cells = {f"{cell.base.training.steps:,} steps": cell for cell in (short, longer(short))}
    head = ["", *(text for steps in cells for text in (steps, "largest logit", "method - QuacK"))]
    rows = (length_row(results, list(cells.values()), method) for method in (Quack, *COMPARED))
    return table(head, filter(None, rows))


def length_row(results: Results, cells: Sequence[Cell], method: type[Method]) -> list[str]:
    """The row of a method: its loss, its largest logit, and its loss minus that of QuacK; empty if it was not run."""
    runs = available(cells, lambda cell: results.runs(cell, method()))
    quack = available(runs, lambda cell: results.runs(cell, Quack()))
    row = [METHOD_NAMES[method]] if runs else []
    for cell in cells if runs else ():
        row += [mean_and_sd(runs[cell]), geometric_mean(runs[cell], largest_logit)] if cell in runs else ["", ""]
        row += [gap(runs[cell], quack[cell]) if cell in quack else ""]
    return row


def gap(runs: MethodRuns, quack: MethodRuns) -> str:
    """The difference of the mean losses over the seeds that both have; empty for QuacK itself."""
    if runs.method == quack.method:
        return ""
    found = difference(runs, quack)
    return f"{found.mean:+.3f} (n {found.seeds})"
