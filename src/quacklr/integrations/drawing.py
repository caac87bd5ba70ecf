"""Heads over steps as colours: a panel for each statistic.

Shapes: R row, a head of an attention; C column, a measured step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colorbar import Colorbar
from matplotlib.colors import Colormap, ListedColormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, StrMethodFormatter
from torch import Tensor

from quacklr.util.figures import RC
from quacklr.util.layer_names import described, short

CLIP = 100.0  # QK clip's threshold in Kimi K2
COLUMNS = 400  # about as many as a panel has pixels for
DECADES = 3  # of a logarithmic scale, at most; what is smaller has the colour of its end
NO_NUMBER = "#c8c8c8"
COLD, WARM = mpl.colormaps["GnBu_r"], mpl.colormaps["YlOrRd_r"]


@dataclass(frozen=True, slots=True)
class Look:
    """How a statistic is shown: bright is where one should look; warm colours are for what is above a threshold."""

    title: str
    colours: str = "viridis"
    log: bool = False
    threshold: float | None = None
    top: float | None = None  # of the scale, if it is always the same


SINCE = Look("mean |change| of a logit since the last measurement", log=True)
LOOKS = {
    "max": Look("largest logit", log=True, threshold=CLIP),
    "mean_change": SINCE,
    "change": SINCE,
    "step_change": Look("mean |change| of a logit in one step", log=True),
    "entropy": Look("entropy of the attention (nats)", "cividis_r"),
    "sink": Look("share of attention on the first key", "cividis", top=1.0),
}


def draw(heads: Mapping[str, int], steps: Sequence[int], numbers: Mapping[str, Tensor]) -> Figure:
    """Two panels in a row, all with the same rows (heads, by attention) and columns (steps)."""
    across = min(2, len(numbers))
    down = math.ceil(len(numbers) / across)
    height = panel_height(heads)
    note = "   (grey: no finite number)" if any(bool(each.isnan().any()) for each in numbers.values()) else ""
    with mpl.rc_context(RC):
        figure = Figure(figsize=(0.8 + 4.6 * across, 0.3 + (height + 0.35) * down), layout="constrained")
        grid: list[Axes] = list(figure.subplots(down, across, squeeze=False, sharex=True, sharey=True).flat)
        for axes, (statistic, number_RC) in zip(grid, numbers.items(), strict=False):
            look = LOOKS.get(statistic, Look(statistic.replace("_", " ")))
            heatmap(axes, steps, number_RC, look)
        label_rows(grid, heads, height)
        for place, axes in enumerate(grid):
            axes.set_visible(place < len(numbers))
            if place + across >= len(numbers):
                axes.set_xlabel("step" + note)
                axes.tick_params(labelbottom=True)
        figure.supylabel(f"heads of {described(list(heads))}".removesuffix(" of "), fontsize=9)
    return figure


def panel_height(heads: Mapping[str, int]) -> float:
    """Inches: labels of a few dozen layers fit, and a head has two pixels, or if there are many at least one."""
    rows = sum(heads.values())
    return max(2.3, min(0.16 * len(heads), 6.0), min(rows / 75, 12.0), rows / 150)


def heatmap(axes: Axes, steps: Sequence[int], number_RC: Tensor, look: Look) -> None:
    """One statistic of all heads, with its colours explained beside it."""
    edges, shown_RC = columns(steps, number_RC, look.log)
    scale = scale_of(shown_RC, look.log) if look.top is None else ColourScale(0.0, look.top, log=False)
    rows, clamped_RC = range(len(shown_RC) + 1), shown_RC.clamp(min=scale.low).numpy()
    image = axes.pcolormesh(edges, rows, clamped_RC, norm=scale.norm(), cmap=colours(look, scale), rasterized=True)
    ticks = MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]) if len(steps) > 1 else FixedLocator(steps)
    axes.xaxis.set_major_locator(ticks)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set_title(title(look, number_RC), loc="left")
    extend = "min" if bool((shown_RC < scale.low).any()) else "neither"
    bar = axes.figure.colorbar(image, ax=axes, pad=0.02, aspect=30, extend=extend)
    explain(bar, scale, look.threshold)


def title(look: Look, number_RC: Tensor) -> str:
    """What is shown; and how many heads were above the threshold at some step."""
    if look.threshold is None:
        return look.title
    above = int((number_RC > look.threshold).any(1).sum())
    return f"{look.title}: {above or 'none'} of {len(number_RC)} heads went above {look.threshold:g}"


def colours(look: Look, scale: ColourScale) -> Colormap:
    """The look's colours; with a threshold cold ones up to it, and above it warm ones, from red to yellow at ten times.

    The warm part is 0.3 to 0.95 of its map, without its darkest and palest colours.
    """
    if look.threshold is None or not scale.log:
        return mpl.colormaps[look.colours].with_extremes(bad=NO_NUMBER)
    cold = round(256 * min(max(float(scale.norm()(look.threshold)), 0.0), 1.0))
    above = min(max(math.log10(scale.high / look.threshold), 0.0), 1.0)
    warm = np.linspace(0.3, 0.3 + 0.65 * above, 256 - cold)
    return ListedColormap([*COLD(np.linspace(0, 0.65, cold)), *WARM(warm)]).with_extremes(bad=NO_NUMBER)


def columns(steps: Sequence[int], number_RC: Tensor, largest: bool) -> tuple[list[float], Tensor]:
    """Where columns begin and end, half-way between steps; neighbours beyond COLUMNS share one: their largest or mean.

    So that a spike of a long run is never lost between two pixels.
    """
    group = math.ceil(len(steps) / COLUMNS)
    firsts = range(group, len(steps), group)
    first, last = (steps[0], steps[-1]) if len(steps) > 1 else (steps[0] - 0.5, steps[0] + 0.5)
    edges = [first, *((steps[place - 1] + steps[place]) / 2 for place in firsts), last]
    parts = number_RC.split(group, dim=1)
    return edges, torch.stack([_largest(each) if largest else each.nanmean(1) for each in parts], dim=1)


def _largest(number_RC: Tensor) -> Tensor:
    return number_RC.nan_to_num(-torch.inf).amax(1).where(~number_RC.isnan().all(1), torch.nan)


@dataclass(frozen=True, slots=True)
class ColourScale:
    """Which numbers have a colour of their own, and whether equal ratios are equal distances."""

    low: float
    high: float
    log: bool

    def norm(self) -> Normalize:
        """The same for matplotlib."""
        return LogNorm(self.low, self.high) if self.log else Normalize(self.low, self.high)


def scale_of(number_RC: Tensor, log: bool) -> ColourScale:
    """A scale for these numbers. A linear one begins at 0, so that dark and bright mean the same in every picture."""
    seen = number_RC[number_RC.isfinite()]
    positive = seen[seen > 0]
    if log and len(positive):
        high = float(positive.max())
        low = max(float(positive.min()), high / 10**DECADES)
        middle = math.sqrt(low * high)
        return ColourScale(min(low, middle / 2), max(high, middle * 2), log=True)
    low, high = min([0.0, *seen.tolist()]), max([0.0, *seen.tolist()])
    return ColourScale(low, high if high > low else low + 1.0, log=False)


def explain(bar: Colorbar, scale: ColourScale, threshold: float | None) -> None:
    """Ticks at round numbers, and the threshold, if it is among the colours."""
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=2, labelsize=8)
    bar.ax.minorticks_off()
    if scale.log:
        ticks = round_numbers(scale)
        if threshold is not None and scale.low <= threshold <= scale.high:
            ticks = [each for each in ticks if not threshold / 1.6 < each < threshold * 1.6] + [threshold]
            bar.ax.axhline(threshold, color="white", linewidth=1.5)
        bar.set_ticks(ticks, labels=[f"{each:g}" + (" QK clip" if each == threshold else "") for each in ticks])


def round_numbers(scale: ColourScale) -> list[float]:
    """Powers of ten within a logarithmic scale, and if these are few also what is between them."""
    powers = range(math.floor(math.log10(scale.low)), math.ceil(math.log10(scale.high)) + 1)
    found: list[float] = []
    for digits in ("1", "13", "125"):
        found = [float(f"{digit}e{power}") for power in powers for digit in digits]
        found = [each for each in found if scale.low <= each <= scale.high]
        if len(found) >= 3:
            break
    return found


def label_rows(grid: Iterable[Axes], heads: Mapping[str, int], height: float) -> None:
    """The first attention on top; a line between two, the name of each, and the heads' numbers where there is room."""
    bounds = [0, *accumulate(heads.values())]
    every = math.ceil(0.13 * len(heads) / height)
    centres = [(top + bottom) / 2 for top, bottom in pairwise(bounds)]
    room = height / bounds[-1] > 0.1
    for axes in grid:
        axes.set_ylim(bounds[-1], 0)
        for bound in bounds[1:-1]:
            axes.axhline(bound, color="white" if room else "black", linewidth=1.2 if room else 0.6)
        axes.set_yticks(centres[::every], short(list(heads))[::every])
        axes.tick_params(axis="y", length=0, pad=12 if room else 3)
        if room:
            axes.set_yticks([row + 0.5 for row in range(bounds[-1])], _numbers(heads), minor=True)
            axes.tick_params(axis="y", which="minor", length=0, pad=2, labelsize=6, labelcolor="#888888")


def _numbers(heads: Mapping[str, int]) -> list[str]:
    return [str(head) for count in heads.values() for head in range(count)]
