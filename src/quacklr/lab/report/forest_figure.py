"""The figure with the verdicts on all claims about losses: one row for each claim, as a forest plot."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, NullLocator

from quacklr.lab.report.deciding import IN_NATS, deciding, limits_of, short_label
from quacklr.lab.report.style import legend_below, panels
from quacklr.lab.studies.all_claims import claim_results
from quacklr.lab.studies.comparison import SAME, Comparison, Verdict
from quacklr.lab.studies.measures import NotRun
from quacklr.lab.studies.results import Results
from quacklr.lab.studies.verdicts import ClaimPart, ClaimResult

VERDICT_COLOURS: dict[Verdict, str] = {
    "holds": "#0b6e4f",
    "fails": "#b03a2e",
    "the same": "#0072b2",
    "undecided": "#707070",
}
TOO_FEW = "#c0c0c0"
"""The colour of a comparison that has no interval yet."""
TICKS = (-1, -0.1, -SAME, 0, SAME, 0.1, 1)


def forest(results: Results) -> Figure:
    """Figure 8. What decided each claim, or leaves it open?

    One comparison of validation losses for each claim, named on the right. If the claim fails, it is the clearest one
    that fails; otherwise the least clear one of those with the verdict of the claim. A line is the interval of the
    difference, a large dot its mean, a small dot one seed. Below zero the method that is named first is better (in the
    row of gains, above zero the larger model gains more). A short bar is the limit of a claim that allows a
    difference. The shaded range is "the same"; outside of it the axis is logarithmic. Claims without a comparison of
    losses, and those that were not run, are left out.
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
        draw_row(axes, y, part.comparison, limits_of(part), colour_of(claim, part))
    axes.set_xscale("symlog", linthresh=SAME)
    axes.xaxis.set(major_locator=FixedLocator(TICKS), major_formatter="{x:g}", minor_locator=NullLocator())
    axes.set_ylim(len(rows) - 0.4, -0.6)
    for side, texts in ((axes, names), (axes.secondary_yaxis("right"), labels)):
        side.set_yticks(range(len(rows)), texts)
        side.tick_params(axis="y", length=0)
    axes.set_xlabel(
        "validation loss of the first method - that of the second, nats; logarithmic outside the shaded range"
    )
    found = {colour_of(claim, part) for claim, part in rows}
    names_of_colours = {colour: verdict for verdict, colour in VERDICT_COLOURS.items()} | {TOO_FEW: "too few seeds"}
    verdicts = [
        Line2D([], [], color=colour, marker="o", label=name)
        for colour, name in names_of_colours.items()
        if colour in found
    ]
    limit = Line2D([], [], color="black", linestyle="none", marker="|", markersize=10, label="limit of the claim")
    legend_below(figure, [*verdicts, limit, Patch(color="#0072b2", alpha=0.1, label=f"within {SAME:g}")])
    return figure


def colour_of(claim: ClaimResult, part: ClaimPart) -> str:
    """The colour of a verdict, or TOO_FEW."""
    known = math.isfinite(part.comparison.high - part.comparison.low)
    return VERDICT_COLOURS[claim.verdict] if known or claim.verdict != "undecided" else TOO_FEW


def draw_row(axes: Axes, y: int, comparison: Comparison, limits: Sequence[float], colour: str) -> None:
    """Draw the interval, the mean, the seeds and the limits of one comparison."""
    axes.scatter(comparison.differences, [y + 0.28] * comparison.seeds, s=5, color=colour, linewidths=0, alpha=0.7)
    if math.isfinite(comparison.high - comparison.low):
        axes.plot([comparison.low, comparison.high], [y, y], color=colour, linewidth=1.8, solid_capstyle="butt")
    axes.plot([comparison.mean], [y], marker="o", markersize=4.5, color=colour)
    for limit in limits:
        axes.plot([limit, limit], [y - 0.35, y + 0.35], color="black", linewidth=1.2)
