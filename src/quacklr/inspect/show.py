"""A report as text: a table with equal layers on one line, what is left alone and why, and a sentence to end with."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import zip_longest

from quacklr.inspect.check import ONLY_MEASURED
from quacklr.inspect.layers import AttentionLayer, block_norms
from quacklr.inspect.report import ModelReport, summary
from quacklr.util.layer_names import pattern, shape

Cell = list[str]  # its lines
WIDTH = 34  # of a cell before it is wrapped


def show(report: ModelReport, name: str) -> str:
    """The whole text."""
    model = type(report.model).__name__
    made = "shapes only" if _on_meta(report) else "with its weights"
    head = [f"{name}: {model}, {made}" if model != name else f"{name}, {made}", ""]
    sections = [_table(report), _measured(report), _different(report), _left_alone(report)]
    body = [line for section in sections if section for line in [*section, ""]]
    return "\n".join([*head, *body, summary(report)])


def _on_meta(report: ModelReport) -> bool:
    return any(parameter.is_meta for parameter in report.model.parameters())


def _table(report: ModelReport) -> list[str]:
    """A row for all layers that are equal."""
    alike: dict[object, list[AttentionLayer]] = {}
    for layer in report.layers:
        if layer.finding.paths:
            key = shape(layer.module), layer.kind, layer.layout, _sizes(layer), layer.logit, str(layer.rates())
            alike.setdefault((*key, layer.check.word), []).append(layer)
    rows = [_row(layers, report) for layers in alike.values()]
    return _columns([[[title] for title in rows[0]], *(list(row.values()) for row in rows)]) if rows else []


def _row(layers: Sequence[AttentionLayer], report: ModelReport) -> dict[str, Cell]:
    """The cells of some equal layers by the titles of their columns."""
    one = layers[0]
    rates = one.rates()
    row = {
        "attention": [_names([layer.module for layer in layers])],
        "class": [one.kind],
        "layout": textwrap.wrap(one.layout, WIDTH, break_long_words=False, break_on_hyphens=False),
        "heads/keys/size": [_sizes(one)],
        "logit": one.logit.replace(" + ", "\n+ ").split("\n"),
        "rates follow": [
            f"{w.name} ~ {rates[w.name]}" if w.name in rates else f"{w.name} has none" for w in one.weights
        ],
    }
    if not _on_meta(report):
        row["norms now"] = [_norms(layers, weight.name) for weight in one.weights]
    if report.measured_on:
        row["measured"] = [one.check.word]
    return row


def _names(names: Sequence[str]) -> str:
    """The pattern of names; of one that is too long for a table, the first name."""
    written = pattern(names)
    count = f" ({len(names)})" if len(names) > 1 else ""
    return (written if len(written) < 80 else f"{names[0]}, ...") + count


def _sizes(layer: AttentionLayer) -> str:
    return f"{layer.heads}/{layer.groups}/{'+'.join(map(str, layer.sizes))}"


def _norms(layers: Sequence[AttentionLayer], role: str) -> str:
    """The range of the norms of all blocks of a weight, in all of the layers."""
    ranges = [block_norms(weight) for layer in layers for weight in layer.weights if weight.name == role]
    low, high = (f"{value:.3g}" for value in (min(float(r.min()) for r in ranges), max(float(r.max()) for r in ranges)))
    return f"|{role}| {low}" if low == high else f"|{role}| {low}..{high}"


def _measured(report: ModelReport) -> list[str]:
    """What was measured on, and what no rule knew."""
    if report.failure:
        return [f"not measured: {report.failure}"]
    if not report.measured_on:
        return []
    only = {layer.module: _found(layer) for layer in report.small if layer.check == ONLY_MEASURED}
    return [f"measured on {report.measured_on}, {len(report.small or report.layers)} attention layers", *_lines(only)]


def _found(layer: AttentionLayer) -> str:
    return f"known to no rule, measured: {f'{layer.layout}, {layer.logit}' if layer.logit else layer.finding.reason}"


def _different(report: ModelReport) -> list[str]:
    """Both sides, where rule and measurement differ."""
    told = {layer.module: _both(layer) for layer in report.different}
    where = " in the small model" if report.small else ""
    return [f"rule and measurement differ{where}:", *_lines(told)] if told else []


def _both(layer: AttentionLayer) -> str:
    """In words, if those differ, and in rows, with names within the module so that layers are told together."""
    measured = layer.measured_layout or (layer.check.measured.reason if layer.check.measured else "")
    ruled = layer.layout or layer.finding.reason
    words = f"by rule {ruled}, measured {measured}: " if ruled != measured else f"{ruled}: "
    return words + (layer.check.difference.replace(f"{layer.module}.", "") if layer.module else layer.check.difference)


def _left_alone(report: ModelReport) -> list[str]:
    kinds = {layer.module or "(model)": layer for layer in report.layers}
    told = {name: why + _seen(kinds.get(name)) for name, why in report.left_alone.items()}
    return ["left alone:", *_lines(told)] if told else []


def _seen(layer: AttentionLayer | None) -> str:
    """The class of a layer, and what measuring it gave."""
    if layer is None:
        return ""
    return f" [{layer.kind}{f'; measured: {layer.check.word}' if layer.check.word else ''}]"


def _lines(told: dict[str, str]) -> list[str]:
    """A line for all names that differ in their numbers only, and of which the same is told."""
    alike: dict[tuple[str, str], list[str]] = {}
    for name, what in told.items():
        alike.setdefault((shape(name), what), []).append(name)
    return [f"  {_names(names)}: {what}" for (_, what), names in alike.items()]


def _columns(rows: Sequence[Sequence[Cell]]) -> list[str]:
    """Cells side by side; one with several lines makes its row as high."""
    widths = [max(len(line) for row in rows for line in row[i]) for i in range(len(rows[0]))]
    lines = [cells for row in rows for cells in zip_longest(*row, fillvalue="")]
    return ["  " + "  ".join(c.ljust(w) for c, w in zip(cells, widths, strict=True)).rstrip() for cells in lines]
