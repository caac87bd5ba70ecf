"""The paper's four figures and six more, each a function of the results; parts without runs are left out.

Lines are means over seeds, bands their range. A method has its best setting, selected on another seed.
The docstring of a figure is its title and its caption.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from statistics import mean
from typing import Any

from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from quacklr.lab.ledger import Entry
from quacklr.lab.methods import ConstantTau, Default, Method, QKNorm, Quack
from quacklr.lab.report.forest_figure import forest
from quacklr.lab.report.hero import hero
from quacklr.lab.report.page import CLAIMS_FIGURE
from quacklr.lab.report.size_figure import sizes
from quacklr.lab.report.stress_figure import stress
from quacklr.lab.report.style import Points, colour, legend_below, line_with_seeds, method_curve, panels, validation
from quacklr.lab.studies.claims import BOTH
from quacklr.lab.studies.measures import NotRun
from quacklr.lab.studies.names import METHOD_NAMES, PAPER_METHODS
from quacklr.lab.studies.questions import CONSTANT_TAUS, DECADES, QUACK_TAUS
from quacklr.lab.studies.results import MethodRuns, Results, available

Draw = Callable[[Results], Figure]


def critical_rate(results: Results) -> Figure:
    """Figure 1. Is the learning rate of queries and keys the critical one?

    Validation loss in MHA at the highest learning rate. Query and key weights have the same, a tenth or a hundredth
    of it; QK norm is the stable baseline.
    """
    figure, [[axes]] = panels(1, 1, 4.5, 3.2)
    lines: tuple[tuple[Method, str, str], ...] = (
        (Default(), "the same rate for queries and keys", "-"),
        (ConstantTau(0.1), "a tenth of it", "-"),
        (ConstantTau(0.01), "a hundredth of it", "--"),
        (QKNorm(), "QK norm", "-"),
    )
    for method, label, dash in lines:
        method_curve(axes, results, "mha", method, results.scale.high, validation, label=label, linestyle=dash)
    if not axes.lines:
        raise NotRun("no run with MHA at the highest learning rate")
    axes.set(xlabel="step", ylabel="validation loss", title=f"MHA, Muon at lr {results.scale.high:g}")
    axes.legend()
    return figure


def interventions(results: Results) -> Figure:
    """Figure 2. Validation loss of every method, in MHA and MLA, at each learning rate; on the right at the end.

    QK norm is dashed in MLA, where it usually means that keys are cached. What the paper does not test is dotted, in
    the last column. If logits stay below its threshold, QK clip equals the default. Axes omit values far above the
    lowest line.
    """
    rates = results.scale.rates
    figure, grid = panels(2, len(rates) + 1, 2.7, 2.5)
    for attention, row in zip(BOTH, grid, strict=True):
        for axes, lr in zip(row, rates, strict=False):
            for method in PAPER_METHODS:
                method_curve(axes, results, attention, method, lr, validation, linestyle=linestyle(attention, method))
            axes.set(title=f"{attention.upper()}, lr {lr:g}", xlabel="step")
            limit_y(axes)
        row[0].set_ylabel("validation loss")
        for method in METHOD_NAMES:
            final_losses(results, attention, method, row[-1])
        row[-1].set(xscale="log", xlabel="learning rate", title=f"{attention.upper()}, at the end")
    if not any(axes.lines for row in grid for axes in row):
        raise NotRun("no run of any method")
    handles: dict[str, Any] = {}
    for row in reversed(grid):  # MHA last, because no line of it is dashed
        handles |= dict(zip(*reversed(row[-1].get_legend_handles_labels()), strict=True))
    legend_below(figure, [handles[name] for name in METHOD_NAMES.values() if name in handles])
    return figure


def final_losses(results: Results, attention: str, method: type[Method], axes: Any) -> None:
    """Draw the final loss of a method against the learning rate."""
    losses = available(results.scale.rates, lambda lr: results.best(attention, method, lr).by_seed())
    style = {"color": colour(method), "label": METHOD_NAMES[method], "linestyle": linestyle(attention, method)}
    line_with_seeds(axes, losses, marker=".", **style)


def linestyle(attention: str, method: type[Method]) -> str:
    """QK norm is dashed in MLA; methods that the paper does not test are dotted."""
    if method not in PAPER_METHODS:
        return ":"
    return "--" if attention == "mla" and method is QKNorm else "-"


def limit_y(axes: Any) -> None:
    """Exclude values far above the lowest line: mostly the first fifth of training."""
    ends = [line.get_ydata()[-1] for line in axes.lines if len(line.get_ydata())]
    axes.set_visible(bool(ends))
    if ends:
        axes.set_ylim(min(ends) - 0.05, min(max(ends) + 0.2, min(ends) + 1.6))


def norms(results: Results) -> Figure:
    """Figure 3. Does it matter how weights are measured, and how well must tau be known?

    Left: validation loss of QuacK in MHA at the highest rate. Right: validation loss at the end against tau, a dot for
    every seed.
    """
    lr = results.scale.high
    figure, [[left, right]] = panels(1, 2, 4.2, 3.2)
    for tau, shade in zip(DECADES, ("#c7e9c0", "#74c476", "#0b6e4f", "#00261a"), strict=True):
        for method, dash in ((Quack(tau), "-"), (Quack(tau, norm="spectral"), "--")):
            line = {"color": shade, "linestyle": dash, "label": f"tau {tau:g}, {method.norm}"}
            method_curve(left, results, "mha", method, lr, validation, **line)
    left.set(xlabel="step", ylabel="validation loss", title=f"MHA, QuacK, lr {lr:g}")
    limit_y(left)
    kinds: dict[str, dict[float, Method]] = {
        "QuacK, Frobenius": {tau: Quack(tau) for tau in QUACK_TAUS},
        "QuacK, spectral": {tau: Quack(tau, norm="spectral") for tau in DECADES},
        "constant tau": {tau: ConstantTau(tau) if tau != 1 else Default() for tau in CONSTANT_TAUS},
    }
    for label, settings in kinds.items():
        losses_of_setting = available(settings.values(), lambda setting: results.best("mha", setting, lr).by_seed())
        losses = {tau: losses_of_setting[each] for tau, each in settings.items() if each in losses_of_setting}
        dash = "--" if "spectral" in label else "-"
        line_with_seeds(right, losses, color=colour(next(iter(settings.values()))), label=label, linestyle=dash)
    if not right.lines:
        raise NotRun("no run of QuacK or a constant tau")
    if left.lines:
        legend_below(figure, left.get_legend_handles_labels()[0])
    right.set(xscale="log", xlabel="tau", ylabel="validation loss at the end", title=f"MHA, lr {lr:g}")
    right.legend(loc="upper right")
    return figure


def logits(results: Results) -> Figure:
    """Figure 4. The largest logit and the mean |change| of a logit in one step: the middle head of the middle layer.

    MLA at the highest learning rate; the paper's figure is at its middle rate, where its default is unstable already.
    """
    spec, lr = results.scale.attentions["mla"], results.scale.high
    layer, head = results.scale.base.shape.layers // 2, spec.heads // 2
    figure, [axes] = panels(1, 2, 4.0, 3.0)
    names = {"max": "largest logit", "step_change": "mean |change| in a step"}
    for panel, (name, label) in zip(axes, names.items(), strict=True):
        for method in PAPER_METHODS:
            method_curve(panel, results, "mla", method, lr, of_head(name, layer, head))
        panel.set(yscale="log", xlabel="step", ylabel=label, title=f"MLA, lr {lr:g}, layer {layer}, head {head}")
    if not axes[0].lines:
        raise NotRun("no run with MLA")
    legend_below(figure, axes[0].get_legend_handles_labels()[0])
    return figure


def of_head(name: str, layer: int, head: int) -> Points:
    """The curve of a statistic of one head, counted from 0; only values above 0, for a logarithmic axis."""

    def points(entry: Entry) -> Iterable[tuple[int, Any]]:
        found = ((step, table[layer][head]) for step, table in entry.curve("logits", name) if step)
        return ((step, value) for step, value in found if value is not None and value > 0)

    return points


def sensitivity(results: Results) -> Figure:
    """Figure 5. How much does each method depend on a well chosen learning rate?

    Learning-rate sensitivity (Wortsman et al. 2023): how far the loss is above its minimum over learning rates, in the
    mean over them. A method that has a setting (tau, threshold) uses its best one at each rate. Lower is better; a dot
    for every seed.
    """
    figure, [row] = panels(1, 2, 4.0, 2.8)
    for axes, attention in zip(row, BOTH, strict=True):
        by_method = available(METHOD_NAMES, partial(results.lr_sensitivity, attention))
        for x, (method, values) in enumerate(by_method.items()):
            axes.bar(x, mean(values.values()), color=colour(method), alpha=0.6)
            axes.scatter([x] * len(values), list(values.values()), s=9, color="black", zorder=3)
        axes.set_xticks(range(len(by_method)), [METHOD_NAMES[method] for method in by_method], rotation=40, ha="right")
        axes.set(title=attention.upper(), ylabel="learning-rate sensitivity")
    if not any(axes.patches for axes in row):
        raise NotRun("no method was run at all learning rates")
    return figure


def heatmaps(results: Results) -> Figure:
    """Figure 6. Where do logits grow?

    The largest logit of every layer and head at the end of training at the highest learning rate, mean over seeds.
    """
    rows = [labelled_tables(results, attention) for attention in BOTH]
    columns = max(len(row) for row in rows)
    if not columns:
        raise NotRun("no run at the highest learning rate")
    figure, grid = panels(2, columns, 2.0, 2.1)
    values = [value for row in rows for table in row.values() for line in table for value in line]
    lowest, highest = max(min(values), 1.0), max(values)
    norm = LogNorm(min(lowest, highest / 1.01), highest)
    for row, axes_row in zip(rows, grid, strict=True):
        for axes in axes_row[len(row) :]:
            axes.set_visible(False)
        for (label, table), axes in zip(row.items(), axes_row, strict=False):
            image = axes.imshow(table, norm=norm, cmap="magma", origin="lower")
            axes.set(title=label, xlabel="head", ylabel="layer")
            axes.title.set_fontsize(7)
            axes.set_xticks(range(len(table[0])))
            axes.set_yticks(range(len(table)))
    figure.colorbar(image, ax=[axes for row in grid for axes in row], label="largest logit")
    return figure


def labelled_tables(results: Results, attention: str) -> dict[str, list[list[float]]]:
    """The table of largest logits of each of the paper's methods, by `MHA, QuacK (tau 1)`."""

    def labelled(method: type[Method]) -> tuple[str, list[list[float]]]:
        runs = results.best(attention, method, results.scale.high)
        return f"{attention.upper()}, {runs}", mean_table(runs)

    return dict(available(PAPER_METHODS, labelled).values())


def mean_table(runs: MethodRuns) -> list[list[float]]:
    """Layers x heads: the largest logit at the last measurement, mean over the seeds that have one."""
    measured = ([table for _, table in entry.curve("logits", "max")] for entry in runs.runs.values())
    tables = [tables[-1] for tables in measured if tables]
    if not tables:
        raise NotRun("no logits were measured")
    return [
        [mean(positive(value) for value in head) for head in zip(*layer, strict=True)]
        for layer in zip(*tables, strict=True)
    ]


def positive(value: float | None) -> float:
    """A logit for a logarithmic scale: at least 0.001, and 1e9 for NaN or infinity, which the ledger has as null."""
    return max(value, 1e-3) if value is not None else 1e9


FIGURES: dict[str, Draw] = {
    "hero": hero,
    "figure-1-critical-rate": critical_rate,
    "figure-2-interventions": interventions,
    "figure-3-norms": norms,
    "figure-4-logits": logits,
    "figure-5-sensitivity": sensitivity,
    "figure-6-heatmaps": heatmaps,
    "figure-7-sizes": sizes,
    CLAIMS_FIGURE: forest,
    "figure-9-stress": stress,
}
