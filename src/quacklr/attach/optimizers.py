"""The optimizers whose steps are scaled, and whether a scaled step is the step with a scaled lr.

A rule may need steps that are linear in lr. The optimizers of torch are known by name. Every other class is tested. It
is constructed twice, on small parameters of its own, and both optimizers take the same steps: one with lr * RATE, one
with lr and with every step scaled by RATE. The weights differ if lr is not just a factor of the step, or if the
optimizer computes weights from a copy of them.
"""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from quacklr.core.local import is_sharded
from quacklr.core.rule import Group, Stepped
from quacklr.core.weight import Weight
from quacklr.sharded.engines.engine import unwrapped_optimizer
from quacklr.util.caller import warn
from quacklr.util.modules import run_uncompiled

# wrappers of one optimizer that were tried: scaling the step of that optimizer is scaling its lr
STEP_INSIDE = ("Lookahead", "OptimizersContainer", "SAM", "ScheduleFreeWrapper")
SHARD_STATE = ("ZeroRedundancyOptimizer", "OSS")  # each process steps a part of the parameters and broadcasts it
KNOWN_LINEAR = (
    *(optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam, optim.Adagrad, optim.Adadelta),
    *(optim.RMSprop, optim.Muon, optim.SparseAdam),
)
NOT_LINEAR = {
    optim.LBFGS: "its line search and curvature pairs are made of the steps it took",
    optim.Rprop: "lr is only where its step sizes start; after that they grow and shrink by themselves",
    optim.ASGD: "it averages the weights it wrote, and lr also sets how fast its own step decays",
}
RATE, STEPS, TOLERANCE = 0.5, 12, 0.01
SHAPES = {1: (64,), 2: (64, 64), 3: (4, 32, 32), 4: (64, 16, 2, 2)}  # some optimizers treat small tensors differently
NO_SETTINGS = ("params", "param_names", "lr", "initial_lr")
OTHER_KERNELS = ("fused", "capturable")  # options that choose a kernel, which may not exist for the CPU

NO_HOOKS = (
    "{0} has no step of its own, or {0}.step runs no hooks, because its constructor does not call that of "
    "torch.optim.Optimizer, so QuacK would never see a step; pass the optimizer that moves the weights"
)
UNKNOWN_WRAPPER = (
    "{0} has a {1} inside, and QuacK scales the steps of that {1}; wrappers are not tested. This is right if {0} calls "
    "the step of {1} at the weights of the model, and uses neither lr nor the size of that step itself"
)
BY_HAND = (
    "only the steps that {}.step takes are seen, so call step(closure): first_step and second_step run no hooks if you "
    "call them yourself"
)
REFUSED = (
    "{} is not linear in lr ({}), so it cannot have a learning rate per head. Use an optimizer whose step is lr times "
    "a direction, such as SGD, AdamW, Lion or Muon; docs/attach.md lists those that were tried"
)
NOT_TESTED = (
    "{} could not be tested on small parameters ({}). QuacK is right if its step is lr times a direction that does not "
    "depend on lr, and if it keeps no copy of the weights in its state, such as an average"
)


def as_optimizers(given: object, linear: bool) -> list[Optimizer]:
    """One optimizer or several, as a list.

    With `linear`, a scaled step must be a step with a scaled lr. For a wrapper (Lookahead, SAM, a container of several)
    these are then the optimizers inside it, unless they are given as well. Otherwise it is the wrapper itself, if its
    step runs hooks. ValueError for objects that are no optimizers, and for optimizers whose hooks never run.
    """
    several = list(given) if isinstance(given, Iterable) and not isinstance(given, Optimizer) else [given]
    if not several:
        raise ValueError("no optimizer given; pass the one (or the list of those) that train the model")
    optimizers = list(dict.fromkeys(inner for each in several for inner in _optimizers_to_hook(each, linear, several)))
    for optimizer in optimizers:
        if not _runs_hooks(optimizer):
            raise ValueError(NO_HOOKS.format(type(optimizer).__name__))
        if hasattr(optimizer, "second_step"):
            warn(BY_HAND.format(type(optimizer).__name__))
    return optimizers


def _optimizers_to_hook(given: Any, linear: bool, several: list[Any]) -> list[Optimizer]:
    given = unwrapped_optimizer(given)
    name, inner = type(given).__name__, _inner_optimizers(given)
    if not isinstance(given, Optimizer) and not (inner and hasattr(given, "step") and hasattr(given, "zero_grad")):
        raise ValueError(f"{name} is not a torch.optim.Optimizer; call QuacK(model, optimizer)")
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
    """Whether it has a `step` that runs hooks; not if its constructor does not call that of torch.optim.Optimizer."""
    step, inherited = (getattr(each, "__wrapped__", each) for each in (type(optimizer).step, Optimizer.step))
    hooked = getattr(type(optimizer).step, "hooked", False) and hasattr(optimizer, "_optimizer_step_post_hooks")
    return hooked and step is not inherited


def validate_stepped(weights: Sequence[Weight], optimizers: Sequence[Optimizer], in_groups: Stepped) -> None:
    """Every parameter on a path must have values, and must be in one of the optimizers if it is not frozen."""
    for part in (part for weight in weights for part in weight.parts):
        if part.param.device.type == "meta":
            raise ValueError(f"{part.name}: its parameter is on the meta device; attach after materialising the model")
    if not any(weight.trains for weight in weights):
        raise ValueError(f"{weights[0].name} and all others on a path are frozen, so there is nothing to control")
    stepped = set().union(*map(in_groups.by, optimizers))
    for part in (part for weight in weights if weight.rated for part in weight.parts):
        if part.param.requires_grad and id(part.param) not in stepped:
            way_out = "pass the one that steps it too, or freeze it with requires_grad_(False)"
            if is_sharded(part.param):
                way_out = "sharding replaces parameters, so make the optimizer after it, then attach"
            raise ValueError(f"{part.name}: its parameter is in none of the optimizers given; {way_out}")


def validate_linear(optimizers: Iterable[Optimizer], params: Iterable[Tensor], in_groups: Stepped) -> None:
    """ValueError for an optimizer whose step of these parameters is not linear in lr. Warns if it cannot be tested."""
    rated = set(map(id, params))
    for optimizer in optimizers:
        groups = [
            {**group, "params": [param for param in group["params"] if not rated.isdisjoint(in_groups.of(param))]}
            for group in optimizer.param_groups
        ]
        inside = type(optimizer).__name__ in SHARD_STATE
        _validate(optimizer.optim if inside else optimizer, [group for group in groups if group["params"]])  # type: ignore[attr-defined]


def _validate(optimizer: Optimizer, groups: list[Group]) -> None:
    name = type(optimizer).__name__
    if not groups or type(optimizer) in KNOWN_LINEAR:
        return
    for cls, reason in NOT_LINEAR.items():
        if isinstance(optimizer, cls):
            raise ValueError(REFUSED.format(name, reason))
    try:
        deviation = _deviation(optimizer, groups)
    except Exception as error:  # of the optimizer's code
        warn(NOT_TESTED.format(name, f"{type(error).__name__}: {error}"))
        return
    if deviation > TOLERANCE:
        off = f"on small parameters its steps scaled by {RATE:g} are {deviation:.2%} off its steps with lr * {RATE:g}"
        raise ValueError(REFUSED.format(name, f"{off}: it keeps weights in its state, or lr is not just a factor"))


def _deviation(optimizer: Optimizer, groups: list[Group]) -> float:
    """The largest distance between the two trajectories of a parameter, relative to their length."""
    with (
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),
        torch.device("cpu"),
        run_uncompiled(),
        warnings.catch_warnings(action="ignore"),
    ):
        with_lr = _trajectories(optimizer, groups, lr_rate=RATE, step_rate=1.0)
        scaled = _trajectories(optimizer, groups, lr_rate=1.0, step_rate=RATE)
    deviations = []
    for one, two in zip(with_lr, scaled, strict=True):
        length = float((one[1:] - one[:-1]).flatten(1).norm(dim=1).sum())
        distance = float((one - two).flatten(1).norm(dim=1).max())
        if not math.isfinite(length + distance) or length == 0:
            raise RuntimeError("its steps are not finite" if length else "its step moves nothing")
        rounding = 30 * torch.finfo(torch.float32).eps * float(one[0].norm())
        deviations.append(max(0.0, distance - rounding) / length)
    return max(deviations)


def _trajectories(optimizer: Optimizer, groups: list[Group], lr_rate: float, step_rate: float) -> list[Tensor]:
    """For each small parameter, its values at the start and after every step."""
    torch.default_generator.manual_seed(0)
    random = partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    small = _constructed(optimizer, groups, lr_rate, random)
    if hasattr(small, "train"):
        small.train()  # schedule-free optimizers step only in this mode
    params: list[nn.Parameter] = [param for group in small.param_groups for param in group["params"]]
    means = [random(param.shape) for param in params]  # some adapt only after progress
    values = [[param.detach().clone() for param in params]]
    for _ in range(STEPS):
        for param, mean in zip(params, means, strict=True):
            param.grad = mean + random(param.shape)
        small.step()
        with torch.no_grad():
            for param, before in zip(params, values[-1], strict=True):
                param.copy_(before.lerp(param, step_rate))
        values.append([param.detach().clone() for param in params])
    return [torch.stack(each) for each in zip(*values, strict=True)]


def _constructed(optimizer: Optimizer, groups: list[Group], rate: float, random: Callable[..., Tensor]) -> Any:
    """A new optimizer of the same class with lr * rate, on one small parameter for each number of dimensions.

    Of param groups that differ in lr alone, the one with the largest is taken.
    """
    names = inspect.signature(type(optimizer)).parameters
    attributes = {name: value for name, value in vars(optimizer).items() if isinstance(value, int | float | str)}
    given = {**attributes, **optimizer.defaults}
    arguments = _settings({name: given[name] for name in names if name in given})
    if "lr" in names:
        arguments["lr"] = rate * max(map(_lr, groups))
    kinds: dict[str, Group] = {}
    for group in sorted(groups, key=_lr):
        settings = _settings(group)
        shapes = {param.ndim: SHAPES.get(param.ndim, (4,) * param.ndim) for param in group["params"]}
        params = [nn.Parameter(0.02 * random(shape)) for shape in shapes.values()]
        kinds[repr((settings, sorted(shapes)))] = {**settings, "params": params, "lr": rate * _lr(group)}
    return type(optimizer)(list(kinds.values()), **arguments)


def _settings(given: Group) -> Group:
    settings = {name: value for name, value in given.items() if name not in NO_SETTINGS}
    return copy.deepcopy({**settings, **{name: False for name in OTHER_KERNELS if settings.get(name)}})


def _lr(group: Group) -> float:
    """The learning rate of a param group, or its `initial_lr` if that is larger, as in a warmup."""
    if group.get("lr") is None:
        raise ValueError("its param groups have no lr")
    return max(float(group["lr"]), float(group.get("initial_lr", 0.0))) or 1e-3
