"""The paper's four figures and two more, each a function of the results alone; a part that was not run is left out.

Lines are means over seeds, bands their range; a method is at its best setting, chosen for each seed on the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from statistics import mean
from typing import Any

from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from quacklr.lab.ledger import Entry
from quacklr.lab.methods import ConstantTau, Default, Method, QKNorm, Quack
from quacklr.lab.report.style import colour, curve, dots, panels, validation
from quacklr.lab.studies.names import NAMES, PAPERS
from quacklr.lab.studies.questions import CONSTANT_TAUS, DECADES, QUACK_TAUS
from quacklr.lab.studies.results import NotRun, Results, Seeds, loss, lr_sensitivity, measured
from quacklr.lab.studies.verdicts import title

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
        with suppress(NotRun):
            runs = results.best("mha", method, results.scale.high)
            curve(axes, runs, validation, color=colour(method), label=label, linestyle=dash)
    if not axes.lines:
        raise NotRun("no run with MHA at the highest learning rate")
    axes.set(xlabel="step", ylabel="validation loss", title=f"MHA, Muon at lr {results.scale.high:g}")
    axes.legend()
    return figure


def interventions(results: Results) -> Figure:
    """Figure 2. Validation loss of every method, in MHA and MLA, at each learning rate; on the right at the end.

    QK norm is dashed in MLA, where it usually means that keys are cached. What the paper does not test is dotted, in
    the last column. Where logits stay below its threshold, QK clip is the default. Axes leave out what is far above.
    """
    rates = results.scale.rates
    figure, grid = panels(2, len(rates) + 1, 2.7, 2.5)
    for attention, row in zip(("mha", "mla"), grid, strict=True):
        for axes, lr in zip(row, rates, strict=False):
            for method in PAPERS:
                with suppress(NotRun):
                    runs = results.best(attention, method, lr)
                    curve(
                        axes,
                        runs,
                        validation,
                        color=colour(method),
                        label=NAMES[method],
                        linestyle=dash(attention, method),
                    )
            axes.set(title=f"{attention.upper()}, lr {lr:g}", xlabel="step")
            focus(axes)
        row[0].set_ylabel("validation loss")
        final_losses(results, attention, row[-1])
    if not any(axes.lines for row in grid for axes in row):
        raise NotRun("no run of any method")
    named: dict[str, Any] = {}
    for row in reversed(grid):  # MHA's last: there no line is dashed
        named |= dict(zip(*reversed(row[-1].get_legend_handles_labels()), strict=True))
    shown = [named[name] for name in NAMES.values() if name in named]
    figure.legend(handles=shown, loc="outside lower center", ncols=len(shown))
    return figure


def final_losses(results: Results, attention: str, axes: Any) -> None:
    """Loss at the end against the learning rate."""
    for method in NAMES:
        found = {}
        for lr in results.scale.rates:
            with suppress(NotRun):
                found[lr] = measured(results.best(attention, method, lr), loss)
        if found:
            style = {
                "color": colour(method),
                "label": NAMES[method],
                "linestyle": dash(attention, method),
                "marker": ".",
            }
            dots(axes, list(found), list(found.values()), **style)
    axes.set(xscale="log", xlabel="learning rate", title=f"{attention.upper()}, at the end")


def dash(attention: str, method: type[Method]) -> str:
    """QK norm is dashed in MLA; what the paper does not test is dotted."""
    if method not in PAPERS:
        return ":"
    return "--" if attention == "mla" and method is QKNorm else "-"


def focus(axes: Any) -> None:
    """Leave out of a panel what lies far above the lowest line: the first fifth of training, mostly."""
    ends = [line.get_ydata()[-1] for line in axes.lines if len(line.get_ydata())]
    axes.set_visible(bool(ends))
    if ends:
        axes.set_ylim(min(ends) - 0.05, min(max(ends) + 0.2, min(ends) + 1.6))


def norms(results: Results) -> Figure:
    """Figure 3. Does it matter how weights are measured, and how well must tau be known?

    Left: validation loss of QuacK in MHA at the highest rate. Right: at the end against tau, a dot for every seed.
    """
    lr = results.scale.high
    figure, [[left, right]] = panels(1, 2, 4.2, 3.2)
    shades = {0.01: "#c7e9c0", 0.1: "#74c476", 1.0: "#0b6e4f", 10.0: "#00261a"}
    for tau, shade in shades.items():
        for method, line in ((Quack(tau), "-"), (Quack(tau, norm="spectral"), "--")):
            with suppress(NotRun):
                runs = results.best("mha", method, lr)
                curve(left, runs, validation, color=shade, linestyle=line, label=f"tau {tau:g}, {method.norm}")
    left.set(xlabel="step", ylabel="validation loss", title=f"MHA, QuacK, lr {lr:g}")
    focus(left)
    kinds: dict[str, list[tuple[float, Method]]] = {
        "QuacK, Frobenius": [(tau, Quack(tau)) for tau in QUACK_TAUS],
        "QuacK, spectral": [(tau, Quack(tau, norm="spectral")) for tau in DECADES],
        "constant tau": [(tau, ConstantTau(tau) if tau != 1 else Default()) for tau in CONSTANT_TAUS],
    }
    for label, settings in kinds.items():
        found = {}
        for tau, setting in settings:
            with suppress(NotRun):
                found[tau] = measured(results.best("mha", setting, lr), loss)
        if found:
            line = "--" if "spectral" in label else "-"
            dots(right, list(found), list(found.values()), color=colour(settings[0][1]), label=label, linestyle=line)
    if not right.lines:
        raise NotRun("no run of QuacK or a constant tau")
    if left.lines:
        figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=len(DECADES))
    right.set(xscale="log", xlabel="tau", ylabel="validation loss at the end", title=f"MHA, lr {lr:g}")
    right.legend(loc="upper right")
    return figure


def logits(results: Results) -> Figure:
    """Figure 4. The largest logit and the mean |change| of a logit in one step: the middle head of the middle layer.

    MLA at the highest learning rate; the paper's figure is at its middle one, where its default breaks already.
    """
    spec, lr = results.scale.attentions["mla"], results.scale.high
    layer, head = results.scale.base.shape.layers // 2, spec.heads // 2
    figure, [axes] = panels(1, 2, 4.0, 3.0)
    for panel, name, label in zip(
        axes, ("max", "step_change"), ("largest logit", "mean |change| in a step"), strict=True
    ):
        for method in PAPERS:
            with suppress(NotRun):
                runs = results.best("mla", method, lr)
                curve(panel, runs, of_head(name, layer, head), color=colour(method), label=NAMES[method])
        panel.set(yscale="log", xlabel="step", ylabel=label, title=f"MLA, lr {lr:g}, layer {layer}, head {head}")
    if not axes[0].lines:
        raise NotRun("no run with MLA")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(PAPERS))
    return figure


def of_head(name: str, layer: int, head: int) -> Callable[[Entry], Iterable[tuple[int, Any]]]:
    """The curve of one statistic of one head, counted from 0; what is above 0, as on a logarithmic axis."""

    def points(entry: Entry) -> Iterable[tuple[int, Any]]:
        found = ((step, table[layer][head]) for step, table in entry.curve("logits", name) if step)
        return ((step, value) for step, value in found if value is not None and value > 0)

    return points


def sensitivity(results: Results) -> Figure:
    """Figure 5. How much does each method depend on a well chosen learning rate?

    Learning-rate sensitivity (Wortsman et al. 2023): how far the loss is above its minimum over learning rates, in the
    mean over them, with each method at its best setting at each rate: one that has a knob may turn it. Lower is better;
    a dot for every seed.
    """
    figure, [row] = panels(1, 2, 4.0, 2.8)
    for axes, attention in zip(row, ("mha", "mla"), strict=True):
        found = {}
        for method in NAMES:
            with suppress(NotRun):
                found[method] = lr_sensitivity(results, attention, method)
        for place, (method, values) in enumerate(found.items()):
            axes.bar(place, mean(values.values()), color=colour(method), alpha=0.6)
            axes.scatter([place] * len(values), list(values.values()), s=9, color="black", zorder=3)
        axes.set_xticks(range(len(found)), [NAMES[method] for method in found], rotation=40, ha="right")
        axes.set(title=attention.upper(), ylabel="learning-rate sensitivity")
    if not any(axes.patches for axes in row):
        raise NotRun("no method was run at all learning rates")
    return figure


def heatmaps(results: Results) -> Figure:
    """Figure 6. Where do logits grow?

    The largest logit of every layer and head at the end of training at the highest learning rate, mean over seeds.
    """
    lr = results.scale.high
    found: list[tuple[str, list[tuple[Seeds, list[list[float]]]]]] = []
    for attention in ("mha", "mla"):
        row: list[tuple[Seeds, list[list[float]]]] = []
        for method in PAPERS:
            with suppress(NotRun):
                runs = results.best(attention, method, lr)
                row.append((runs, mean_table(runs)))
        found.append((attention, row))
    columns = max(len(row) for _, row in found)
    if not columns:
        raise NotRun("no run at the highest learning rate")
    figure, grid = panels(2, columns, 2.0, 2.1)
    values = [value for _, row in found for _, table in row for line in table for value in line]
    lowest, highest = max(min(values), 1.0), max(values)
    colours = LogNorm(min(lowest, highest / 1.01), highest)
    for (attention, row), axes_row in zip(found, grid, strict=True):
        for axes in axes_row[len(row) :]:
            axes.set_visible(False)
        for (runs, table), axes in zip(row, axes_row, strict=False):
            image = axes.imshow(table, norm=colours, cmap="magma", origin="lower")
            axes.set(title=f"{attention.upper()}, {title(runs)}", xlabel="head", ylabel="layer")
            axes.title.set_fontsize(7)
            axes.set_xticks(range(len(table[0])))
            axes.set_yticks(range(len(table)))
    figure.colorbar(image, ax=[axes for row in grid for axes in row], label="largest logit")
    return figure


def mean_table(runs: Seeds) -> list[list[float]]:
    """Layers x heads: the largest logit at the last measurement, mean over the seeds that have one."""
    each = ([table for _, table in entry.curve("logits", "max")] for entry in runs.values())
    tables = [tables[-1] for tables in each if tables]
    if not tables:
        raise NotRun("no logits were measured")
    return [
        [mean(shown(table[layer][head]) for table in tables) for head in range(len(tables[0][0]))]
        for layer in range(len(tables[0]))
    ]


def shown(value: float | None) -> float:
    """A logit that a logarithmic scale can show; one that is no number is very large."""
    return max(value, 1e-3) if value is not None else 1e9


FIGURES: dict[str, Draw] = {
    "figure-1-critical-rate": critical_rate,
    "figure-2-interventions": interventions,
    "figure-3-norms": norms,
    "figure-4-logits": logits,
    "figure-5-sensitivity": sensitivity,
    "figure-6-heatmaps": heatmaps,
}
