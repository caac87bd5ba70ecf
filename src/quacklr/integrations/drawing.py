"""Draw heads over steps as colours, with one panel per statistic.

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
COLUMNS = 400  # about the number of pixels of a panel
DECADES = 3  # most decades of a logarithmic scale; smaller values have the colour of its lower end
NO_NUMBER = "#c8c8c8"
COLD, WARM = mpl.colormaps["GnBu_r"], mpl.colormaps["YlOrRd_r"]


@dataclass(frozen=True, slots=True)
class Look:
    """How a statistic is shown. Bright colours mark values to check; values above a threshold have warm colours."""

    title: str
    colours: str = "viridis"
    log: bool = False
    threshold: float | None = None
    top: float | None = None  # largest number of the scale, if it is fixed


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
    """Panels in two columns, all with the same rows (heads by attention) and columns (steps)."""
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
        for number, axes in enumerate(grid):
            axes.set_visible(number < len(numbers))
            if number + across >= len(numbers):
                axes.set_xlabel("step" + note)
                axes.tick_params(labelbottom=True)
        figure.supylabel(f"heads of {described(list(heads))}".removesuffix(" of "), fontsize=9)
    return figure


def panel_height(heads: Mapping[str, int]) -> float:
    """In inches: enough for the labels of a few dozen layers, and for two pixels per head, or one if there are many."""
    rows = sum(heads.values())
    return max(2.3, min(0.16 * len(heads), 6.0), min(rows / 75, 12.0), rows / 150)


def heatmap(axes: Axes, steps: Sequence[int], number_RC: Tensor, look: Look) -> None:
    """One statistic of all heads, with a colour bar."""
    edges, shown_RC = binned(steps, number_RC, look.log)
    scale = scale_of(shown_RC, look.log) if look.top is None else Normalize(0.0, look.top)
    low, _ = limits(scale)
    rows, clamped_RC = range(len(shown_RC) + 1), shown_RC.clamp(min=low).numpy()
    image = axes.pcolormesh(edges, rows, clamped_RC, norm=scale, cmap=colours(look, scale), rasterized=True)
    ticks = MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]) if len(steps) > 1 else FixedLocator(steps)
    axes.xaxis.set_major_locator(ticks)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set_title(title(look, number_RC), loc="left")
    extend = "min" if bool((shown_RC < low).any()) else "neither"
    bar = axes.figure.colorbar(image, ax=axes, pad=0.02, aspect=30, extend=extend)
    add_ticks(bar, scale, look.threshold)


def title(look: Look, number_RC: Tensor) -> str:
    """The statistic, and the number of heads that were above the threshold at some step."""
    if look.threshold is None:
        return look.title
    above = int((number_RC > look.threshold).any(1).sum())
    return f"{look.title}: {above or 'none'} of {len(number_RC)} heads went above {look.threshold:g}"


def colours(look: Look, scale: Normalize) -> Colormap:
    """The colours of the look. With a threshold: cold colours below it, and red to yellow up to ten times above it.

    The warm part is 0.3 to 0.95 of its map, without the darkest and palest colours.
    """
    if look.threshold is None or not isinstance(scale, LogNorm):
        return mpl.colormaps[look.colours].with_extremes(bad=NO_NUMBER)
    cold = round(256 * min(max(float(scale(look.threshold)), 0.0), 1.0))
    above = min(max(math.log10(limits(scale)[1] / look.threshold), 0.0), 1.0)
    warm = np.linspace(0.3, 0.3 + 0.65 * above, 256 - cold)
    return ListedColormap([*COLD(np.linspace(0, 0.65, cold)), *WARM(warm)]).with_extremes(bad=NO_NUMBER)


def binned(steps: Sequence[int], number_RC: Tensor, largest: bool) -> tuple[list[float], Tensor]:
    """The edges of at most COLUMNS columns, half-way between steps, and their values.

    Neighbouring steps that share a column are reduced to their maximum (`largest`) or mean, so that no spike is lost.
    """
    group = math.ceil(len(steps) / COLUMNS)
    firsts = range(group, len(steps), group)
    first, last = (steps[0], steps[-1]) if len(steps) > 1 else (steps[0] - 0.5, steps[0] + 0.5)
    edges = [first, *((steps[i - 1] + steps[i]) / 2 for i in firsts), last]
    parts = number_RC.split(group, dim=1)
    return edges, torch.stack([_largest(each) if largest else each.nanmean(1) for each in parts], dim=1)


def _largest(number_RC: Tensor) -> Tensor:
    return number_RC.nan_to_num(-torch.inf).amax(1).where(~number_RC.isnan().all(1), torch.nan)


def scale_of(number_RC: Tensor, log: bool) -> Normalize:
    """A scale for these numbers. A linear one starts at 0, so that colours mean the same in every figure."""
    finite = number_RC[number_RC.isfinite()]
    positive = finite[finite > 0]
    if log and len(positive):
        high = float(positive.max())
        low = max(float(positive.min()), high / 10**DECADES)
        middle = math.sqrt(low * high)
        return LogNorm(min(low, middle / 2), max(high, middle * 2))
    low, high = min([0.0, *finite.tolist()]), max([0.0, *finite.tolist()])
    return Normalize(low, high if high > low else low + 1.0)


def limits(scale: Normalize) -> tuple[float, float]:
    """The smallest and the largest number that have a colour of their own."""
    return scale.vmin or 0.0, scale.vmax or 0.0


def add_ticks(bar: Colorbar, scale: Normalize, threshold: float | None) -> None:
    """Ticks of a logarithmic colour bar at round numbers and at the threshold."""
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=2, labelsize=8)
    bar.ax.minorticks_off()
    if isinstance(scale, LogNorm):
        low, high = limits(scale)
        ticks = round_numbers(low, high)
        if threshold is not None and low <= threshold <= high:
            ticks = [each for each in ticks if not threshold / 1.6 < each < threshold * 1.6] + [threshold]
            bar.ax.axhline(threshold, color="white", linewidth=1.5)
        bar.set_ticks(ticks, labels=[f"{each:g}" + (" QK clip" if each == threshold else "") for each in ticks])


def round_numbers(low: float, high: float) -> list[float]:
    """Powers of ten between two numbers, and multiples of them if there are fewer than three."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found: list[float] = []
    for digits in ("1", "13", "125"):
        found = [float(f"{digit}e{power}") for power in powers for digit in digits]
        found = [each for each in found if low <= each <= high]
        if len(found) >= 3:
            break
    return found


def label_rows(grid: Iterable[Axes], heads: Mapping[str, int], height: float) -> None:
    """Label rows with the names of the attentions, first on top, and with head numbers if there is room."""
    bounds = [0, *accumulate(heads.values())]
    every = math.ceil(0.13 * len(heads) / height)
    centres = [(top + bottom) / 2 for top, bottom in pairwise(bounds)]
    room = height / bounds[-1] > 0.1
    numbers = [str(head) for count in heads.values() for head in range(count)]
    for axes in grid:
        axes.set_ylim(bounds[-1], 0)
        for bound in bounds[1:-1]:
            axes.axhline(bound, color="white" if room else "black", linewidth=1.2 if room else 0.6)
        axes.set_yticks(centres[::every], short(list(heads))[::every])
        axes.tick_params(axis="y", length=0, pad=12 if room else 3)
        if room:
            axes.set_yticks([row + 0.5 for row in range(bounds[-1])], numbers, minor=True)
            axes.tick_params(axis="y", which="minor", length=0, pad=2, labelsize=6, labelcolor="#888888")
