"""Which optimizers QuacK can scale: those whose step is linear in lr, since then a scaled step is a scaled lr."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

NOT_LINEAR = {
    "LBFGS": "its line search and curvature pairs are made of the steps it took",
    "Rprop": "lr is only where its step sizes start; after that they grow and shrink by themselves",
    "ASGD": "it averages the weights it wrote, and lr also sets how fast its own step decays",
    "Adafactor": "its step is min(lr, 1/sqrt(t)), so after 1/lr^2 steps it no longer depends on lr",
}


def as_optimizers(given: object) -> list[Optimizer]:
    """One optimizer or several, as a list, without the wrappers of accelerate and Lightning.

    ValueError for what is none, and for those known not to be linear in lr.
    """
    several = list(given) if isinstance(given, Iterable) and not isinstance(given, Optimizer) else [given]
    if not several:
        raise ValueError("no optimizer given; pass the one (or the list of those) that train the model")
    optimizers = []
    for each in several:
        if not isinstance(each, Optimizer):
            raise ValueError(f"{type(each).__name__} is not a torch.optim.Optimizer; call QuacK(model, optimizer)")
        each = unwrapped(each)
        for name in (cls.__name__ for cls in type(each).__mro__):
            if name in NOT_LINEAR:
                raise ValueError(
                    f"{name} is not linear in lr ({NOT_LINEAR[name]}), so it has no learning rate a head; use SGD, "
                    "Adam(W), Muon or another optimizer whose step is lr times a direction"
                )
        optimizers.append(each)
    return list(dict.fromkeys(optimizers))


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """The optimizer inside `AcceleratedOptimizer` and its like: the one that steps, so the one whose hooks run."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer


def is_idle(optimizer: Optimizer) -> bool:
    """Whether the next step moves nothing because every lr is 0: a warmup's first step, or one that fills state.

    A learning rate that is a tensor on a device is not looked at, since that would wait for the device.
    """
    for group in optimizer.param_groups:
        lr = group.get("lr", 1.0)
        if (isinstance(lr, Tensor) and lr.device.type != "cpu") or lr != 0:
            return False
    return True


def first_after_step(optimizer: Optimizer, hook: Callable[..., None]) -> Any:
    """Register a hook that runs after a step, before those that are there already: they see what it leaves behind."""
    handle = optimizer.register_step_post_hook(hook)
    vars(optimizer)["_optimizer_step_post_hooks"].move_to_end(handle.id, last=False)
    return handle
