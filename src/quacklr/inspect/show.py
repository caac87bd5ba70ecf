"""A report as text: a table with one row for equal layers, what is left alone and why, and a summary."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

import torch

from quacklr.core.blocks import Blocks
from quacklr.core.norms import frobenius
from quacklr.inspect.comparison import ONLY_MEASURED
from quacklr.inspect.layers import AttentionLayer
from quacklr.inspect.report import ModelReport
from quacklr.util.layer_names import pattern, shape
from quacklr.util.text_table import columns, grouped, value_range

WIDTH = 34  # of a cell before it is wrapped


def show(report: ModelReport, name: str) -> str:
    """The whole text."""
    model = type(report.model).__name__
    made = "shapes only" if _on_meta(report) else "with its weights"
    head = [f"{name}: {model}, {made}" if model != name else f"{name}, {made}"]
    sections = [head, _table(report), _measured(report), _different(report), _left_alone(report), [report.summary()]]
    return "\n\n".join("\n".join(section) for section in sections if section)


def _on_meta(report: ModelReport) -> bool:
    return any(parameter.is_meta for parameter in report.model.parameters())


def _table(report: ModelReport) -> list[str]:
    """One row for all layers that are equal but for the numbers in their names."""
    equal: dict[object, list[AttentionLayer]] = {}
    for layer in report.layers:
        if layer.finding.paths:
            key = shape(layer.module), layer.kind, layer.layout, _sizes(layer), layer.logit, str(layer.rates())
            equal.setdefault((*key, layer.scale, layer.comparison.word), []).append(layer)
    rows = [_row(layers, report) for layers in equal.values()]
    return columns([list(rows[0]), *(list(row.values()) for row in rows)]) if rows else []


def _row(layers: Sequence[AttentionLayer], report: ModelReport) -> dict[str, str]:
    """The cells of equal layers by column title."""
    one = layers[0]
    rates, weights = one.rates(), one.weights
    follow = [f"{w.name} ~ {rates[w.name]}" if w.name in rates else f"{w.name} has none" for w in weights]
    row = {
        "attention": _names([layer.module for layer in layers]),
        "class": one.kind,
        "layout": textwrap.fill(one.layout, WIDTH, break_long_words=False, break_on_hyphens=False),
        "heads/keys/size": _sizes(one),
        "logit": one.logit.replace(" + ", "\n+ "),
        "scale": one.scale,
        "rates follow": "\n".join(follow),
    }
    if not _on_meta(report):
        row["norms now"] = "\n".join(_norms(layers, weight.name) for weight in weights)
    if report.measured_on:
        row["measured"] = one.comparison.word
    return row


def _names(names: Sequence[str]) -> str:
    """The names as one pattern, or the first name if the pattern is too long for a table."""
    written = pattern(names)
    count = f" ({len(names)})" if len(names) > 1 else ""
    return (written if len(written) < 80 else f"{names[0]}, ...") + count


def _sizes(layer: AttentionLayer) -> str:
    return f"{layer.heads}/{layer.groups}/{'+'.join(map(str, layer.sizes))}"


def _norms(layers: Sequence[AttentionLayer], role: str) -> str:
    """The range of the norms of all blocks of a weight, over some layers."""
    weights = [weight for layer in layers for weight in layer.weights if weight.name == role]
    norms = [frobenius(piece.copy())[0].cpu() for piece in Blocks(weights).local]
    return f"|{role}| {value_range(torch.cat(norms))}"


def _measured(report: ModelReport) -> list[str]:
    """The model that was measured, and its layers that no rule applies to."""
    if report.failure:
        return [f"not measured: {report.failure}"]
    if not report.measured_on:
        return []
    only = {layer.module: _found(layer) for layer in report.small if layer.comparison == ONLY_MEASURED}
    return [f"measured on {report.measured_on}, {len(report.small or report.layers)} attention layers", *_lines(only)]


def _found(layer: AttentionLayer) -> str:
    return f"known to no rule, measured: {f'{layer.layout}, {layer.logit}' if layer.logit else layer.finding.reason}"


def _different(report: ModelReport) -> list[str]:
    """Rule and measurement, where they differ."""
    texts = {layer.module: _both(layer) for layer in report.different}
    where = " in the small model" if report.small else ""
    return [f"rule and measurement differ{where}:", *_lines(texts)] if texts else []


def _both(layer: AttentionLayer) -> str:
    """Both layouts, if they differ, and both sets of rows, with names within the module so that layers are grouped."""
    measured = layer.measured_layout or (layer.comparison.measured.reason if layer.comparison.measured else "")
    by_rule, difference = layer.layout or layer.finding.reason, layer.comparison.difference
    words = f"by rule {by_rule}, measured {measured}: " if by_rule != measured else f"{by_rule}: "
    return words + (difference.replace(f"{layer.module}.", "") if layer.module else difference)


def _left_alone(report: ModelReport) -> list[str]:
    layers = {layer.module or "(model)": layer for layer in report.layers}
    texts = {name: why + _kind(layers.get(name)) for name, why in report.left_alone.items()}
    return ["left alone:", *_lines(texts)] if texts else []


def _kind(layer: AttentionLayer | None) -> str:
    """The class of a layer, and the result of measuring it."""
    word = "" if layer is None else layer.comparison.word
    return "" if layer is None else f" [{layer.kind}{f'; measured: {word}' if word else ''}]"


def _lines(texts: Mapping[str, str]) -> list[str]:
    return grouped(texts.items(), _names)
