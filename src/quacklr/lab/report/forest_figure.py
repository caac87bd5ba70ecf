"""The figure with the verdicts on all claims about losses: one row for each claim, as a forest plot."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator

from quacklr.lab.report.style import legend_below, panels
from quacklr.lab.studies.all_claims import claim_results
from quacklr.lab.studies.comparison import SAME, Comparison, Verdict
from quacklr.lab.studies.deciding import IN_NATS, deciding, limits_of, short_label
from quacklr.lab.studies.measures import NotRun
from quacklr.lab.studies.results import Results

VERDICT_COLOURS: dict[Verdict, str] = {
    "holds": "#0b6e4f",
    "fails": "#b03a2e",
    "the same": "#0072b2",
    "undecided": "#8a8a8a",
}
TICKS = (-1, -0.1, -SAME, 0, SAME, 0.1, 1)


def forest(results: Results) -> Figure:
    """Figure 8. What decided each claim?

    One comparison of validation losses for each claim, named on the right. If the claim fails, it is the clearest one
    that fails; otherwise the least clear one of those with the verdict of the claim. A line is the interval of the
    difference, a large dot its mean, a small dot one seed. Below zero the method that is named first is better. A short
    bar is the limit of a claim that allows a difference. The shaded range is "the same"; outside of it the axis is
    logarithmic. Claims without a comparison of losses are left out.
    """
    shown = [(claim, part) for claim in claim_results(results) if (part := deciding(claim)) is not None]
    rows = [(claim, part) for claim, part in shown if part.comparison.label.endswith(IN_NATS)]
    if not rows:
        raise NotRun("no claim about losses was run")
    figure, [[axes]] = panels(1, 1, 10.0, 1.2 + 0.26 * len(rows))
    names, labels = [claim.name for claim, _ in rows], [short_label(part, results.scale.high) for _, part in rows]
    axes.axvspan(-SAME, SAME, color="#0072b2", alpha=0.1, linewidth=0)
    axes.axvline(0, color="black", linewidth=0.6)
    for y, (claim, part) in enumerate(rows):
        draw_row(axes, y, part.comparison, limits_of(part), VERDICT_COLOURS[claim.verdict])
    axes.set_xscale("symlog", linthresh=SAME)
    axes.xaxis.set(major_locator=FixedLocator(TICKS), major_formatter="{x:g}", minor_locator=NullLocator())
    right = axes.twinx()
    for side, texts in ((axes, names), (right, labels)):
        side.set_yticks(range(len(rows)), texts)
        side.set_ylim(len(rows) - 0.4, -0.6)
        side.tick_params(axis="y", length=0)
    axes.set_xlabel("difference of validation losses, nats")
    found = {claim.verdict for claim, _ in rows}
    handles = [
        Line2D([], [], color=colour, marker="o", label=verdict)
        for verdict, colour in VERDICT_COLOURS.items()
        if verdict in found
    ]
    legend_below(figure, handles)
    return figure


def draw_row(axes: Axes, y: int, comparison: Comparison, limits: Sequence[float], colour: str) -> None:
    """Draw the interval, the mean, the seeds and the limits of one comparison."""
    axes.scatter(comparison.differences, [y + 0.28] * comparison.seeds, s=5, color=colour, linewidths=0, alpha=0.7)
    if math.isfinite(comparison.high - comparison.low):
        axes.plot([comparison.low, comparison.high], [y, y], color=colour, linewidth=1.8, solid_capstyle="butt")
    axes.plot([comparison.mean], [y], marker="o", markersize=4.5, color=colour)
    for limit in limits:
        axes.plot([limit, limit], [y - 0.35, y + 0.35], color="black", linewidth=1.2)
