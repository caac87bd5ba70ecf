"""The picture at the top of README: what happens without QuacK and with it. It is made to be read on a phone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from quacklr.lab.methods import Default, Method, Quack
from quacklr.lab.report.style import Points, curve, largest_logits, panels, validation
from quacklr.lab.studies.measures import NotRun, largest_logit
from quacklr.lab.studies.names import METHOD_NAMES
from quacklr.lab.studies.results import MethodRuns, Results
from quacklr.lab.studies.verdicts import geometric_mean

METHODS: dict[type[Method], tuple[str, int]] = {Default: ("#d55e00", -20), Quack: ("#0b6e4f", 22)}
"""The colour of each line, and how far above its end its label is, in points."""
SIZE = 15
"""Of all text, in points. It is 10 pixels high when the figure is 360 pixels wide."""


def hero(results: Results) -> Figure:
    """What QuacK does.

    The largest attention logit of all heads, and the validation loss, in MLA at the highest learning rate, which is too
    high for the default. The numbers are those at the end.
    """
    figure, [[left, right]] = panels(1, 2, 3.75, 3.6)
    runs = {method: results.best("mla", method, results.scale.high) for method in METHODS}
    for axes, title, points, final in (
        (left, "largest attention logit", largest_logits, lambda each: geometric_mean(each, largest_logit)),
        (right, "validation loss", validation, lambda each: f"{each.mean():.3f}"),
    ):
        _panel(axes, runs, points, final)
        axes.set_title(title, fontsize=SIZE + 1, fontweight="bold", loc="left")
        axes.set_xlabel("step", fontsize=SIZE)
        axes.tick_params(labelsize=SIZE)
    left.set_yscale("log")
    right.locator_params(axis="y", nbins=4)
    return figure


def _panel(
    axes: Axes, runs: dict[type[Method], MethodRuns], points: Points, final: Callable[[MethodRuns], str]
) -> None:
    """The curve of each method; at its end, the name of the method and its final number."""
    for method, each in runs.items():
        (colour, above), before = METHODS[method], len(axes.lines)
        curve(axes, each.runs.values(), points, color=colour)
        drawn: list[Any] = axes.lines[before:]
        if not drawn:
            raise NotRun(f"no run of {each} was measured")
        for line in drawn:
            line.set_linewidth(3)
        axes.annotate(
            f"{METHOD_NAMES[method]}\n{final(each)}",
            drawn[0].get_xydata()[-1],
            xytext=(0, above),
            textcoords="offset points",
            ha="right",
            va="bottom" if above > 0 else "top",
            fontsize=SIZE,
            fontweight="bold",
            color=colour,
        )
