"""Checks that the optimizers step the weights on the paths.

DeepSpeed puts flat copies of the parameters into the param groups; `fully_shard` and `load_state_dict(assign=True)` put
new parameters into the model. A QuacK that was attached before that would do nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from quacklr.core.flat_tensor import gradient_of, original
from quacklr.core.local import local_tensor
from quacklr.core.stepped import PLAIN, Stepped
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


class StepCheck:
    """Raises RuntimeError if no weight on a path is stepped, and warns if only some are.

    `linear`: whether QuacK has tested that the optimizers are linear in lr. If it has not, this class also warns of
    copies of the weights in their state.
    """

    def __init__(
        self,
        model: nn.Module | None,
        weights: Iterable[Weight],
        optimizers: Sequence[Optimizer],
        linear: bool,
        in_groups: Stepped = PLAIN,
    ) -> None:
        self._linear, self._in_groups, self._optimizers = linear, in_groups, optimizers
        self._parts = [part for weight in weights for part in weight.parts if weight.rated]
        self._model: ReferenceType[nn.Module] | None = None if model is None else ref(model)
        own = set() if model is None else {id(param) for param in model.parameters()}
        self._of_model = [part for part in self._parts if id(original(part.param)) in own]
        self._stepped: set[Optimizer] = set()
        self._had_gradient: set[int] = set()

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to check."""
        return len(self._stepped) == len(self._optimizers)

    def before_step(self) -> None:
        """Check that the param groups still hold the parameters on the paths, and that the model still uses them."""
        self._had_gradient.update(id(part.param) for part in self._parts if gradient_of(part.param) is not None)
        if self._stepped:
            return
        trained = [part for part in self._parts if part.param.requires_grad]
        in_groups = self._in_groups.known.union(*map(self._in_groups.by, self._optimizers))
        missing = [part for part in trained if id(part.param) not in in_groups]
        if missing and len(missing) == len(trained):
            raise RuntimeError(NONE_STEPPED.format(missing[0].name))
        if missing:
            warn(NOT_IN_GROUPS.format(missing[0].name))
        model = self._model() if self._model is not None else None
        own = {id(param) for param in model.parameters()} if model is not None else set()
        replaced = [part for part in self._of_model if model is not None and id(original(part.param)) not in own]
        if replaced and len(replaced) == len(self._of_model):
            raise RuntimeError(REPLACED.format(replaced[0].name, "all"))
        if replaced:
            warn(REPLACED.format(replaced[0].name, f"{len(replaced)} of {len(self._of_model)}"))

    def after_step(self, optimizer: Optimizer, tensors: Collection[int], moved: Callable[[], bool]) -> None:
        """Check that a weight on a path had a gradient in this optimizer's first step, or moved without one."""
        if optimizer in self._stepped:
            return
        trained = [part.param for part in self._parts if part.param.requires_grad and id(part.param) in tensors]
        params = [param for param in trained if local_tensor(param).numel()]  # a rank may have no entry of a parameter
        had_gradient = any(gradient_of(param) is not None or id(param) in self._had_gradient for param in params)
        if params and not had_gradient and not moved():
            ids = {id(part.param) for part in self._parts}
            if all(other is optimizer or self._in_groups.by(other).isdisjoint(ids) for other in self._optimizers):
                raise RuntimeError(NO_GRADIENT.format(""))
            warn(NO_GRADIENT.format(f" of {type(optimizer).__name__}"))
        if not self._linear:
            warn_of_copies(optimizer, tensors, self._in_groups)
        self._stepped.add(optimizer)


def warn_of_copies(optimizer: Optimizer, tensors: Collection[int], in_groups: Stepped = PLAIN) -> None:
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
