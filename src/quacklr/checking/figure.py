"""A proof as a picture: every head a column, its changes and its bound on a logarithmic axis."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from matplotlib import lines, rc_context, ticker
from matplotlib.figure import Figure
from torch import Tensor

from quacklr.checking.report import CheckReport, LayerReport
from quacklr.checking.show import verdict
from quacklr.util.figures import RC, save
from quacklr.util.layer_names import described, short

START, PLAIN, QUACK, BOUND, WRONG = "#9a9a9a", "#d55e00", "#0b6e4f", "#222222", "#e6007e"
HOLLOW = {"markeredgewidth": 1}
INCHES, COLUMN = (6.4, 17.0), 0.16  # least and most width; of a head's column


def draw(wiring: CheckReport, file: str | Path) -> None:
    """Write the picture; its kind is the file name's (png, svg, pdf)."""
    columns = sum(layer.heads for layer in wiring.layers) + len(wiring.layers)
    width = min(max(INCHES[0], 1.2 + COLUMN * columns), INCHES[1])
    with rc_context(RC):
        figure = Figure(figsize=(width, 4.2), layout="constrained")
        _fill(figure.subplots(), wiring, size=min(30.0, max(3.0, 2400 * width / 17 / columns)))
    save(figure, Path(file))


def _fill(axes: Any, wiring: CheckReport, size: float) -> None:
    at, ticks = 0.0, []
    for number, layer in enumerate(wiring.layers):
        _layer(axes, layer, at, size, shaded=number % 2 == 1)
        ticks.append(at + (layer.heads - 1) / 2)
        at += layer.heads + 1
    axes.set(yscale="log", xlim=(-1, at - 1), ylabel="largest |change of a logit| in one step")
    every = max(1, round(len(ticks) / 14))
    names = [layer.module for layer in wiring.layers]
    axes.set_xticks(ticks[::every], short(names)[::every])
    axes.set_xlabel(f"attention layers {described(names)}, a column for each head".replace(" ,", ","))
    axes.tick_params(axis="x", length=0)
    axes.set_title(verdict(wiring).split(";")[0], loc="left", fontsize=10, color=BOUND if wiring.ok else WRONG)
    _number(axes)
    _legend(axes, wiring)


def _layer(axes: Any, layer: LayerReport, at: float, size: float, shaded: bool) -> None:
    if shaded:
        axes.axvspan(at - 1, at + layer.heads, color="#f3f3f3", linewidth=0, zorder=0)
    place = torch.arange(layer.heads) + at
    for head in place[layer.wrong].tolist():
        axes.axvspan(head - 0.5, head + 0.5, color=WRONG, alpha=0.22, linewidth=0, zorder=1)
    if layer.silent:
        return
    axes.hlines(layer.quack.bound.tolist(), place - 0.42, place + 0.42, color=BOUND, linewidth=1.1, zorder=2)
    _dots(axes, place, layer.start.measured, s=2.2 * size, facecolors="none", edgecolors=START, linewidths=1.0)
    _dots(axes, place, layer.plain.measured, s=size, color=PLAIN, linewidths=0)
    _dots(axes, place, layer.quack.measured, s=size, color=QUACK, linewidths=0)


def _dots(axes: Any, place: Tensor, values: Tensor, **style: Any) -> None:
    shown = values > 0  # what did not move has no place on a logarithmic axis
    axes.scatter(place[shown].tolist(), values[shown].tolist(), zorder=3, **style)


def _number(axes: Any) -> None:
    """Plain numbers on the axis: powers of ten, and 2 and 5 between them if there are few."""
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(ticker.NullFormatter())


def _legend(axes: Any, wiring: CheckReport) -> None:
    grown = f"weights grown {wiring.growth:g}x"
    dot: dict[str, Any] = {"linestyle": "", "markeredgewidth": 0, "markersize": 6}
    handles = [
        lines.Line2D([], [], marker="o", color=PLAIN, label=f"{grown}, without QuacK", **dot),
        lines.Line2D([], [], marker="o", color=QUACK, label=f"{grown}, with QuacK", **dot),
        lines.Line2D([], [], marker="o", color=START, fillstyle="none", label="at the start", **dot | HOLLOW),
        lines.Line2D([], [], color=BOUND, label="bound, with QuacK"),
    ]
    if not wiring.ok:
        handles.append(lines.Line2D([], [], marker="s", color=WRONG, alpha=0.4, label="wired wrong", **dot))
    narrow = axes.figure.get_size_inches()[0] < 8
    axes.figure.legend(handles=handles, loc="outside lower center", ncols=2 if narrow else len(handles), fontsize=8)
