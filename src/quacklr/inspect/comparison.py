"""Compare the paths that rules find in a model with those that are measured on a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from quacklr.find.compare import differences
from quacklr.find.discover import UNSEEN, found_by_table
from quacklr.find.finding import Finding
from quacklr.find.measure.assemble import measured_paths
from quacklr.inspect.target import NoMeasurementError, one_line
from quacklr.util.modules import named_parameters


@dataclass(frozen=True, slots=True)
class Comparison:
    """Whether the measurement of a layer agrees with its rule; None if there is nothing to compare."""

    agrees: bool | None
    word: str
    difference: str = ""
    measured: Finding | None = None


UNMEASURED = Comparison(None, "")
AGREES = Comparison(True, "agrees")
NOT_SEEN = Comparison(None, "not seen")  # the layer did not run on the batch, or did not attend
UNREADABLE = Comparison(None, "not readable")
ONLY_MEASURED = Comparison(None, "only measured")  # no rule applies to the layer
NOT_COMPARED = Comparison(None, "not compared")  # declared with tensors that are not parameters of the model


def compared(model: nn.Module, sample: Any) -> tuple[dict[str, Finding], dict[str, Comparison]]:
    """By module name: the finding of the rules, or else of the measurement; and the comparison of both."""
    by_rule = found_by_table(model)
    measured = _grouped_by_declaration(by_rule, _measured(model, sample))
    comparisons = {name: _comparison(model, finding, measured.get(name)) for name, finding in by_rule.items()}
    found = dict(by_rule)
    for name, finding in measured.items():
        if name not in by_rule or by_rule[name].unknown:
            found[name] = finding
            comparisons[name] = UNREADABLE if finding.unknown else ONLY_MEASURED
    return found, comparisons


def _measured(model: nn.Module, sample: Any) -> dict[str, Finding]:
    try:
        measured = measured_paths(model, sample)
    except Exception as error:  # the forward of the model can raise any error
        raise NoMeasurementError(str(error) if isinstance(error, ValueError) else one_line(error)) from error
    if not measured:
        raise NoMeasurementError(f"{type(model).__name__}: {UNSEEN}")
    return measured


def _grouped_by_declaration(by_rule: Mapping[str, Finding], measured: Mapping[str, Finding]) -> dict[str, Finding]:
    """The measured findings; those inside a module that declares its paths are merged under that module's name."""
    merged: dict[str, Finding] = {}
    for name, finding in measured.items():
        outer = next((o for o in by_rule if by_rule[o].declared and (not o or f"{name}.".startswith(f"{o}."))), name)
        before = merged.get(outer)
        merged[outer] = finding if before is None else Finding([*before.paths, *finding.paths], finding.reason)
    return merged


def _comparison(model: nn.Module, by_rule: Finding, measured: Finding | None) -> Comparison:
    if measured is None:
        return NOT_SEEN
    if measured.unknown:
        return UNREADABLE
    known = {id(parameter) for _, parameter in named_parameters(model)}
    if any(id(part.param) not in known for path in by_rule.paths for weight in path.weights for part in weight.parts):
        return NOT_COMPARED
    difference = differences(by_rule.paths, measured.paths, model)
    return Comparison(False, "differs", difference, measured) if difference else AGREES
