"""Everything that `quacklr inspect` says of a model, before it is written as text or JSON."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from quacklr.core.sensitivity import Rule
from quacklr.core.validate import validate_stepped
from quacklr.find.discover import found_by_rule, logit_paths
from quacklr.find.finding import Finding
from quacklr.inspect.check import NOT_SEEN, ONLY_MEASURED, UNMEASURED, NoMeasurementError, checked
from quacklr.inspect.layers import AttentionLayer, controlled, layers_of, named_paths
from quacklr.inspect.target import BadTargetError, Target, told
from quacklr.quack import QuacK
from quacklr.util.layer_names import shape

WITH_BATCH = "QuacK(logit_paths(model, batch), optimizer)"


@dataclass(frozen=True, slots=True)
class ModelReport:
    """The layers of a model; those of a small one that ran in its place; what QuacK would raise."""

    model: nn.Module
    layers: list[AttentionLayer]
    running: nn.Module
    small: list[AttentionLayer]
    measured_on: str
    failure: str
    refusal: str

    @property
    def attached(self) -> list[AttentionLayer]:
        """Layers with a weight that gets a rate."""
        return [layer for layer in self.layers if any(weight.trains for weight in layer.weights)]

    @property
    def unrecognised(self) -> list[AttentionLayer]:
        """Layers that neither a rule nor a measurement could read; one that made no attention is none."""
        unknown = [layer for layer in self.layers if layer.finding.unknown]
        if self.measured_on == "":
            return unknown
        explained = ONLY_MEASURED if self.small else NOT_SEEN
        return [layer for layer in unknown if layer.check != explained]

    @property
    def different(self) -> list[AttentionLayer]:
        """Layers that are not what a rule says, of the model or of the small one in its place."""
        return [layer for layer in self.small or self.layers if layer.check.agrees is False]

    @property
    def only_measured(self) -> list[AttentionLayer]:
        """Layers whose paths are known from a measurement alone."""
        of_model = [layer for layer in self.layers if layer.check == ONLY_MEASURED]
        return of_model if self.small else [layer for layer in of_model if layer.finding.paths]

    @property
    def numbers(self) -> tuple[int, int]:
        """How many numbers of the model get a rate, and how many there are."""
        return controlled(self.attached), sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def left_alone(self) -> dict[str, str]:
        """For every layer, or part of one, without a rate, why."""
        return {name: why for layer in self.layers for name, why in layer.left_alone.items()}

    @property
    def exit_code(self) -> int:
        """1 if something is not recognised, differs, could not be measured, or would raise without being explained."""
        normed = bool(self.layers) and not self.attached and not any(layer.finding.paths for layer in self.layers)
        raises = bool(self.refusal) and not normed
        return int(bool(self.unrecognised or self.different or self.failure or raises))


def report(target: Target, measure: bool) -> ModelReport:
    """Look at a model by rule, and if asked to, measure it or a small one of the same kind."""
    found = _ruled(target.model)
    checks = dict.fromkeys(found, UNMEASURED)
    running, small, failure = target.model, list[AttentionLayer](), ""
    if measure:
        try:
            running, sample = target.runnable()
            if running is target.model:
                found, checks = checked(running, sample)
            else:
                small = layers_of(running, *checked(running, sample))
        except NoMeasurementError as error:
            failure = str(error)
    layers = layers_of(target.model, found, checks)
    layers = [_checked_by(layer, small) for layer in layers] if small else layers
    measured_on = (target.measured_on or "the model") if measure and not failure else ""
    return ModelReport(target.model, layers, running, small, measured_on, failure, _refusal(target.model, layers))


def _ruled(model: nn.Module) -> dict[str, Finding]:
    try:
        return found_by_rule(model)
    except Exception as error:  # from a module's own logit_paths()
        raise BadTargetError(f"{type(model).__name__}: its attention cannot be read: {told(error)}") from error


def _checked_by(layer: AttentionLayer, small: Sequence[AttentionLayer]) -> AttentionLayer:
    """The layer with what was measured of those in the same place of the small model, the worst of it."""
    order = {False: 0, None: 1, True: 2}
    checks = [other.check for other in small if _same_to_rules(layer, other)]
    worst = min(checks, key=lambda check: order[check.agrees], default=NOT_SEEN)
    return replace(layer, check=replace(worst, measured=None))  # its parameters are not this model's


def _same_to_rules(layer: AttentionLayer, other: AttentionLayer) -> bool:
    """Whether two layers have the same class and place, and both or neither are known to a rule."""
    unknown = [one.finding.unknown or one.check == ONLY_MEASURED for one in (layer, other)]
    return shape(layer.module) == shape(other.module) and layer.kind == other.kind and unknown[0] == unknown[1]


def _refusal(model: nn.Module, layers: Sequence[AttentionLayer]) -> str:
    """What attaching would raise; nothing if it would not."""
    paths = named_paths(layers)
    optimizer = torch.optim.SGD(list(model.parameters()) or [torch.zeros(1)], lr=1.0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if not paths:
                logit_paths(model)
            elif any(parameter.is_meta for parameter in model.parameters()):
                validate_stepped(Rule(paths).weights, [optimizer])
            else:
                QuacK(paths, optimizer).remove()
    except ValueError as error:
        return str(error)
    return ""


def summary(report: ModelReport) -> str:
    """The last line: what QuacK does with the model, in one sentence."""
    if report.refusal:
        return f"QuacK(model, optimizer) would raise: {_nothing(report) or report.refusal}"
    call = WITH_BATCH if report.only_measured and not report.small else "QuacK(model, optimizer)"
    count, total = report.numbers
    share = f"{len(report.attached)} attention layer{'s' * (len(report.attached) != 1)}"
    sentence = f"{call} attaches to {share}, {_large(count)} parameters ({100 * count / total:.3g} % of all)"
    return sentence + "".join(f"; {more}" for more in _mores(report))


def _nothing(report: ModelReport) -> str:
    """Why there is nothing to control, if all of it is told above; the sentence that is raised tells it again."""
    if not report.layers or report.unrecognised or any(layer.finding.paths for layer in report.layers):
        return ""
    return f"it has nothing to control, since all of its {len(report.layers)} attention layers are left alone"


def _mores(report: ModelReport) -> list[str]:
    mores = []
    if report.different:
        mores.append(
            "but a rule differs from what was measured, so do not trust it: give the module a method logit_paths()"
        )
    if report.unrecognised:
        how = f"pass a batch that the model takes, {WITH_BATCH}"
        tried = "give them a method logit_paths()" if report.measured_on else f"{how}, or see them with --measure"
        mores.append(f"{len(report.unrecognised)} not recognised: {tried}")
    elif report.small and report.only_measured:
        mores.append(f"{len(report.only_measured)} more with a batch: {WITH_BATCH}")
    return mores


def _large(number: int) -> str:
    for size, word in ((10**9, "billion"), (10**6, "million")):
        if number >= size:
            return f"{number / size:.3g} {word}"
    return f"{number:,}"
