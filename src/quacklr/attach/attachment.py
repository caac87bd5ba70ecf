"""A model and the optimizers that train it, as QuacK and QK clip need them: which weights step, and on which paths."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from quacklr.attach.optimizers import as_optimizers
from quacklr.core.path import LogitPath, as_paths
from quacklr.core.stepped import Stepped
from quacklr.core.weight import Weight
from quacklr.find.discover import LogitPaths, by_module, found_by_table, validate_controls
from quacklr.find.finding import Finding
from quacklr.find.first_batch import FirstBatch
from quacklr.sharded.collectives import reshard
from quacklr.sharded.engines import as_module, engine_of
from quacklr.util.modules import named_parameters

REPLACED = (
    "{}: its parameter has shape {} now, and had {} when the paths were made; pass the model itself, or make the paths "
    "again after it was sharded or changed"
)


class Attachment:
    """The optimizers, and the paths over the tensors that they step.

    Attributes:
        module: the model; None if paths were given that do not come from `logit_paths`.
        engine: the training engine that divides the parameters among processes, if there is one.
        optimizers: those whose steps move the weights.
        in_groups: which parameters their param groups step.
        paths: the paths that are known, over the tensors that are stepped. `measure` may find more.
        by_module: the same paths, by the name of their attention module.
        found: by module name, how its attention was found.
        left_alone: by module name, why its attention is on no path.
    """

    def __init__(
        self,
        model: nn.Module | Iterable[LogitPath],
        optimizer: Optimizer | Iterable[Optimizer],
        *,
        linear: bool,
        verify: bool,
    ) -> None:
        self._given = None if as_module(model) is not None else as_paths(model, "the model must be an nn.Module or")
        if self._given == []:
            raise ValueError("there is no path to control: the list of paths is empty")
        self.module = model.model() if isinstance(model, LogitPaths) else as_module(model)
        self.engine = engine_of(self.module, optimizer)
        self.optimizers = as_optimizers(self.engine.optimizers or optimizer, linear)
        self.in_groups: Stepped = self.engine.stepped
        reshard(self.module)
        found: Mapping[str, Finding] = getattr(model, "found", {})
        if self._given is None and self.module is not None:
            with self.engine.whole_shapes():
                found = found_by_table(self.module)
        elif isinstance(model, LogitPaths) and self.module is not None:
            with self.engine.whole_shapes():
                self._given = relocated(model, self.module, self.engine.shards)
        self._first_batch = None
        if self.module is not None:
            self._first_batch = FirstBatch(self.module, found, self.engine.gathers, verify)
            found = self._first_batch.found
        self._set_found(found)
        known = found and not any(finding.pending for finding in found.values())
        if self.module is not None and (known or not self.waits):
            validate_controls(found, self.module)

    def _set_found(self, found: Mapping[str, Finding]) -> None:
        self.found = found
        with self.engine.whole_shapes():
            paths = LogitPaths(found, self.module) if self.module is not None else None
        self.left_alone: Mapping[str, str] = paths.left_alone if paths is not None else {}
        known = self._given if self._given is not None else paths or []
        self.paths = self.engine.located(known)
        module_of = {path.weights[0].name: name for name, each in by_module(paths or known).items() for path in each}
        self.by_module: dict[str, list[LogitPath]] = {}
        for path in self.paths:
            name = path.weights[0].name
            self.by_module.setdefault(module_of.get(name, name.rpartition(".")[0]), []).append(path)

    @property
    def waits(self) -> bool:
        """Whether some attention may be found only when a batch runs it."""
        return self._first_batch is not None and not self._first_batch.is_done

    @property
    def has_batch(self) -> bool:
        """Whether the model has run a batch that is not measured yet."""
        return self._first_batch is not None and self._first_batch.has_batch

    def measure(self) -> bool:
        """Measure the batch that the model has run, before a step. Returns whether there are other paths now.

        ValueError if the measurement contradicts what was found. RuntimeError if something cannot be measured.
        """
        found = self._first_batch.measure() if self._first_batch is not None else None
        if found is None:
            return False
        before = {name: finding.paths for name, finding in self.found.items() if finding.paths}
        self._set_found(found)
        return {name: finding.paths for name, finding in found.items() if finding.paths} != before

    def remove(self) -> None:
        """Remove the hooks from the model."""
        if self._first_batch is not None:
            self._first_batch.remove()


def relocated(paths: LogitPaths, model: nn.Module, flat: Container[int]) -> list[LogitPath]:
    """The same paths over the parameters that the model has now: sharding and assigning may have replaced them.

    `flat` are the ids of parameters that an engine has flattened; it knows their whole shapes.
    """
    now = dict(named_parameters(model))

    def at_place(weight: Weight) -> Weight:
        name, shape = paths.parameters.get(id(weight.param), ("", weight.param.shape))
        param: Any = now.get(name, weight.param)
        bias = at_place(weight.bias) if isinstance(weight.bias, Weight) else None
        if param.shape != shape and id(param) not in flat:
            raise ValueError(REPLACED.format(weight.name, tuple(param.shape), tuple(shape)))
        return weight if param is weight.param and bias is weight.bias else replace(weight, param=param, bias=bias)

    weights = {weight: at_place(weight) for path in paths for weight in path.weights}
    return [replace(path, weights=tuple(weights[weight] for weight in path.weights)) for path in paths]
