"""What is done in the first step of each optimizer, and not later: measure the first batch, and check that it steps.

DeepSpeed puts flat copies of the parameters into the param groups; `fully_shard` and `load_state_dict(assign=True)` put
new parameters into the model. A QuacK that was attached before that would do nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from quacklr.attach.attachment import Attachment
from quacklr.core.flat_tensor import gradient_of, original
from quacklr.core.local import local_tensor
from quacklr.core.rule import Step
from quacklr.core.weight import Weight
from quacklr.util.caller import warn

NONE_STEPPED = (
    "no weight on a path is stepped, so QuacK would do nothing: the optimizer's param groups hold none of the "
    "parameters that they held when QuacK was attached, first {}: did something replace them since, as "
    "deepspeed.initialize does? Attach afterwards, to the optimizer that steps the model's own parameters"
)
NOT_IN_GROUPS = "{}: its parameter is no longer in an optimizer that QuacK is attached to, so its step is not scaled"
REPLACED = (
    "{}: {} of {} parameters on the paths were replaced after QuacK was attached, by sharding or by "
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


class FirstStep:
    """The checks of QuacK and of QK clip, called before and after the first step of each optimizer.

    `watch` says which weights are checked. `start` is called before a step if a measurement has found other paths.
    """

    def __init__(self, attachment: Attachment, start: Callable[[], None] = lambda: None) -> None:
        self._attachment, self._start = attachment, start
        self._parts: list[Weight] = []
        self._used: list[Weight] = []
        self._more = False  # whether paths were found that are not used yet
        self._unchecked = False
        self._had_gradient: set[int] = set()
        self._stepped: set[Optimizer] = set()

    def watch(self, weights: Iterable[Weight]) -> None:
        """Check these weights and their biases in the next step of each optimizer."""
        self._parts = [part for weight in weights for part in weight.parts if weight.rated]
        self._used = self._used_now()
        self._unchecked = True
        self._stepped.clear()

    def _used_now(self) -> list[Weight]:
        """The weights whose parameters the model has."""
        model = self._attachment.module
        own = set(map(id, model.parameters())) if model is not None else set()
        return [part for part in self._parts if id(original(part.param)) in own]

    @property
    def needs_batch(self) -> bool:
        """Whether no path is known, and the model has run no batch that could be measured."""
        return not self._parts and not self._attachment.has_batch

    def before(self) -> None:
        """Measure the first batch, and check that the optimizers step the weights on the paths."""
        if self._attachment.has_batch or not self._parts:
            self._more |= self._attachment.measure()
        if self._more:
            self._start()
            self._more = False
        self._had_gradient.update(id(part.param) for part in self._parts if gradient_of(part.param) is not None)
        if self._unchecked:
            self._check_weights()
            self._unchecked = False

    def after(self, optimizer: Optimizer, step: Step | None = None) -> bool:
        """Measure what ran in the step, and check the step of QuacK. Returns whether nothing is left to do.

        Paths that are found now are for the next step.
        """
        if self._attachment.waits:
            self._more |= self._attachment.measure()
        if step is not None and optimizer not in self._stepped:
            self._check_gradients(step)
            if not self._attachment.linear:
                self._warn_of_copies(step)
        self._stepped.add(optimizer)
        return len(self._stepped) == len(self._attachment.optimizers) and not self._attachment.waits and not self._more

    def _check_weights(self) -> None:
        """RuntimeError if no weight is stepped, or used by the model; a warning if some are not."""
        in_groups = self._attachment.in_groups
        held = in_groups.known.union(*map(in_groups.by, self._attachment.optimizers))
        trained = [part for part in self._parts if part.param.requires_grad]
        missing = [part for part in trained if id(part.param) not in held]
        if missing and len(missing) == len(trained):
            raise RuntimeError(NONE_STEPPED.format(missing[0].name))
        if missing:
            warn(NOT_IN_GROUPS.format(missing[0].name))
        used = set(self._used_now())
        if replaced := [part for part in self._used if part not in used]:
            message = REPLACED.format(replaced[0].name, len(replaced), len(self._used))
            if len(replaced) == len(self._used):
                raise RuntimeError(message)
            warn(message)

    def _check_gradients(self, step: Step) -> None:
        """Check that a weight had a gradient in the step, or moved without one."""
        stepped = [part.param for part in self._parts if part.param.requires_grad and id(part.param) in step.tensors]
        params = [param for param in stepped if local_tensor(param).numel()]  # a rank may have no entry of a parameter
        had_gradient = any(gradient_of(param) is not None or id(param) in self._had_gradient for param in params)
        if not params or had_gradient or step.blocks.have_moved(step.copies):
            return
        ids, in_groups = {id(part.param) for part in self._parts}, self._attachment.in_groups
        others = [other for other in self._attachment.optimizers if other is not step.optimizer]
        if all(in_groups.by(other).isdisjoint(ids) for other in others):
            raise RuntimeError(NO_GRADIENT.format(""))
        warn(NO_GRADIENT.format(f" of {type(step.optimizer).__name__}"))

    def _warn_of_copies(self, step: Step) -> None:
        """Warn if the optimizer's state has a copy of a weight that it steps: an average, or a master weight.

        The scaling is lost if the optimizer computes the next weights from the copy. Waits for the device.
        """
        for param in (param for group in step.optimizer.param_groups for param in group["params"]):
            on_path = not step.tensors.isdisjoint(self._attachment.in_groups.of(param))
            state: Any = step.optimizer.state.get(param) if on_path else None
            for key, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, Tensor) and value.shape == param.shape and _is_copy(value, param):
                    warn(KEEPS_A_COPY.format(type(step.optimizer).__name__, key))
                    return


@torch.no_grad()
def _is_copy(value: Tensor, param: Tensor) -> bool:
    """Whether the distance is less than half of the weight's norm. Momenta and second moments are further away."""
    weight, kept = local_tensor(param).float(), local_tensor(value).float()
    return weight.shape == kept.shape and bool((kept.to(weight.device) - weight).norm() < 0.5 * weight.norm())
