"""A model and the optimizers that train it, as QuacK and QK clip need them: which weights step, and on which paths.

In the first step of each optimizer the first batch is measured, and the steps are checked. DeepSpeed puts flat copies
of the parameters into the param groups; `fully_shard` and `load_state_dict(assign=True)` put new parameters into the
model. A QuacK that was attached before that would do nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from quacklr.attach.optimizers import as_optimizers, validate_linear, validate_stepped
from quacklr.core.local import gradient_of, local_tensor, original
from quacklr.core.path import LogitPath, as_paths, changed
from quacklr.core.rule import Step, Stepped
from quacklr.core.weight import Weight
from quacklr.find.discover import LogitPaths, by_origin, found_by_table, found_of, model_of, validate_controls
from quacklr.find.finding import DECLARED, Finding
from quacklr.find.first_batch import FirstBatch
from quacklr.sharded.collectives import reshard
from quacklr.sharded.engines import as_module, engine_of
from quacklr.util.caller import warn
from quacklr.util.modules import named_parameters

LOST = (
    "{}: {} of {} weights on the paths are no longer {}. Did something replace parameters after QuacK was attached, as "
    "deepspeed.initialize, fully_shard and load_state_dict(assign=True) do? Load and shard first, then make the "
    "optimizer, then attach"
)
NO_GRADIENT = (
    "no weight on a path had a gradient in the first step{}, so QuacK does nothing: was the model sharded, or were its "
    "parameters replaced, after QuacK was attached? Shard first, then make the optimizer, then attach"
)
KEEPS_A_COPY = (
    "{} keeps a copy of the weights in its state ({!r}), and a budget scales the step of the weights only. If the "
    "optimizer computes weights from the copy, as schedule-free optimizers and those with master weights do, part of "
    "the scaling is lost. Use an optimizer without copies"
)


class Attachment:
    """The optimizers, and the paths over the tensors that they step.

    Attributes:
        module: the model; None if paths were given that do not come from `logit_paths` of one model.
        engine: the training engine that divides the parameters among processes, if there is one.
        optimizers: those whose steps move the weights.
        linear: whether their steps must be linear in lr.
        in_groups: which parameters their param groups step.
        paths: the paths that are known, over the tensors that are stepped. A measurement may find more.
        by_module: the same paths, by the name of their attention module; none if there is no module.
        found: by module name, how its attention was found.
        left_alone: by module name, why its attention is on no path.
        is_complete: whether all paths were given or declared, so that a measurement only verifies them.

    `start` is called before a step if a measurement has found other paths.
    """

    def __init__(
        self,
        model: nn.Module | Iterable[LogitPath],
        optimizer: Optimizer | Iterable[Optimizer],
        *,
        linear: bool,
        verify: bool,
        start: Callable[[], None] = lambda: None,
    ) -> None:
        self.module = as_module(model)
        self._given = None if self.module is not None else as_paths(model, "the model must be an nn.Module or")
        if self._given == []:
            raise ValueError("there is no path to control: the list of paths is empty")
        self.module = self.module if self._given is None else model_of(self._given)
        self.linear = linear
        self.engine = engine_of(self.module, optimizer)
        self.optimizers = as_optimizers(self.engine.optimizers or optimizer, linear)
        self.in_groups: Stepped = self.engine.stepped
        reshard(self.module)
        found: Mapping[str, Finding] = {}
        with self.engine.whole_shapes():
            if self.module is not None and self._given is None:
                found = found_by_table(self.module)
            elif self.module is not None and self._given is not None:
                self._given = relocated(self._given, self.module, self.engine.shards)
                found = found_of(self._given)
        self.is_complete = self._given is not None or {each.origin for each in found.values()} == {DECLARED}
        self._first_batch = None
        if self.module is not None:
            self._first_batch = FirstBatch(self.module, found, self.engine.gathers, verify)
            found = self._first_batch.found
            if not self.waits or (found and not any(finding.pending for finding in found.values())):
                validate_controls(found, self.module)
        self._set_found(found)
        self._start, self._more = start, False  # _more: paths were found that are not used yet
        self._parts: list[Weight] = []  # the weights and biases that are controlled
        self._of_model: list[Weight] = []  # those whose parameters are the model's
        self._had_gradient: set[int] = set()
        self._stepped: set[Optimizer] = set()

    def _set_found(self, found: Mapping[str, Finding]) -> None:
        self.found = found
        with self.engine.whole_shapes():
            paths = LogitPaths(found, self.module) if self.module is not None else None
        self.left_alone: Mapping[str, str] = paths.left_alone if paths is not None else {}
        self.paths = self.engine.located(self._given or paths or [])
        self.by_module = by_origin(self.paths)

    def control(self, weights: Sequence[Weight]) -> None:
        """Control these weights from now on: validate how the optimizers step them, and check their next step."""
        self._parts = [part for weight in weights for part in weight.parts if weight.rated]
        with self.engine.filled_groups():
            validate_stepped(weights, self.optimizers, self.in_groups)
            if self.linear:
                validate_linear(self.optimizers, (part.param for part in self._parts), self.in_groups)
        self._of_model = self._in_model()
        self._stepped.clear()

    def _in_model(self) -> list[Weight]:
        own = set(map(id, self.module.parameters())) if self.module is not None else set()
        return [part for part in self._parts if id(original(part.param)) in own]

    @property
    def waits(self) -> bool:
        """Whether some attention may be found only when a batch runs it."""
        return self._first_batch is not None and not self._first_batch.is_done

    def _measure(self) -> bool:
        """Measure the batch that the model has run. Returns whether there are other paths now."""
        found = self._first_batch.measure() if self._first_batch is not None else None
        if found is None:
            return False
        if self.is_complete:
            found = {name: found[name] for name in self.found}
        before = {name: finding.paths for name, finding in self.found.items() if finding.paths}
        self._set_found(found)
        return {name: finding.paths for name, finding in found.items() if finding.paths} != before

    def remove(self) -> None:
        """Remove the hooks from the model."""
        if self._first_batch is not None:
            self._first_batch.remove()

    @property
    def needs_batch(self) -> bool:
        """Whether no path is known, and the model has run no batch that could be measured."""
        return not self._parts and not (self._first_batch is not None and self._first_batch.has_batch)

    def before_step(self) -> None:
        """Before the first step of each optimizer: measure the batch, and check the weights."""
        if not self._stepped:
            self._check_weights()
        if not self._parts or (self._first_batch is not None and self._first_batch.has_batch):
            self._more |= self._measure()
        if self._more:
            self._start()
            self._more = False
        self._had_gradient.update(id(part.param) for part in self._parts if gradient_of(part.param) is not None)

    def after_step(self, optimizer: Optimizer, step: Step | None = None) -> bool:
        """After the first step of each optimizer: measure what ran in it, and check the step of QuacK.

        Returns whether nothing is left to do. Paths that are found now are for the next step.
        """
        if self.waits:
            self._more |= self._measure()
        if step is not None and optimizer not in self._stepped:
            self._check_gradients(step)
            if not self.linear:
                self._warn_of_copies(step)
        self._stepped.add(optimizer)
        return len(self._stepped) == len(self.optimizers) and not self.waits and not self._more

    def _check_weights(self) -> None:
        """RuntimeError if the optimizers step none of the weights, or the model has none; a warning if it is a part."""
        held = self.in_groups.known.union(*map(self.in_groups.by, self.optimizers))
        trained = [part for part in self._parts if part.param.requires_grad]
        _check_lost(trained, [part for part in trained if id(part.param) in held], "in the optimizer's param groups")
        _check_lost(self._of_model, self._in_model(), "in the model")

    def _check_gradients(self, step: Step) -> None:
        """Check that a weight had a gradient in the step, or moved without one."""
        stepped = [part.param for part in self._parts if part.param.requires_grad and id(part.param) in step.tensors]
        params = [param for param in stepped if local_tensor(param).numel()]  # a rank may have no entry of a parameter
        had_gradient = any(gradient_of(param) is not None or id(param) in self._had_gradient for param in params)
        if not params or had_gradient or step.blocks.have_moved(step.copies):
            return
        of_others = (self.in_groups.by(other) for other in self.optimizers if other is not step.optimizer)
        if {id(part.param) for part in self._parts}.isdisjoint(set().union(*of_others)):
            raise RuntimeError(NO_GRADIENT.format(""))
        warn(NO_GRADIENT.format(f" of {type(step.optimizer).__name__}"))

    def _warn_of_copies(self, step: Step) -> None:
        """Warn if the optimizer's state has a copy of a weight that it steps. Waits for the device."""
        for param in (param for group in step.optimizer.param_groups for param in group["params"]):
            on_path = not step.tensors.isdisjoint(self.in_groups.of(param))
            state: Any = step.optimizer.state.get(param) if on_path else None
            for key, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, Tensor) and value.shape == param.shape and _is_copy(value, param):
                    warn(KEEPS_A_COPY.format(type(step.optimizer).__name__, key))
                    return


def _check_lost(weights: Sequence[Weight], left: Collection[Weight], where: str) -> None:
    if lost := [weight for weight in weights if weight not in left]:
        message = LOST.format(lost[0].name, len(lost), len(weights), where)
        if not left:
            raise RuntimeError(message)
        warn(message)


@torch.no_grad()
def _is_copy(value: Tensor, param: Tensor) -> bool:
    """Whether the distance is less than half of the weight's norm. Momenta and second moments are further away."""
    weight, kept = local_tensor(param).float(), local_tensor(value).float()
    return weight.shape == kept.shape and bool((kept.to(weight.device) - weight).norm() < 0.5 * weight.norm())


def relocated(paths: Sequence[LogitPath], model: nn.Module, flat: Container[int]) -> list[LogitPath]:
    """The same paths over the parameters that the model has now: sharding and assigning may have replaced them.

    `flat` are the ids of parameters that an engine has flattened; it knows their whole shapes.
    """
    now, known = dict(named_parameters(model)), dict[int, tuple[str, torch.Size]]()
    for path in (path for path in paths if path.origin is not None):
        params = {id(part.param) for weight in path.weights for part in weight.parts}
        known |= {param: named for param, named in path.origin[0].parameters.items() if param in params}

    def at_place(weight: Weight) -> Weight:
        name, shape = known.get(id(weight.param), ("", weight.param.shape))
        param: Any = now.get(name, weight.param)
        bias = at_place(weight.bias) if isinstance(weight.bias, Weight) else None
        if param.shape != shape and id(param) not in flat:
            raise ValueError(
                f"{weight.name}: its parameter has shape {tuple(param.shape)} now, and had {tuple(shape)} when the "
                "paths were made; pass the model itself, or make the paths again after it was sharded or changed"
            )
        return weight if param is weight.param and bias is weight.bias else replace(weight, param=param, bias=bias)

    return changed(paths, at_place)


def validate_not_attached_twice(weights: Iterable[Weight], taken: Iterable[Weight], who: str = "QuacK") -> None:
    """No parameter may be on the paths of two QuacKs on one optimizer: its step would be scaled twice."""
    others = {id(original(part.param)): part.name for weight in reversed(list(taken)) for part in weight.parts}
    for part in (part for weight in weights for part in weight.parts):
        param = id(original(part.param))
        if param in others:
            raise ValueError(
                f"{part.name}: another {who} is attached to its parameter (as {others[param]}); "
                "call remove() on that one first"
            )
