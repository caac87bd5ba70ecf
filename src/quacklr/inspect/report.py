"""The result of `quacklr inspect`, before it is written as text or JSON."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from quacklr.core.sensitivity import CompiledPaths
from quacklr.core.validate import validate_stepped
from quacklr.find.discover import LogitPaths, found_by_table, logit_paths
from quacklr.find.finding import Finding
from quacklr.inspect.comparison import NOT_SEEN, ONLY_MEASURED, UNMEASURED, compared
from quacklr.inspect.layers import AttentionLayer, layers_of, rated_entries
from quacklr.inspect.target import BadTargetError, NoMeasurementError, Target, one_line
from quacklr.quack import QuacK
from quacklr.util.layer_names import shape

WITH_BATCH = "QuacK(logit_paths(model, batch), optimizer)"
DIFFERS = "but a rule differs from what was measured, so do not trust it: give the module a method logit_paths()"


@dataclass(frozen=True, slots=True)
class ModelReport:
    """The layers of a model, and the layers of a small model if that was measured instead.

    `running` is the model that was measured, `measured_on` describes it, `failure` is the reason why nothing was
    measured. `attach_error` is the error that `QuacK(model, optimizer)` would raise, or "".
    """

    model: nn.Module
    layers: list[AttentionLayer]
    running: nn.Module
    small: list[AttentionLayer]
    measured_on: str
    failure: str
    attach_error: str

    @property
    def attached(self) -> list[AttentionLayer]:
        """Layers with a weight that gets a rate."""
        return [layer for layer in self.layers if any(weight.trains for weight in layer.weights)]

    @property
    def unrecognised(self) -> list[AttentionLayer]:
        """Layers of which neither a rule nor a measurement gives the paths, unless they did not attend."""
        explained = (ONLY_MEASURED if self.small else NOT_SEEN) if self.measured_on else None
        return [layer for layer in self.layers if layer.finding.unknown and layer.comparison != explained]

    @property
    def different(self) -> list[AttentionLayer]:
        """Layers in which the measurement contradicts the rule, of the small model if there is one."""
        return [layer for layer in self.small or self.layers if layer.comparison.agrees is False]

    @property
    def only_measured(self) -> list[AttentionLayer]:
        """Layers whose paths are known from a measurement alone."""
        found = [layer for layer in self.layers if layer.comparison == ONLY_MEASURED]
        return found if self.small else [layer for layer in found if layer.finding.paths]

    @property
    def numbers(self) -> tuple[int, int]:
        """The number of parameter entries that get a rate, and of all."""
        return rated_entries(self.attached), sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def left_alone(self) -> dict[str, str]:
        """Why layers, or weights of them, get no rate."""
        return {name: why for layer in self.layers for name, why in layer.left_alone.items()}

    @property
    def exit_code(self) -> int:
        """1 if a layer is not recognised, differs or could not be measured, or if QuacK raises an unexplained error."""
        raises = bool(self.attach_error) and (not self.layers or any(layer.finding.paths for layer in self.layers))
        return int(bool(self.unrecognised or self.different or self.failure or raises))

    def summary(self) -> str:
        """The last line: what QuacK does with the model."""
        if self.attach_error:
            with_batch = (
                ". To see what a batch shows, add --measure" if self.unrecognised and not self.measured_on else ""
            )
            return f"QuacK(model, optimizer) would raise: {self._nothing_to_control() or self.attach_error}{with_batch}"
        call = WITH_BATCH if self.only_measured and not self.small else "QuacK(model, optimizer)"
        (count, total), attached = self.numbers, len(self.attached)
        share = f"{attached} attention layer{'s' * (attached != 1)}, {_large(count)} parameters"
        notes = "".join(f"; {note}" for note in self._notes())
        return f"{call} attaches to {share} ({100 * count / total:.3g} % of all){notes}"

    def _nothing_to_control(self) -> str:
        """A shorter message than QuacK's error, if the report lists the reasons of all layers."""
        if not self.layers or self.unrecognised or any(layer.finding.paths for layer in self.layers):
            return ""
        return f"it has nothing to control, since all of its {len(self.layers)} attention layers are left alone"

    def _notes(self) -> list[str]:
        notes = [DIFFERS] if self.different else []
        if self.unrecognised:
            with_batch = f"pass a batch that the model takes, {WITH_BATCH}, or see them with --measure"
            advice = "give them a method logit_paths()" if self.measured_on else with_batch
            notes.append(f"{len(self.unrecognised)} not recognised: {advice}")
        elif self.small and self.only_measured:
            notes.append(f"{len(self.only_measured)} more with a batch: {WITH_BATCH}")
        return notes


def report(target: Target, measure: bool) -> ModelReport:
    """Read a model's attention by rule; with `measure` also measure the model, or a small one of the same kind."""
    found = _found_by_table(target.model)
    comparisons = dict.fromkeys(found, UNMEASURED)
    running, small, failure = target.model, list[AttentionLayer](), ""
    if measure:
        try:
            running, sample = target.runnable()
            if running is target.model:
                found, comparisons = compared(running, sample)
            else:
                small = layers_of(running, *compared(running, sample))
        except NoMeasurementError as error:
            failure = str(error)
    layers = layers_of(target.model, found, comparisons)
    layers = [_compared_with(layer, small) for layer in layers] if small else layers
    measured_on = (target.measured_on or "the model") if measure and not failure else ""
    return ModelReport(target.model, layers, running, small, measured_on, failure, _attach_error(target.model, layers))


def _found_by_table(model: nn.Module) -> dict[str, Finding]:
    try:
        return found_by_table(model)
    except Exception as error:  # from a module's own logit_paths()
        raise BadTargetError(f"{type(model).__name__}: its attention cannot be read: {one_line(error)}") from error


def _compared_with(layer: AttentionLayer, small: Sequence[AttentionLayer]) -> AttentionLayer:
    """The layer with the worst comparison of the layers in the same position of the small model."""
    order = {False: 0, None: 1, True: 2}
    comparisons = [other.comparison for other in small if _same_to_rules(layer, other)]
    worst = min(comparisons, key=lambda comparison: order[comparison.agrees], default=NOT_SEEN)
    return replace(layer, comparison=replace(worst, measured=None))  # its parameters are not this model's


def _same_to_rules(layer: AttentionLayer, other: AttentionLayer) -> bool:
    """Whether two layers have the same class and position, and rules apply to both or to neither."""
    unknown = [one.finding.unknown or one.comparison == ONLY_MEASURED for one in (layer, other)]
    return shape(layer.module) == shape(other.module) and layer.kind == other.kind and unknown[0] == unknown[1]


def _attach_error(model: nn.Module, layers: Sequence[AttentionLayer]) -> str:
    """The error that attaching QuacK would raise, or ""."""
    paths = LogitPaths({layer.module: layer.finding for layer in layers}, model)
    optimizer = torch.optim.SGD(list(model.parameters()) or [torch.zeros(1)], lr=1.0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if not paths:
                logit_paths(model)
            elif any(parameter.is_meta for parameter in model.parameters()):
                validate_stepped(CompiledPaths(paths).weights, [optimizer])
            else:
                QuacK(paths, optimizer).remove()
    except ValueError as error:
        return str(error)
    return ""


def _large(number: int) -> str:
    for size, word in ((10**9, "billion"), (10**6, "million")):
        if number >= size:
            return f"{number / size:.3g} {word}"
    return f"{number:,}"
