"""The optimizers whose steps are scaled. For a wrapper these are the optimizers inside it, unless its step is scaled.

The hooks must be on the object whose `step` moves the weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer

from quacklr.attach.linearity import SHARD_STATE
from quacklr.sharded.engines.engine import unwrapped_optimizer
from quacklr.util.caller import warn

STEP_INSIDE = ("Lookahead", "OptimizersContainer", "SAM", "ScheduleFreeWrapper")
"""Wrappers of one optimizer that were tried: scaling the step of that optimizer is scaling its lr."""

NO_OPTIMIZER = "no optimizer given; pass the one (or the list of those) that train the model"
NOT_AN_OPTIMIZER = "{} is not a torch.optim.Optimizer; call QuacK(model, optimizer)"
NO_HOOKS = (
    "{}.step runs no hooks, because its constructor does not call that of torch.optim.Optimizer, so QuacK would never "
    "see a step; pass the optimizer that moves the weights"
)
NO_STEP = "{} has no step of its own, so QuacK would never see one: its weights move elsewhere"
UNKNOWN_WRAPPER = (
    "{0} has a {1} inside, and QuacK scales the steps of that {1}; wrappers are not tested. This is right if {0} calls "
    "the step of {1} at the weights of the model, and uses neither lr nor the size of that step itself"
)
BY_HAND = (
    "only the steps that {}.step takes are seen, so call step(closure): first_step and second_step run no hooks if you "
    "call them yourself"
)


def as_optimizers(given: object, linear: bool = True) -> list[Optimizer]:
    """One optimizer or several, as a list.

    With `linear`, a scaled step must be a step with a scaled lr. For a wrapper (Lookahead, SAM, a container of several)
    these are then the optimizers inside it, unless they are given as well. Otherwise it is the wrapper itself, if its
    step runs hooks.

    Raises ValueError for objects that are no optimizers, and for optimizers whose hooks never run.
    """
    several = list(given) if isinstance(given, Iterable) and not isinstance(given, Optimizer) else [given]
    if not several:
        raise ValueError(NO_OPTIMIZER)
    optimizers = list(dict.fromkeys(inner for each in several for inner in _optimizers_to_hook(each, linear, several)))
    for optimizer in optimizers:
        _validate_hooks(optimizer)
        if hasattr(optimizer, "second_step"):
            warn(BY_HAND.format(type(optimizer).__name__))
    return optimizers


def _optimizers_to_hook(given: Any, linear: bool, several: list[Any]) -> list[Optimizer]:
    given = unwrapped_optimizer(given)
    name, inner = type(given).__name__, _inner_optimizers(given)
    if not isinstance(given, Optimizer) and not (inner and hasattr(given, "step") and hasattr(given, "zero_grad")):
        raise ValueError(NOT_AN_OPTIMIZER.format(name))
    if not inner or name in SHARD_STATE or all(any(each is other for other in several) for each in inner):
        return [given]
    if not linear and isinstance(given, Optimizer) and _runs_hooks(given):
        return [given]
    if linear and len(inner) == 1 and name not in STEP_INSIDE:
        warn(UNKNOWN_WRAPPER.format(name, type(inner[0]).__name__))
    return [optimizer for each in inner for optimizer in _optimizers_to_hook(each, linear, several)]


def _inner_optimizers(given: Any) -> list[Optimizer]:
    """The optimizers that a wrapper holds as attributes, if they step all parameters of the wrapper; else none."""
    held = list(getattr(given, "__dict__", {}).values())
    held += [each for value in held if isinstance(value, list | tuple) for each in value]
    held += [each for value in held if isinstance(value, dict) for each in value.values()]
    inner = list(dict.fromkeys(each for each in held if isinstance(each, Optimizer) and each is not given))
    return inner if _ids_in_groups(given) <= set().union(*map(_ids_in_groups, inner)) else []


def _ids_in_groups(optimizer: Any) -> set[int]:
    return {id(param) for group in getattr(optimizer, "param_groups", []) for param in group["params"]}


def _runs_hooks(optimizer: Optimizer) -> bool:
    """Whether its `step` runs hooks; not if its constructor does not call that of torch.optim.Optimizer."""
    return getattr(type(optimizer).step, "hooked", False) and hasattr(optimizer, "_optimizer_step_post_hooks")


def _validate_hooks(optimizer: Optimizer) -> None:
    name, step = type(optimizer).__name__, type(optimizer).step
    if not _runs_hooks(optimizer):
        raise ValueError(NO_HOOKS.format(name))
    if getattr(step, "__wrapped__", step) is getattr(Optimizer.step, "__wrapped__", Optimizer.step):
        raise ValueError(NO_STEP.format(name))
