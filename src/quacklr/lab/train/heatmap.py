"""Draw logit statistics as heatmaps: one panel per statistic, one row per head, one column per measured step.

Shapes: R row, the heads of all layers; C column, a measured step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import matplotlib as mpl
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from torch import Tensor

from quacklr.lab.figures import RC

CLIP = 100.0  # QK clip's threshold in Kimi K2
COLUMNS = 400  # about the number of pixels of a panel
DECADES = 3  # of a logarithmic scale; smaller numbers have the colour of its lower end
NO_NUMBER = "#c8c8c8"


@dataclass(frozen=True, slots=True)
class Look:
    """How a statistic is shown. Bright colours mark numbers to check."""

    title: str
    colours: str
    log: bool


LOOKS = {
    "max": Look("largest logit", "inferno", log=True),
    "step_change": Look("mean |change| of a logit in one step", "viridis", log=True),
    "entropy": Look("entropy of the attention (nats)", "cividis_r", log=False),
    "sink": Look("share of attention on the first key", "cividis", log=False),
}


def draw(steps: Sequence[int], numbers: Mapping[str, Tensor], layers: int) -> Figure:
    """Panels in two columns. `numbers` has a tensor (R, C) for each statistic, with NaN for missing numbers."""
    down = math.ceil(len(numbers) / 2)
    rows = max(len(number_RC) for number_RC in numbers.values())
    height = max(2.3, min(rows / 75, 12.0))  # in inches: two pixels per head
    with mpl.rc_context(RC):
        figure = Figure(figsize=(10, 0.3 + (height + 0.35) * down), layout="constrained")
        grid: list[Axes] = list(figure.subplots(down, 2, squeeze=False, sharex=True, sharey=True).flat)
        for axes, (statistic, number_RC) in zip(grid, numbers.items(), strict=False):
            heatmap(axes, steps, number_RC, LOOKS[statistic])
            axes.set_yticks([(layer + 0.5) * rows / layers for layer in range(layers)], map(str, range(layers)))
        for axes in grid[len(numbers) :]:
            axes.set_visible(False)
        figure.supxlabel("step (grey: no finite number)", fontsize=9)
        figure.supylabel("heads of layer", fontsize=9)
    return figure


def heatmap(axes: Axes, steps: Sequence[int], number_RC: Tensor, look: Look) -> None:
    """One statistic of all heads, the first layer on top, with a colour bar."""
    edges, shown_RC = binned(steps, number_RC, look.log)
    scale = scale_of(shown_RC, look.log)
    colours = mpl.colormaps[look.colours].with_extremes(bad=NO_NUMBER)
    shown_RC = shown_RC.clamp(min=scale.vmin)
    image = axes.pcolormesh(
        edges, range(len(shown_RC) + 1), shown_RC.numpy(), norm=scale, cmap=colours, rasterized=True
    )
    axes.set_ylim(len(shown_RC), 0)
    above = int((number_RC > CLIP).any(1).sum())
    count = f": {above or 'none'} of {len(number_RC)} heads went above {CLIP:g}"
    axes.set_title(look.title + (count if look.title == "largest logit" else ""), loc="left")
    axes.figure.colorbar(image, ax=axes, pad=0.02, aspect=30)


def binned(steps: Sequence[int], number_RC: Tensor, largest: bool) -> tuple[list[float], Tensor]:
    """The edges of at most COLUMNS columns, half-way between steps, and their numbers.

    Neighbouring steps that share a column are reduced to their maximum (`largest`) or mean, so that no spike is lost.
    """
    group = math.ceil(len(steps) / COLUMNS)
    first, last = (steps[0], steps[-1]) if len(steps) > 1 else (steps[0] - 0.5, steps[0] + 0.5)
    edges = [first, *((steps[i - 1] + steps[i]) / 2 for i in range(group, len(steps), group)), last]
    parts = number_RC.split(group, dim=1)
    return edges, torch.stack([_largest(part) if largest else part.nanmean(1) for part in parts], dim=1)


def _largest(number_RC: Tensor) -> Tensor:
    return number_RC.nan_to_num(-torch.inf).amax(1).where(~number_RC.isnan().all(1), torch.nan)


def scale_of(number_RC: Tensor, log: bool) -> Normalize:
    """A logarithmic scale of a factor of 4 to DECADES decades, or a linear one that includes 0 and 1."""
    finite = number_RC[number_RC.isfinite()]
    positive = finite[finite > 0]
    if log and len(positive):
        high = float(positive.max())
        low = max(float(positive.min()), high / 10**DECADES)
        return LogNorm(min(low, high / 4), high)
    return Normalize(min([0.0, *finite.tolist()]), max([1.0, *finite.tolist()]))
