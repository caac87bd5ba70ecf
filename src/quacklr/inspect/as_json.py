"""A report as one JSON object: every layer, every row."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from torch import nn

from quacklr.core.path import LogitPath
from quacklr.core.weight import Weight
from quacklr.inspect.layers import AttentionLayer
from quacklr.inspect.report import ModelReport
from quacklr.util.modules import named_parameters

Json = dict[str, Any]
Names = dict[int, str]  # of parameters, by id


def as_json(report: ModelReport, target: str) -> Json:
    """The content of the text report, every layer, and its rows; `small` has the layers of a measured small model."""
    count, total = report.numbers
    return {
        "target": target,
        "model": type(report.model).__name__,
        "parameters": total,
        "controlled": count,
        "attaches": not report.attach_error,
        "summary": report.summary(),
        "measured_on": report.measured_on or None,
        "not_measured": report.failure or None,
        "layers": _layers(report.layers, report.model),
        "left_alone": report.left_alone,
        "small": _layers(report.small, report.running) if report.small else None,
    }


def _layers(layers: Sequence[AttentionLayer], model: nn.Module) -> list[Json]:
    names = {id(parameter): name for name, parameter in named_parameters(model)}
    return [_layer(layer, names) for layer in layers]


def _layer(layer: AttentionLayer, names: Names) -> Json:
    measured = layer.comparison.measured
    return {
        "module": layer.module,
        "class": layer.kind,
        "layout": layer.layout or None,
        "heads": layer.heads,
        "groups": layer.groups,
        "head_dim": sum(layer.sizes) or None,
        "paths": _paths(layer.finding.paths, names),
        "rates": layer.rates(),
        "left_alone": layer.left_alone,
        "agrees": layer.comparison.agrees,
        "measured": layer.comparison.word or None,
        "measured_paths": _paths(measured.paths, names) if measured else None,
    }


def _paths(paths: Sequence[LogitPath], names: Names) -> list[Json]:
    return [
        {
            "heads": path.heads,
            "scale": path.scale,
            "weights": [
                _weight(weight, names) | {"block_of_head": read}
                for weight, read in zip(path.weights, path.reads.tolist(), strict=True)
            ],
        }
        for path in paths
    ]


def _weight(weight: Weight, names: Names) -> Json:
    bias = weight.parts[1:]
    return {
        "role": weight.name,
        "parameter": names.get(id(weight.param)),
        "dim": weight.dim,
        "rows": _rows(weight),
        "frozen": not weight.param.requires_grad,
        "rated": weight.rated,
        "bias": {"parameter": names.get(id(bias[0].param)), "rows": _rows(bias[0])} if bias else None,
    }


def _rows(weight: Weight) -> list[list[list[int]]]:
    """For each block the intervals [start, stop] of its rows."""
    intervals: list[list[list[int]]] = [[] for _ in range(weight.blocks)]
    for block, run in groupby(enumerate(weight.block_of_row.tolist()), key=lambda row: row[1]):
        rows = [row for row, _ in run]
        if block >= 0:
            intervals[block].append([rows[0], rows[-1] + 1])
    return intervals
