"""A figure of a check: one column per head, with its changes and its bound on a logarithmic axis."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib import lines, rc_context, ticker
from matplotlib.figure import Figure
from torch import Tensor

from quacklr.checking.layer_report import LayerReport
from quacklr.util.figures import RC, save
from quacklr.util.layer_names import described, short

START, PLAIN, QUACK, BOUND, WRONG = "#9a9a9a", "#d55e00", "#0b6e4f", "#222222", "#e6007e"
INCHES, COLUMN = (6.4, 17.0), 0.16  # smallest and largest width of the figure; width of a head's column


def draw(layers: Sequence[LayerReport], growth: float, title: str, ok: bool, file: Path) -> None:
    """Write the figure as png, svg or pdf, according to the file name."""
    columns = sum(layer.heads for layer in layers) + len(layers)
    width = min(max(INCHES[0], 1.2 + COLUMN * columns), INCHES[1])
    with rc_context(RC):
        figure = Figure(figsize=(width, 4.2), layout="constrained")
        axes = figure.subplots()
        _fill(axes, layers, size=min(30.0, max(3.0, 2400 * width / 17 / columns)))
        axes.set_title(title, loc="left", fontsize=10, color=BOUND if ok else WRONG)
        _label_values(axes)
        _legend(axes, growth, ok)
    save(figure, file)


def _fill(axes: Any, layers: Sequence[LayerReport], size: float) -> None:
    at, ticks = 0.0, []
    for number, layer in enumerate(layers):
        _layer(axes, layer, at, size, shaded=number % 2 == 1)
        ticks.append(at + (layer.heads - 1) / 2)
        at += layer.heads + 1
    axes.set(yscale="log", xlim=(-1, at - 1), ylabel="largest |change of a logit| in one step")
    every = max(1, round(len(ticks) / 14))
    names = [layer.module for layer in layers]
    axes.set_xticks(ticks[::every], short(names)[::every])
    axes.set_xlabel(f"attention layers {described(names)}, a column for each head".replace(" ,", ","))
    axes.tick_params(axis="x", length=0)


def _layer(axes: Any, layer: LayerReport, at: float, size: float, shaded: bool) -> None:
    if shaded:
        axes.axvspan(at - 1, at + layer.heads, color="#f3f3f3", linewidth=0, zorder=0)
    x = torch.arange(layer.heads) + at
    for head in x[layer.wrong].tolist():
        axes.axvspan(head - 0.5, head + 0.5, color=WRONG, alpha=0.22, linewidth=0, zorder=1)
    if layer.unobserved:
        return
    axes.hlines(layer.quack.bound.tolist(), x - 0.42, x + 0.42, color=BOUND, linewidth=1.1, zorder=2)
    _dots(axes, x, layer.start.measured, s=2.2 * size, facecolors="none", edgecolors=START, linewidths=1.0)
    _dots(axes, x, layer.plain.measured, s=size, color=PLAIN, linewidths=0)
    _dots(axes, x, layer.quack.measured, s=size, color=QUACK, linewidths=0)


def _dots(axes: Any, x: Tensor, values: Tensor, **style: Any) -> None:
    shown = values > 0  # the axis is logarithmic
    axes.scatter(x[shown].tolist(), values[shown].tolist(), zorder=3, **style)


def _label_values(axes: Any) -> None:
    """Plain numbers on the axis: powers of ten, and 2 and 5 between them if there are few."""
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(ticker.NullFormatter())


def _legend(axes: Any, growth: float, ok: bool) -> None:
    grown = f"weights grown {growth:g}x"
    dot: dict[str, Any] = {"marker": "o", "linestyle": "", "markeredgewidth": 0, "markersize": 6}
    styles: list[dict[str, Any]] = [
        {**dot, "color": PLAIN, "label": f"{grown}, without QuacK"},
        {**dot, "color": QUACK, "label": f"{grown}, with QuacK"},
        {**dot, "color": START, "label": "at the start", "fillstyle": "none", "markeredgewidth": 1},
        {"color": BOUND, "label": "bound, with QuacK"},
        {**dot, "color": WRONG, "label": "wrong", "marker": "s", "alpha": 0.4},
    ]
    handles = [lines.Line2D([], [], **style) for style in (styles[:-1] if ok else styles)]
    narrow = axes.figure.get_size_inches()[0] < 8
    axes.figure.legend(handles=handles, loc="outside lower center", ncols=2 if narrow else len(handles), fontsize=8)
