"""What is done in the first step of each optimizer, and not later: measure the first batch, and check that it steps.

DeepSpeed puts flat copies of the parameters into the param groups; `fully_shard` and `load_state_dict(assign=True)` put
new parameters into the model. A QuacK that was attached before that would do nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from quacklr.attach.attachment import Attachment
from quacklr.core.flat_tensor import gradient_of, original
from quacklr.core.local import local_tensor
from quacklr.core.rule import Step
from quacklr.core.step_scaler import Arguments, StepScaler
from quacklr.core.stepped import Stepped
from quacklr.core.weight import Weight
from quacklr.util.caller import warn

NONE_STEPPED = (
    "no weight on a path is stepped, so QuacK would do nothing: the optimizer's param groups hold none of the "
    "parameters that they held when QuacK was attached, first {}: did something replace them since, as "
    "deepspeed.initialize does? Attach afterwards, to the optimizer that steps the model's own parameters"
)
NOT_IN_GROUPS = "{}: its parameter is no longer in an optimizer that QuacK is attached to, so its step is not scaled"
REPLACED = (
    "{}: {} parameters on the paths were replaced after QuacK was attached, by sharding or by "
    "load_state_dict(assign=True), so the model does not use those that QuacK scales; load and shard first, then make "
    "the optimizer, then attach"
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


class WeightsOnPaths:
    """Weights that the optimizers step, and the model uses, when this object is made. `parts` has their biases too."""

    def __init__(self, attachment: Attachment, weights: Iterable[Weight]) -> None:
        self._attachment = attachment
        self.parts = [part for weight in weights for part in weight.parts if weight.rated]
        own = self._parameters_of_model()
        self._of_model = [part for part in self.parts if id(original(part.param)) in own]

    def _parameters_of_model(self) -> set[int]:
        model = self._attachment.module
        return set() if model is None else {id(param) for param in model.parameters()}

    def check(self) -> None:
        """RuntimeError if none of them is stepped now, or used by the model; a warning if some are not."""
        optimizers, in_groups = self._attachment.optimizers, self._attachment.in_groups
        trained = [part for part in self.parts if part.param.requires_grad]
        held = in_groups.known.union(*map(in_groups.by, optimizers))
        missing = [part for part in trained if id(part.param) not in held]
        if missing and len(missing) == len(trained):
            raise RuntimeError(NONE_STEPPED.format(missing[0].name))
        if missing:
            warn(NOT_IN_GROUPS.format(missing[0].name))
        own = self._parameters_of_model()
        replaced = [part for part in self._of_model if id(original(part.param)) not in own]
        if replaced and len(replaced) == len(self._of_model):
            raise RuntimeError(REPLACED.format(replaced[0].name, "all"))
        if replaced:
            warn(REPLACED.format(replaced[0].name, f"{len(replaced)} of {len(self._of_model)}"))


class FirstStep:
    """Called by the scaler before and after the first step of each optimizer; removes itself afterwards.

    `start` is called if a measurement has found paths; it gives them to the scaler, and calls `set_weights`.
    """

    def __init__(self, attachment: Attachment, scaler: StepScaler, start: Callable[[], None]) -> None:
        self._attachment, self._scaler, self._start = attachment, scaler, start
        self._more = False  # whether paths were found that are not used yet
        self._on_paths = WeightsOnPaths(attachment, ())
        self._stepped: set[Optimizer] = set()
        self._had_gradient: set[int] = set()

    def set_weights(self, weights: Collection[Weight]) -> None:
        """Check these weights from now on, in the next step of each optimizer."""
        self._on_paths = WeightsOnPaths(self._attachment, weights)
        self._stepped.clear()

    def before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """Measure the first batch, and check that the optimizer steps the weights on the paths.

        If the model runs only in the step, in a closure, returns other arguments for the step: a closure that also
        calls the scaler's `before`.
        """
        runs_later = self._scaler.paths is None and not self._attachment.has_batch
        if runs_later and (with_closure := self._with_closure(optimizer, args, kwargs)):
            return with_closure
        if self._attachment.has_batch or self._scaler.paths is None:
            self._more |= self._attachment.measure()
        if self._more:
            self._start()
            self._more = False
        parts = self._on_paths.parts
        self._had_gradient.update(id(part.param) for part in parts if gradient_of(part.param) is not None)
        if not self._stepped:
            self._on_paths.check()
        return None

    def _with_closure(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            return None

        def measured() -> Any:
            result = closure()
            self._scaler.before(optimizer)
            return result

        return ((args[0], measured, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": measured})

    def after(self, step: Step) -> None:
        """Check that the weights had gradients, or moved. Paths that are found now are for the next step."""
        if self._attachment.waits:
            self._more |= self._attachment.measure()
        if step.optimizer not in self._stepped:
            self._check_gradients(step)
            if not self._scaler.rule.linear:
                warn_of_copies(step.optimizer, step.tensors, self._scaler.in_groups)
            self._stepped.add(step.optimizer)
        all_stepped = len(self._stepped) == len(self._scaler.optimizers)
        if all_stepped and not self._attachment.waits and not self._more:
            self._scaler.first_step = None

    def _check_gradients(self, step: Step) -> None:
        """Check that a weight on a path had a gradient in this step, or moved without one."""
        parts = self._on_paths.parts
        stepped = [part.param for part in parts if part.param.requires_grad and id(part.param) in step.tensors]
        params = [param for param in stepped if local_tensor(param).numel()]  # a rank may have no entry of a parameter
        had_gradient = any(gradient_of(param) is not None or id(param) in self._had_gradient for param in params)
        if not params or had_gradient or step.blocks.have_moved(step.copies):
            return
        ids, in_groups = {id(part.param) for part in parts}, self._scaler.in_groups
        others = [other for other in self._scaler.optimizers if other is not step.optimizer]
        if all(in_groups.by(other).isdisjoint(ids) for other in others):
            raise RuntimeError(NO_GRADIENT.format(""))
        warn(NO_GRADIENT.format(f" of {type(step.optimizer).__name__}"))


def warn_of_copies(optimizer: Optimizer, tensors: Collection[int], in_groups: Stepped) -> None:
    """Warn if an optimizer's state has a copy of one of these tensors (by id), after its first step.

    Copies are averages, slow weights, and weights of higher precision. The scaling is lost if the optimizer computes
    the next weights from them. Waits for the device.
    """
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        state: Any = optimizer.state.get(param, {}) if not set(tensors).isdisjoint(in_groups.of(param)) else {}
        for key, value in state.items() if isinstance(state, dict) else ():
            if isinstance(value, Tensor) and value.shape == param.shape and _is_copy(value, param):
                warn(KEEPS_A_COPY.format(type(optimizer).__name__, key))
                return


@torch.no_grad()
def _is_copy(value: Tensor, param: Tensor) -> bool:
    """Whether the distance is less than half of the weight's norm. Momenta and second moments are further away."""
    weight, kept = local_tensor(param).float(), local_tensor(value).float()
    return weight.shape == kept.shape and bool((kept.to(weight.device) - weight).norm() < 0.5 * weight.norm())
