"""A report as one JSON object: every layer, every row."""

from __future__ import annotations

from typing import Any

from quacklr.core.path import LogitPath
from quacklr.core.weight import Weight
from quacklr.inspect.layers import AttentionLayer
from quacklr.inspect.report import ModelReport, summary
from quacklr.util.modules import named_parameters

Json = dict[str, Any]


def as_json(report: ModelReport, target: str) -> Json:
    """All that the text says, with rows of parameters and without collapsing; `small` if another model was measured."""
    count, total = report.numbers
    return {
        "target": target,
        "model": type(report.model).__name__,
        "parameters": total,
        "controlled": count,
        "attaches": not report.refusal,
        "summary": summary(report),
        "measured_on": report.measured_on or None,
        "not_measured": report.failure or None,
        "layers": _layers(report.layers, report),
        "left_alone": report.left_alone,
        "small": _layers(report.small, report) if report.small else None,
    }


def _layers(layers: list[AttentionLayer], report: ModelReport) -> list[Json]:
    model = report.model if layers is report.layers else report.running
    names = {id(parameter): name for name, parameter in named_parameters(model)}
    return [_layer(layer, names) for layer in layers]


def _layer(layer: AttentionLayer, names: dict[int, str]) -> Json:
    return {
        "module": layer.module,
        "class": layer.kind,
        "layout": layer.layout or None,
        "heads": layer.heads,
        "groups": layer.groups,
        "head_dim": sum(layer.sizes) or None,
        "paths": [_path(path, names) for path in layer.finding.paths],
        "rates": layer.rates(),
        "left_alone": layer.left_alone,
        "agrees": layer.check.agrees,
        "measured": layer.check.word or None,
        "measured_paths": [_path(path, names) for path in layer.check.measured.paths] if layer.check.measured else None,
    }


def _path(path: LogitPath, names: dict[int, str]) -> Json:
    return {
        "heads": path.heads,
        "weights": [
            _weight(weight, names) | {"block_of_head": read}
            for weight, read in zip(path.weights, path.reads.tolist(), strict=True)
        ],
    }


def _weight(weight: Weight, names: dict[int, str]) -> Json:
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
    """For each block its rows, as runs [start, stop]."""
    runs: list[list[list[int]]] = [[] for _ in range(weight.blocks)]
    before = -1
    for row, block in enumerate(weight.block_of_row.tolist()):
        if block >= 0 and block == before:
            runs[block][-1][1] = row + 1
        elif block >= 0:
            runs[block].append([row, row + 1])
        before = block
    return runs
