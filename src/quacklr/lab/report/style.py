"""How figures look: a colour for each method wherever it appears, and seeds shown as spread."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from statistics import mean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from quacklr.lab.ledger import Entry
from quacklr.lab.methods import Method
from quacklr.lab.studies.names import NAMES
from quacklr.lab.studies.results import Seeds

COLOURS: dict[str, str] = dict(
    zip(
        NAMES.values(),
        ("#666666", "#e69f00", "#0072b2", "#d55e00", "#56b4e9", "#0b6e4f", "#cc79a7", "#8c6d31", "#7b5ea7"),
        strict=True,
    )
)
"""By method; distinct for most kinds of colour blindness (after Okabe and Ito)."""
Points = dict[int, float]


def colour(method: type[Method] | Method) -> str:
    """The colour of a method."""
    return COLOURS[NAMES[method if isinstance(method, type) else type(method)]]


def panels(rows: int, columns: int, width: float = 2.9, height: float = 2.4) -> tuple[Figure, list[list[Axes]]]:
    """A figure of panels."""
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    return figure, [list(row) for row in figure.subplots(rows, columns, squeeze=False)]


def curve(axes: Axes, runs: Seeds, points: Callable[[Entry], Iterable[tuple[int, Any]]], **line: Any) -> None:
    """The mean over seeds as a line, and the range of the seeds as a band; a cross where one diverged."""
    each = [{step: value for step, value in points(entry) if value is not None} for entry in runs.values()]
    steps = sorted(set.union(*(set(one) for one in each)))
    if not steps:  # all were lost before the first measurement
        return
    values = [[one[step] for one in each if step in one] for step in steps]
    (drawn,) = axes.plot(steps, [mean(at) for at in values], linewidth=1.5, **line)
    bottom, top = [min(at) for at in values], [max(at) for at in values]
    axes.fill_between(steps, bottom, top, color=drawn.get_color(), alpha=0.2, linewidth=0)
    for entry, one in zip(runs.values(), each, strict=True):
        if entry.status == "diverged" and one:
            axes.plot(*max(one.items()), marker="x", color=drawn.get_color())


def dots(axes: Axes, places: list[float], values: list[Points], **line: Any) -> None:
    """A line through the means, with a dot for every seed."""
    (drawn,) = axes.plot(places, [mean(each.values()) for each in values], linewidth=1.5, **line)
    for place, each in zip(places, values, strict=True):
        axes.scatter([place] * len(each), list(each.values()), s=9, color=drawn.get_color(), linewidths=0, alpha=0.7)


def hide_empty_panels(figure: Figure) -> None:
    """A panel without data has nothing to say, and with a logarithmic axis it cannot be drawn."""
    for axes in figure.axes:
        axes.set_visible(axes.get_visible() and axes.has_data())


def validation(entry: Entry) -> Iterable[tuple[int, Any]]:
    """The validation loss, from the first measurement after the start."""
    return ((step, value) for step, value in entry.curve("val_loss") if step)
