"""Which optimizers QuacK can scale: those whose step is linear in lr, since then a scaled step is a scaled lr.

The hooks must be on the object whose `step` moves the weights, so that wrappers are looked into. What an optimizer does
with lr is found out by `linearity.probe`; only torch's own optimizers are known by name.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, optim
from torch.optim import Optimizer

from quacklr.optimizers.linearity import CONSTANT, LINEAR, MANY_STEPS, NEARLY, Linearity, probe
from quacklr.optimizers.scratch import ProbeError, inner_optimizers

KNOWN_LINEAR = (
    *(optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam, optim.Adagrad, optim.Adadelta),
    *(optim.RMSprop, optim.Muon, optim.SparseAdam),
)
NOT_LINEAR = {
    optim.LBFGS: "its line search and curvature pairs are made of the steps it took",
    optim.Rprop: "lr is only where its step sizes start; after that they grow and shrink by themselves",
    optim.ASGD: "it averages the weights it wrote, and lr also sets how fast its own step decays",
}
PASS_ON = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning")  # their wrappers only call step
SHARD_STATE = ("ZeroRedundancyOptimizer", "OSS")  # each process steps a part, and then sends it to the others
USE_ANOTHER = (
    "Use an optimizer whose step is lr times a direction, such as SGD, AdamW, Lion or Muon; docs/attach.md lists those "
    "that were tried"
)
BY_HAND = (
    "QuacK scales what {0}.step does, so call that, with a closure: first_step and second_step run no hooks when they "
    "are called by hand, and what they do is not scaled"
)


def as_optimizers(given: object) -> list[Optimizer]:
    """One optimizer or several, as a list; of a wrapper, the optimizers that move the weights.

    ValueError for what is none, for those whose hooks never run, and for those of torch that are not linear in lr.
    """
    several = list(given) if isinstance(given, Iterable) and not isinstance(given, Optimizer) else [given]
    if not several:
        raise ValueError("no optimizer given; pass the one (or the list of those) that train the model")
    notes: list[str] = []
    optimizers = list(dict.fromkeys(inside for each in several for inside in _steppers(each, notes)))
    for optimizer in optimizers:
        for cls, reason in NOT_LINEAR.items():
            if isinstance(optimizer, cls):
                raise _not_linear(cls.__name__, reason)
        _validate_hooks(optimizer)
        if hasattr(optimizer, "second_step"):
            notes.append(BY_HAND.format(type(optimizer).__name__))
    for note in notes:
        warnings.warn(note, stacklevel=3)
    return optimizers


def _steppers(given: Any, notes: list[str]) -> list[Optimizer]:
    """The optimizers whose steps are to be scaled.

    Of a wrapper (SAM, Lookahead, a container of several) these are the ones inside, unless scratch copies show that
    only the step of the wrapper as a whole can be scaled, because it calls the inner one from other weights.
    """
    while type(given).__module__.split(".")[0] in PASS_ON and hasattr(given, "optimizer"):
        given = given.optimizer
    name, inner = type(given).__name__, inner_optimizers(given)
    if not isinstance(given, Optimizer) and not (inner and hasattr(given, "step") and hasattr(given, "zero_grad")):
        raise ValueError(f"{name} is not a torch.optim.Optimizer; call QuacK(model, optimizer)")
    if not inner or name in SHARD_STATE:
        return [given]
    inside = _probed(given, inside=True)
    if not isinstance(inside, Linearity) or inside.constant > LINEAR:
        whole = _probed(given, inside=False) if isinstance(given, Optimizer) else None
        if isinstance(whole, Linearity) and whole.constant <= LINEAR:
            return [given]
    note = _judge(name, inside, USE_ANOTHER) if isinstance(inside, Linearity) else _unknown(name, inside)
    notes += [note] if note else []
    return [stepper for each in inner for stepper in _steppers(each, notes)]


def _probed(given: Any, inside: bool) -> Linearity | str:
    try:
        return probe(given, inside=inside)
    except ProbeError as error:
        return str(error)


def _validate_hooks(optimizer: Optimizer) -> None:
    name, step = type(optimizer).__name__, type(optimizer).step
    if not getattr(step, "hooked", False) or not hasattr(optimizer, "_optimizer_step_post_hooks"):
        raise ValueError(
            f"{name}.step runs no hooks, because its constructor does not call that of torch.optim.Optimizer, so QuacK "
            "would never see a step; pass the optimizer that moves the weights"
        )
    if getattr(step, "__wrapped__", step) is getattr(Optimizer.step, "__wrapped__", Optimizer.step):
        raise ValueError(f"{name} has no step of its own, so QuacK would never see one: its weights move elsewhere")


def validate_linear(optimizers: Iterable[Optimizer], params: Iterable[Tensor]) -> None:
    """ValueError for an optimizer whose step of these parameters is not linear in lr; a warning if it is not quite.

    Costs some milliseconds for an optimizer that is not torch's, once for a class and its settings.
    """
    rated = {id(param): param for param in params}
    for optimizer in optimizers:
        mine = [p for group in optimizer.param_groups for p in group["params"] if id(p) in rated]
        known = optimizer.optim if type(optimizer).__name__ in SHARD_STATE else optimizer  # type: ignore[attr-defined]
        if type(known) in KNOWN_LINEAR or not mine:
            continue
        try:
            found = probe(known, mine)
        except ProbeError as error:
            message = _unknown(type(known).__name__, str(error))
        else:
            message = _judge(type(known).__name__, found, _way_out(known))
        if message:
            warnings.warn(message, stacklevel=3)


def _judge(name: str, found: Linearity, way_out: str) -> str:
    """What to warn of, if anything."""
    rate = CONSTANT[0]
    off = f"{100 * found.constant:.2g} % off its steps with lr * {rate:g}"
    if not found.reads_lr:
        raise _not_linear(name, "its steps do not change when lr does")
    if found.constant > NEARLY:
        found_out = f"on scratch tensors its steps scaled by {rate:g} are {off}"
        raise _not_linear(name, f"{found_out}: it keeps weights in its state, or lr is not just a factor", way_out)
    if found.constant > LINEAR:
        return (
            f"{name} is not quite linear in lr: on scratch tensors its steps scaled by {rate:g} are {off}. QuacK "
            "scales its steps"
        )
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
    return ValueError(f"{name} is not linear in lr ({reason}), so it has no learning rate a head. {way_out}")


def _way_out(optimizer: Optimizer) -> str:
    if hasattr(optimizer, "train") and hasattr(optimizer, "eval"):
        return f"Schedule-free training works by a wrapper, ScheduleFreeWrapper(SGD(...)). {USE_ANOTHER}"
    return USE_ANOTHER


def _unknown(name: str, reason: str) -> str:
    return (
        f"{name} could not be checked on scratch tensors ({reason}). QuacK is right if its step is lr times a "
        "direction that does not depend on lr, and if it keeps no copy of the weights in its state, such as an average"
    )


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
