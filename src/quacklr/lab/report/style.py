"""Elements of the figures: the colour of each method, and curves with the spread over seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from statistics import mean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from quacklr.lab.ledger import Entry
from quacklr.lab.methods import Method
from quacklr.lab.studies.measures import NotRun
from quacklr.lab.studies.names import METHOD_NAMES
from quacklr.lab.studies.results import Results

COLOURS: dict[str, str] = dict(
    zip(
        METHOD_NAMES.values(),
        (
            "#666666",
            "#e69f00",
            "#0072b2",
            "#d55e00",
            "#56b4e9",
            "#0b6e4f",
            "#7fbf3f",
            "#cc79a7",
            "#8c6d31",
            "#7b5ea7",
            "#b03a2e",
            "#17becf",
            "#000000",
        ),
        strict=True,
    )
)
"""By method; distinct for most kinds of colour blindness (after Okabe and Ito)."""
ENTRY_WIDTH = 1.8
"""Of a legend below the panels, in inches: the longest name of a method fits."""
Points = Callable[[Entry], Iterable[tuple[int, Any]]]
"""From a run to (step, value) pairs."""


def colour(method: type[Method] | Method) -> str:
    """The colour of a method."""
    return COLOURS[METHOD_NAMES[method if isinstance(method, type) else type(method)]]


def panels(rows: int, columns: int, width: float = 2.9, height: float = 2.4) -> tuple[Figure, list[list[Axes]]]:
    """A figure with a grid of axes; width and height are those of one of them, in inches."""
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    return figure, [list(row) for row in figure.subplots(rows, columns, squeeze=False)]


def curve(axes: Axes, runs: Iterable[Entry], points: Points, **line: Any) -> None:
    """Draw the mean over seeds as a line, their range as a band, and a cross where a run diverged."""
    entries = list(runs)
    values_of_run = [{step: value for step, value in points(run) if value is not None} for run in entries]
    steps = sorted(set.union(*(set(values) for values in values_of_run)))
    if not steps:  # all runs diverged before the first measurement
        return
    at_step = [[values[step] for values in values_of_run if step in values] for step in steps]
    (drawn,) = axes.plot(steps, [mean(values) for values in at_step], linewidth=1.5, **line)
    bottom, top = [min(values) for values in at_step], [max(values) for values in at_step]
    axes.fill_between(steps, bottom, top, color=drawn.get_color(), alpha=0.2, linewidth=0)
    for run, values in zip(entries, values_of_run, strict=True):
        if run.status == "diverged" and values:
            axes.plot(*max(values.items()), marker="x", color=drawn.get_color())


def method_curve(
    axes: Axes, results: Results, attention: str, method: type[Method] | Method, lr: float, points: Points, **line: Any
) -> None:
    """Draw the curve of a method at its best setting, if the ledger has its runs."""
    name = METHOD_NAMES[method if isinstance(method, type) else type(method)]
    with suppress(NotRun):
        runs = results.best(attention, method, lr).runs.values()
        curve(axes, runs, points, **{"color": COLOURS[name], "label": name} | line)


def line_with_seeds(axes: Axes, values: Mapping[float, Mapping[int, float]], **line: Any) -> None:
    """Draw a line through the mean at each x, and a dot for every seed; nothing if there are no values."""
    if not values:
        return
    (drawn,) = axes.plot(list(values), [mean(seeds.values()) for seeds in values.values()], linewidth=1.5, **line)
    for x, seeds in values.items():
        axes.scatter([x] * len(seeds), list(seeds.values()), s=9, color=drawn.get_color(), linewidths=0, alpha=0.7)


def legend_below(figure: Figure, handles: Sequence[Any]) -> None:
    """A legend below the panels, in rows that are not wider than the figure."""
    columns = int(figure.get_figwidth() / ENTRY_WIDTH)
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), columns))


def hide_empty_panels(figure: Figure) -> None:
    """Hide axes without data, which cannot be drawn if they are logarithmic."""
    for axes in figure.axes:
        axes.set_visible(axes.get_visible() and axes.has_data())


def validation(entry: Entry) -> Iterable[tuple[int, Any]]:
    """The validation loss by step, without that before training."""
    return ((step, value) for step, value in entry.curve("val_loss") if step)


def largest_logits(entry: Entry) -> list[tuple[int, float]]:
    """The largest logit of all layers and heads by step."""
    rows = ((step, [value for row in table for value in row if value]) for step, table in entry.curve("logits", "max"))
    return [(step, max(values)) for step, values in rows if values and step and max(values) > 0]
