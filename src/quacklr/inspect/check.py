"""What rules say of a model's attention, held against what a forward of a batch shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from quacklr.find.compare import differences
from quacklr.find.discover import UNSEEN, found_by_rule
from quacklr.find.finding import Finding
from quacklr.find.measure.assemble import measured_paths
from quacklr.inspect.target import told
from quacklr.util.modules import named_parameters


@dataclass(frozen=True, slots=True)
class Comparison:
    """Whether a measurement agrees with the rule; None if there is nothing to compare. If not, how they differ."""

    agrees: bool | None
    word: str
    difference: str = ""
    measured: Finding | None = None


UNMEASURED = Comparison(None, "")
AGREES = Comparison(True, "agrees")
NOT_SEEN = Comparison(None, "not seen")  # did not run on the batch, or makes no attention
UNREADABLE = Comparison(None, "not readable")
ONLY_MEASURED = Comparison(None, "only measured")  # known to no rule
NOT_COMPARED = Comparison(None, "not compared")  # declared with tensors that are no parameters of the model


class NoMeasurementError(ValueError):
    """A batch that does not run, or shows no attention."""


def checked(model: nn.Module, sample: Any) -> tuple[dict[str, Finding], dict[str, Comparison]]:
    """What is found by rule, or else by measuring; and how the two compare."""
    ruled = found_by_rule(model)
    seen = _within_declared(ruled, _seen(model, sample))
    checks = {name: _compared(model, finding, seen.get(name)) for name, finding in ruled.items()}
    found = dict(ruled)
    for name, finding in seen.items():
        if name not in ruled or ruled[name].unknown:
            found[name] = finding
            checks[name] = UNREADABLE if finding.unknown else ONLY_MEASURED
    return found, checks


def _seen(model: nn.Module, sample: Any) -> dict[str, Finding]:
    try:
        seen = measured_paths(model, sample)
    except Exception as error:
        raise NoMeasurementError(str(error) if isinstance(error, ValueError) else told(error)) from error
    if not seen:
        raise NoMeasurementError(f"{type(model).__name__}: {UNSEEN}")
    return seen


def _within_declared(ruled: Mapping[str, Finding], seen: Mapping[str, Finding]) -> dict[str, Finding]:
    """What was seen, with all that is inside of a module that declares its paths put together under its name."""
    together: dict[str, Finding] = {}
    for name, finding in seen.items():
        outer = next((o for o in ruled if ruled[o].declared and (not o or f"{name}.".startswith(f"{o}."))), name)
        before = together.get(outer)
        together[outer] = finding if before is None else Finding([*before.paths, *finding.paths], finding.reason)
    return together


def _compared(model: nn.Module, ruled: Finding, seen: Finding | None) -> Comparison:
    if seen is None:
        return NOT_SEEN
    if seen.unknown:
        return UNREADABLE
    known = {id(parameter) for _, parameter in named_parameters(model)}
    if any(id(part.param) not in known for path in ruled.paths for weight in path.weights for part in weight.parts):
        return NOT_COMPARED
    wrong = differences(ruled.paths, seen.paths, model)
    return Comparison(False, "differs", wrong, seen) if wrong else AGREES
