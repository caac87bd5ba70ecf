"""The figure of the study `sizes`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from statistics import linear_regression

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from quacklr.lab.methods import Budget, Default, QKNorm, Quack
from quacklr.lab.report.style import colour, line_with_seeds, panels
from quacklr.lab.studies.measures import NotRun
from quacklr.lab.studies.names import METHOD_NAMES
from quacklr.lab.studies.results import Results, available
from quacklr.lab.studies.sizes import ABOVE_CRITICAL, WIDTHS, above_critical, bracket, critical_rate, runs_above


def sizes(results: Results) -> Figure:
    """Figure 7. Does the problem grow with the size of the model, and what does QuacK gain?

    MHA of four widths with heads of the same size, trained with Muon. Left: the learning rate at which the largest
    logit of the default is 100, and a power law fitted to it. A circle is known from seed 0 only, and not fitted.
    Right: the validation loss at ten times this learning rate, rounded to 0.1, 0.3, 1, ...; losses at different
    learning rates are not joined by a line. A small dot for every seed. All axes but that of the losses are
    logarithmic.
    """
    figure, [[left, right]] = panels(1, 2, 4.2, 3.2)
    found = available(WIDTHS, partial(bracket, results))
    rates = available(found, lambda size: critical_rate(results, size).by_seed())
    if not found:
        raise NotRun("no critical learning rate is known")
    grey = colour(Default)
    by_width = {
        float(WIDTHS[size]): {seed: 10**rate for seed, rate in seeds.items()} for size, seeds in rates.items() if seeds
    }
    on_seed_0 = {float(WIDTHS[size]): 10**each.critical for size, each in found.items() if not rates.get(size)}
    line_with_seeds(left, by_width, color=grey, marker=".", linestyle="none")
    if len(by_width) > 1:
        slope, start = fit(
            [(math.log10(width), math.log10(rate)) for width, seeds in by_width.items() for rate in seeds.values()]
        )
        fitted = [10 ** (start + slope * math.log10(width)) for width in by_width]
        left.plot(list(by_width), fitted, color=grey, linewidth=1, label=f"width^{slope:.2f}")
    if on_seed_0:
        left.scatter(list(on_seed_0), list(on_seed_0.values()), facecolors="none", edgecolors=grey, label="seed 0 only")
    if left.get_legend_handles_labels()[0]:
        left.legend()
    left.set(xscale="log", yscale="log", ylabel="critical learning rate of the default", title="MHA, Muon")
    left.yaxis.set(major_locator=LogLocator(subs=(1, 2, 3, 4, 6)), major_formatter="{x:g}", minor_locator=NullLocator())
    cells = {size: above_critical(results, size) for size in found}
    for method in (Default, Quack, Budget, QKNorm):
        losses = {size: runs.by_seed() for size, runs in available(found, partial(runs_above, results, method)).items()}
        lrs = sorted({cells[size].lr for size in losses}, reverse=True)
        for lr in lrs:  # losses at different learning rates are not joined
            points = {float(WIDTHS[size]): values for size, values in losses.items() if cells[size].lr == lr}
            label = METHOD_NAMES[method] if lr == lrs[0] else None
            line_with_seeds(right, points, color=colour(method), marker=".", label=label)
    right.set(xscale="log", ylabel="validation loss", title=f"about {ABOVE_CRITICAL} times the critical learning rate")
    if right.lines:
        right.legend()
    for axes in (left, right):
        texts = [f"{WIDTHS[size]}\n{size}" + f"\nlr {cells[size].lr:g}" * (axes is right) for size in found]
        axes.set_xticks([WIDTHS[size] for size in found], texts, minor=False)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("width, number of parameters" + ", learning rate" * (axes is right))
    return figure


def fit(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Slope and intercept of the least-squares line through some points."""
    found = linear_regression(*zip(*points, strict=True))
    return found.slope, found.intercept
