"""Which optimizers QuacK accepts: those whose step is linear in lr, since then a scaled step is a scaled lr.

The hooks must be on the object whose `step` moves the weights, so for a wrapper the optimizers inside it are found.
`linearity.probe` measures whether a step is linear in lr. torch's own optimizers are not measured: KNOWN_LINEAR and
NOT_LINEAR list them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from torch import Tensor, optim
from torch.optim import Optimizer

from quacklr.attach.linearity import CONSTANT, LINEAR, MANY_STEPS, NEARLY, Linearity, probe
from quacklr.attach.scratch import ProbeError, inner_optimizers
from quacklr.core.stepped import PLAIN, Stepped
from quacklr.sharded.engines.engine import unwrapped_optimizer

KNOWN_LINEAR = (
    *(optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam, optim.Adagrad, optim.Adadelta),
    *(optim.RMSprop, optim.Muon, optim.SparseAdam),
)
NOT_LINEAR = {
    optim.LBFGS: "its line search and curvature pairs are made of the steps it took",
    optim.Rprop: "lr is only where its step sizes start; after that they grow and shrink by themselves",
    optim.ASGD: "it averages the weights it wrote, and lr also sets how fast its own step decays",
}
SHARD_STATE = ("ZeroRedundancyOptimizer", "OSS")  # each process steps a part of the parameters and broadcasts it
USE_ANOTHER = (
    "Use an optimizer whose step is lr times a direction, such as SGD, AdamW, Lion or Muon; docs/attach.md lists those "
    "that were tried"
)
SCHEDULE_FREE = f"Schedule-free training works by a wrapper, ScheduleFreeWrapper(SGD(...)). {USE_ANOTHER}"
BY_HAND = (
    "QuacK scales the steps that {0}.step takes, so call step(closure). If you call first_step and second_step "
    "yourself, no hooks run, and the steps are not scaled"
)


def as_optimizers(given: object, linear: bool = True) -> list[Optimizer]:
    """One optimizer or several, as a list; for a wrapper, the optimizers that move the weights.

    Raises ValueError for objects that are no optimizers, and for optimizers whose hooks never run. With `linear`, also
    for those of torch that are not linear in lr.
    """
    several = list(given) if isinstance(given, Iterable) and not isinstance(given, Optimizer) else [given]
    if not several:
        raise ValueError("no optimizer given; pass the one (or the list of those) that train the model")
    notes: list[str] = []
    optimizers = list(dict.fromkeys(inner for each in several for inner in _optimizers_to_hook(each, notes, linear)))
    for optimizer in optimizers:
        for cls, reason in NOT_LINEAR.items() if linear else ():
            if isinstance(optimizer, cls):
                raise _not_linear(cls.__name__, reason)
        _validate_hooks(optimizer)
        if hasattr(optimizer, "second_step"):
            notes.append(BY_HAND.format(type(optimizer).__name__))
    for note in notes:
        warnings.warn(note, stacklevel=3)
    return optimizers


def _optimizers_to_hook(given: Any, notes: list[str], linear: bool) -> list[Optimizer]:
    """The optimizers whose steps are scaled.

    For a wrapper (SAM, Lookahead, a container of several) these are the optimizers inside it. It is the wrapper itself
    if scratch copies show that only its step as a whole is linear, because it calls the inner step from other weights.
    If steps need not be linear, it is the wrapper itself if its step runs hooks: its whole step moves the logits.
    """
    given = unwrapped_optimizer(given)
    name, inner = type(given).__name__, inner_optimizers(given)
    if not isinstance(given, Optimizer) and not (inner and hasattr(given, "step") and hasattr(given, "zero_grad")):
        raise ValueError(f"{name} is not a torch.optim.Optimizer; call QuacK(model, optimizer)")
    if not inner or name in SHARD_STATE:
        return [given]
    if not linear:
        hooked = isinstance(given, Optimizer) and _runs_hooks(given)
        return [given] if hooked else [each for one in inner for each in _optimizers_to_hook(one, notes, linear)]
    inside = _probed(given, inside=True)
    if not _is_linear(inside) and isinstance(given, Optimizer) and _is_linear(_probed(given)):
        return [given]
    notes += filter(None, [_warning(name, inside)])
    return [optimizer for each in inner for optimizer in _optimizers_to_hook(each, notes, linear)]


def _probed(given: Any, only: Iterable[Tensor] | None = None, inside: bool = False) -> Linearity | str:
    """The linearity of an optimizer, or why it could not be measured."""
    try:
        return probe(given, only, inside)
    except ProbeError as error:
        return str(error)


def _is_linear(found: Linearity | str) -> bool:
    return isinstance(found, Linearity) and found.constant <= LINEAR


def _runs_hooks(optimizer: Optimizer) -> bool:
    """Whether its `step` runs hooks; not if its constructor does not call that of torch.optim.Optimizer."""
    return getattr(type(optimizer).step, "hooked", False) and hasattr(optimizer, "_optimizer_step_post_hooks")


def _validate_hooks(optimizer: Optimizer) -> None:
    name, step = type(optimizer).__name__, type(optimizer).step
    if not _runs_hooks(optimizer):
        raise ValueError(
            f"{name}.step runs no hooks, because its constructor does not call that of torch.optim.Optimizer, so QuacK "
            "would never see a step; pass the optimizer that moves the weights"
        )
    if getattr(step, "__wrapped__", step) is getattr(Optimizer.step, "__wrapped__", Optimizer.step):
        raise ValueError(f"{name} has no step of its own, so QuacK would never see one: its weights move elsewhere")


def validate_linear(optimizers: Iterable[Optimizer], params: Iterable[Tensor], in_groups: Stepped = PLAIN) -> None:
    """Raise ValueError for an optimizer whose step of these parameters is not linear in lr; warn if it nearly is.

    Takes some milliseconds for an optimizer that is not torch's, once for a class and its settings.
    """
    rated = set(map(id, params))
    for optimizer in optimizers:
        stepped = [
            p for group in optimizer.param_groups for p in group["params"] if not rated.isdisjoint(in_groups.of(p))
        ]
        known = optimizer.optim if type(optimizer).__name__ in SHARD_STATE else optimizer  # type: ignore[attr-defined]
        if type(known) in KNOWN_LINEAR or not stepped:
            continue
        schedule_free = hasattr(known, "train") and hasattr(known, "eval")
        if message := _warning(type(known).__name__, _probed(known, stepped), schedule_free):
            warnings.warn(message, stacklevel=3)


def _warning(name: str, found: Linearity | str, schedule_free: bool = False) -> str:
    """The text of a warning about an optimizer, empty if there is none; ValueError if it is not linear in lr."""
    if isinstance(found, str):
        return (
            f"{name} could not be checked on scratch tensors ({found}). QuacK is right if its step is lr times a "
            "direction that does not depend on lr, and if it keeps no copy of the weights in its state, such as an "
            "average"
        )
    rate = CONSTANT[0]
    percent = f"{100 * found.constant:.2g} %"
    off = f"on scratch tensors its steps scaled by {rate:g} are {percent} off its steps with lr * {rate:g}"
    if not found.reads_lr:
        raise _not_linear(name, "its steps do not change when lr does")
    if found.constant > NEARLY:
        reason = f"{off}: it keeps weights in its state, or lr is not just a factor"
        raise _not_linear(name, reason, SCHEDULE_FREE if schedule_free else USE_ANOTHER)
    if found.constant > LINEAR:
        return f"{name} is not quite linear in lr: {off}. QuacK scales its steps"
    if found.changing > NEARLY:
        return (
            f"{name} keeps lr in its state. Its scaled step is the step with lr * rate while rates stay the same, and "
            "close to it while they change slowly, since a change of the rate acts on all that it has accumulated"
        )
    if found.late > NEARLY:
        return (
            f"{name} is linear in lr in its first steps, but not for ever: at step {MANY_STEPS:,} its scaled step is "
            f"{100 * found.late:.2g} % off the step with lr * rate. QuacK then scales the step that it takes"
        )
    return ""


def _not_linear(name: str, reason: str, way_out: str = USE_ANOTHER) -> ValueError:
    return ValueError(f"{name} is not linear in lr ({reason}), so it cannot have a learning rate per head. {way_out}")
