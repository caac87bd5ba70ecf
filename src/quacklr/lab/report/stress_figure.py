"""The figure of the study `stress`."""

from __future__ import annotations

from functools import partial

from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from quacklr.lab.methods import Method
from quacklr.lab.report.style import colour, line_with_seeds, panels
from quacklr.lab.studies.limits import STRESSED, TIMES_BEST, stress_cell
from quacklr.lab.studies.measures import NotRun
from quacklr.lab.studies.names import METHOD_NAMES
from quacklr.lab.studies.results import Results, available


def stress(results: Results) -> Figure:
    """Figure 9. What does a learning rate that is too high cost each method?

    Validation loss at 1, 2, 4 and 8 times the learning rate that is best for the method, with the setting (such as
    tau) that was selected there. A dot for every seed.
    """
    figure, [row] = panels(1, 2, 4.2, 3.2)
    for axes, attention in zip(row, ("mla", "mha"), strict=True):
        for method in STRESSED:
            by_rate = available(TIMES_BEST, partial(losses, results, attention, method))
            points = {float(times): seeds for times, seeds in by_rate.items() if seeds}
            if len(points) > 1:
                line_with_seeds(axes, points, color=colour(method), marker=".", label=METHOD_NAMES[method])
        axes.set(xscale="log", xlabel="learning rate / best learning rate", title=f"{attention.upper()}, Muon")
        axes.set_xticks(TIMES_BEST, [str(times) for times in TIMES_BEST])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_visible(bool(axes.lines))
    if not any(len(axes.lines) > 1 for axes in row):
        raise NotRun("no two methods were run at several times their best learning rates")
    row[0].set_ylabel("validation loss")
    row[-1].legend()
    return figure


def losses(results: Results, attention: str, method: type[Method], times: int) -> dict[int, float]:
    """The loss by seed, at a multiple of the best learning rate."""
    best, cell = stress_cell(results, attention, method, times)
    return results.runs(cell, best.method).by_seed()
