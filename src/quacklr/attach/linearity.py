"""Whether scaling an optimizer's step is the same as scaling its lr, measured on scratch copies of the optimizer.

Two copies take the same steps. One has lr * rate in its param groups. The other has lr, and its step is scaled as QuacK
scales it, to old + rate * (new - old). In the first steps the rate is constant, then it changes with every step. Before
the last steps a million is added to the step count. The two trajectories are equal if the update is linear in lr and
the optimizer's state holds neither a copy of the weights nor lr.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from quacklr.attach.isolation import isolated
from quacklr.attach.scratch import WAYS, ProbeError, Scratch, inner_optimizers, key_of
from quacklr.core.step_scaler import steps_on_stack as running_steps

CONSTANT, CHANGING, LATE = [0.5] * 12, [0.25, 2.0, 0.5, 1.5, 0.1, 1.0], [0.5] * 4
MANY_STEPS = 1_000_000
MOST_EVALUATIONS, LONGEST_PERIOD = 50, 500
MOST_SECONDS = 10.0  # of processor time, for all copies together
LINEAR, NEARLY = 1e-4, 1e-2  # the largest deviation of a linear update, relative to the step

Trajectory = list[list[Tensor]]
_known: WeakKeyDictionary[type, dict[str, Any]] = WeakKeyDictionary()


class Linearity(NamedTuple):
    """The deviation of scaled steps from steps with a scaled lr, relative to the steps; 0 if it is only rounding.

    Attributes:
        constant: with a constant rate.
        changing: with a rate that changes with every step.
        late: at a step count of about a million.
        reads_lr: whether a change of lr changes the steps.
    """

    constant: float
    changing: float
    late: float
    reads_lr: bool = True


def probe(given: Any, only: Iterable[Tensor] | None = None, inside: bool = False) -> Linearity:
    """Measure the linearity of an optimizer on scratch copies; ProbeError if they cannot be run.

    With `inside`, `given` is a wrapper, and the steps of the optimizers inside it are scaled. `only` restricts the
    measurement to param groups that hold one of these parameters. Results are cached by class and settings.
    """
    ids = None if only is None else {id(param) for param in only}
    known = _known.setdefault(type(given), {})
    key = f"{inside} {key_of(given, ids)}"
    if key not in known:
        with isolated(given):
            known[key] = _probe(given, ids, inside)
    if isinstance(known[key], str):
        raise ProbeError(known[key])
    return known[key]


def _probe(given: Any, only: set[int] | None, inside: bool) -> Linearity | str:
    """Measure with the first way of copying and of stepping that runs. Returns a reason if none runs."""
    reasons: list[str] = []
    until = time.process_time() + MOST_SECONDS
    ways = [way for way in WAYS if way[0] == way[1] or inner_optimizers(given)]
    dtypes = torch.float64, torch.float32
    for way, mixed, dtype, take_step in itertools.product(ways, (True, False), dtypes, STEPS):
        try:
            return _measure(partial(Scratch, given, only, way, mixed, dtype), take_step, inside, until)
        except ProbeError as error:
            reasons.insert(0, str(error))
        except Exception as error:  # the code of an optimizer can raise any error
            reasons.append(f"{type(error).__name__}: {error}")
    return reasons[0]


def _measure(
    make: Callable[[], Scratch], take_step: Step, inside: bool, until: float, constant: Sequence[float] = CONSTANT
) -> Linearity:
    rates = [*constant, *CHANGING, *LATE]
    ends = list(itertools.accumulate(map(len, (constant, CHANGING, LATE)), initial=0))
    run = _Run(make(), take_step, until)
    run.scale_steps(inside)
    scaled = run.trajectory(rates)
    _deviation(scaled, scaled, 0, ends[1])  # raises an error if nothing moved
    with_lr = _Run(make(), take_step, until).trajectory(rates)
    deviations = [_deviation(scaled, with_lr, *part) for part in itertools.pairwise(ends)]
    if deviations[0] <= LINEAR and run.period > ends[1]:
        return _measure(make, take_step, inside, until, CONSTANT[:1] * (run.period + 2))
    reads_lr = True
    if max(deviations) > LINEAR:
        same = _Run(make(), take_step, until).trajectory(CONSTANT[:1] * len(rates))
        reads_lr = _deviation(same, with_lr, *ends[1:3]) > LINEAR
    return Linearity(deviations[0], deviations[1], deviations[2], reads_lr)


def _deviation(one: Trajectory, two: Trajectory, start: int, end: int) -> float:
    """The largest distance between two trajectories from one step to another, relative to the length of the second."""
    worst = 0.0
    for ones, twos in zip(zip(*one, strict=True), zip(*two, strict=True), strict=True):
        length = sum(float((twos[step + 1] - twos[step]).norm()) for step in range(start, end))
        shift = ones[start] - twos[start]
        distance = max(float((ones[step + 1] - twos[step + 1] - shift).norm()) for step in range(start, end))
        if not math.isfinite(length + distance):
            raise ProbeError("its steps are not finite")
        if start == 0 and length == 0:
            raise ProbeError("its step moves nothing")
        rounding = 30 * torch.finfo(torch.float32).eps * float(twos[start].norm())
        if distance > rounding:
            worst = max(worst, distance / length if length else math.inf)
    return worst


class _Run:
    """The steps of a scratch optimizer: with lr * rate in its param groups, or with lr and scaled steps."""

    def __init__(self, scratch: Scratch, take_step: Step, until: float) -> None:
        self._scratch, self._take_step, self._until = scratch, take_step, until
        self._optimizers = [scratch.optimizer, *inner_optimizers(scratch.optimizer)]
        scaled = set(map(id, scratch.scaled))
        groups = [group for each in self._optimizers for group in getattr(each, "param_groups", [])]
        groups = [g for g in groups if "lr" in g and any(id(param) in scaled for param in g["params"])]
        self._groups = list({id(group): group for group in groups}.values())
        self._hooked: list[Optimizer] = []
        self._scales = self._has_scaled = False
        self.period = 0

    def scale_steps(self, inside: bool) -> None:
        """Scale the steps of the optimizer, or of those inside it, instead of lr."""
        self._scales, self._hooked = True, self._optimizers[1:] if inside else self._optimizers[:1]
        for each in self._hooked:
            each.register_step_pre_hook(self._before)
            each.register_step_post_hook(self._after)

    def _is_outermost(self) -> bool:
        return sum(map(running_steps, self._hooked)) == 1

    def _values(self) -> list[Tensor]:
        return [param.detach().clone() for param in self._scratch.scaled]

    def _before(self, *_: Any) -> None:
        if self._is_outermost():
            self._old = self._values()

    def _after(self, *_: Any) -> None:
        if self._is_outermost():
            self._has_scaled = True
            with torch.no_grad():
                for param, old in zip(self._scratch.scaled, self._old, strict=True):
                    param.copy_(old.lerp(param, self._rate))

    def trajectory(self, rates: Sequence[float]) -> Trajectory:
        """The values of the scratch tensors at the start and after each step."""
        gradients = _gradients(self._scratch.params, len(rates))
        _seed()
        with contextlib.suppress(AttributeError):  # schedule-free optimizers have a training mode
            self._scratch.optimizer.train()
        lrs = [group["lr"] for group in self._groups]
        values = [self._values()]
        for step, rate in enumerate(rates):
            self._rate = rate
            if time.process_time() > self._until:
                raise ProbeError("its steps take long")
            if step == len(rates) - len(LATE):
                self.period = self._longest_period(values[0])
                self._add_steps()
            for group, lr in zip(self._groups, lrs, strict=True):
                group["lr"] = lr if self._scales else lr * rate
            self._take_step(self._scratch.optimizer, self._scratch.params, gradients[step])
            values.append(self._values())
            if step == len(CONSTANT) and self._scales and not self._has_scaled:
                raise ProbeError("its step runs no hooks")
        return values

    def _states(self) -> list[dict[str, Any]]:
        states = [state for each in self._optimizers for state in getattr(each, "state", {}).values()]
        return [state for state in states if isinstance(state, dict)]

    def _longest_period(self, start: list[Tensor]) -> int:
        """The largest whole number among the settings, if the state holds a copy of the initial weights; else 0.

        The optimizer may use such a copy only once in that many steps.
        """
        kept = [value for state in self._states() for value in state.values() if isinstance(value, Tensor)]
        if not any(value.shape == param.shape and torch.equal(value, param) for value in kept for param in start):
            return 0
        settings = [value for each in (*map(vars, self._optimizers), *self._groups) for value in each.values()]
        return max((value for value in settings if type(value) is int and value <= LONGEST_PERIOD), default=0)

    def _add_steps(self) -> None:
        groups = [group for each in self._optimizers for group in getattr(each, "param_groups", [])]
        for state in (*self._states(), *groups):
            if isinstance(state.get("step"), int | float | Tensor):
                state["step"] = state["step"] + MANY_STEPS


def _gradients(params: list[nn.Parameter], steps: int) -> Trajectory:
    """Random gradients, the same for every run. Their mean is constant: some optimizers adapt only after progress."""
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn((steps + 1, *p.shape), generator=generator, dtype=torch.float64).to(p.dtype) for p in params]
    return [[each[0] + each[1 + step] for each in drawn] for step in range(steps)]


def _seed() -> None:
    torch.default_generator.manual_seed(0)
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)


def _plain_step(optimizer: Any, params: list[nn.Parameter], grads: Iterable[Tensor]) -> None:
    _set_gradients(params, grads)
    optimizer.step()


def _set_gradients(params: list[nn.Parameter], grads: Iterable[Tensor]) -> None:
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad


def _loss(params: list[nn.Parameter], linear: list[Tensor]) -> Tensor:
    return torch.stack([(p * (grad + p / 2)).sum() for p, grad in zip(params, linear, strict=True)]).sum()


def _step_with_closure(optimizer: Any, params: list[nn.Parameter], linear: list[Tensor]) -> None:
    left = iter(range(MOST_EVALUATIONS))

    def closure() -> Tensor:
        if next(left, None) is None:
            raise ProbeError("a step evaluates the loss many times")
        with torch.enable_grad():
            loss = _loss(params, linear)
        _set_gradients(params, torch.autograd.grad(loss, params))
        return loss

    closure()
    optimizer.step(closure)


def _step_with_graph(optimizer: Any, params: list[nn.Parameter], linear: list[Tensor]) -> None:
    _plain_step(optimizer, params, torch.autograd.grad(_loss(params, linear), params, create_graph=True))


Step = Callable[[Any, list[nn.Parameter], list[Tensor]], None]
STEPS: tuple[Step, ...] = (_plain_step, _step_with_closure, _step_with_graph)
