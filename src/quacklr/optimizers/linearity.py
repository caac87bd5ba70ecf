"""Whether scaling an optimizer's step is the same as scaling its lr, found by running scratch copies of the optimizer.

Two copies take the same steps. One has lr * rate in its param groups. The other has lr, and its step is scaled as QuacK
scales it, to old + rate * (new - old). The rate is constant at first, then it changes with every step, and at last the
step count is set to a million. The two stay together if the update is linear in lr and no copy of the weights and no
lr is kept in the optimizer's state.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from quacklr.optimizers.isolation import isolated
from quacklr.optimizers.nested_steps import running_steps
from quacklr.optimizers.scratch import ProbeError, Scratch, inner_optimizers, key_of

CONSTANT, CHANGING, LATE = [0.5] * 12, [0.25, 2.0, 0.5, 1.5, 0.1, 1.0], [0.5] * 4
MANY_STEPS = 1_000_000
MOST_EVALUATIONS, LONGEST_PERIOD = 50, 500
MOST_SECONDS = 10.0  # of the processor, for all copies together
LINEAR, NEARLY = 1e-4, 1e-2  # the largest deviation from being linear, relative to the step

Trajectory = list[list[Tensor]]
Feed = Callable[[Any, list[nn.Parameter], list[Tensor]], object]
_known: WeakKeyDictionary[type, dict[str, Any]] = WeakKeyDictionary()


class Linearity(NamedTuple):
    """The deviation of scaled steps from steps with a scaled lr, relative to the steps.

    With a constant rate, with a changing one, and at a step count of a million; each 0 if it is only rounding.
    `reads_lr` says whether a change of lr changes the steps.
    """

    constant: float
    changing: float
    late: float
    reads_lr: bool = True


class _Run:
    """A scratch optimizer, and the steps it takes."""

    def __init__(self, scratch: Scratch, optimizer: Any, feed: Feed, until: float) -> None:
        self._scratch, self._optimizer, self._feed, self._until = scratch, optimizer, feed, until
        self._objects = [optimizer, *inner_optimizers(optimizer)]
        scaled = {id(param) for param in scratch.scaled}
        groups = [group for each in self._objects for group in getattr(each, "param_groups", [])]
        groups = [g for g in groups if "lr" in g and any(id(param) in scaled for param in g["params"])]
        self._groups = list({id(group): group for group in groups}.values())
        self._hooked: list[Optimizer] = []
        self.period = 0
        self._rate = 1.0
        self._before: list[Tensor] = []
        self._scales = False

    def hook(self, optimizers: Iterable[Optimizer]) -> None:
        """Scale the steps of these, instead of lr."""
        self._hooked = list(optimizers)
        for each in self._hooked:
            each.register_step_pre_hook(self._pre)
            each.register_step_post_hook(self._post)

    def _is_outermost(self) -> bool:
        return sum(map(running_steps, self._hooked)) == 1

    def _pre(self, *_: Any) -> None:
        if self._is_outermost():
            self._before = [param.detach().clone() for param in self._scratch.scaled]

    def _post(self, *_: Any) -> None:
        if self._is_outermost():
            self._scales = True
            with torch.no_grad():
                for param, before in zip(self._scratch.scaled, self._before, strict=True):
                    param.copy_(before.lerp(param, self._rate))

    def steps(self, grads: list[list[Tensor]], rates: Sequence[float], by_lr: bool) -> Trajectory:
        """The tensors at the start and after each step."""
        _seed()
        with contextlib.suppress(AttributeError):  # schedule-free ones must be told
            self._optimizer.train()
        lrs = [group["lr"] for group in self._groups]
        seen = [[param.detach().clone() for param in self._scratch.scaled]]
        for step, rate in enumerate(rates):
            if time.process_time() > self._until:
                raise ProbeError("its steps take long")
            if step == len(rates) - len(LATE):
                self.period = self._longest_period(seen[0])
                self._skip_to_late_steps()
            self._rate = rate
            for group, lr in zip(self._groups, lrs, strict=True):
                group["lr"] = lr * rate if by_lr else lr
            self._feed(self._optimizer, self._scratch.params, [grad.clone() for grad in grads[step]])
            seen.append([param.detach().clone() for param in self._scratch.scaled])
            if step == len(CONSTANT) and not by_lr and not self._scales:
                raise ProbeError("its step runs no hooks")
        return seen

    def _longest_period(self, start: list[Tensor]) -> int:
        """The largest whole number among the settings, if the weights at the start are kept in the state; else 0.

        Such weights may come into play after so many steps only.
        """
        states = [state for each in self._objects for state in getattr(each, "state", {}).values()]
        kept = [v for state in states if isinstance(state, dict) for v in state.values() if isinstance(v, Tensor)]
        if not any(value.shape == param.shape and torch.equal(value, param) for value in kept for param in start):
            return 0
        settings = [value for each in self._objects for value in vars(each).values()]
        settings += [value for group in self._groups for value in group.values()]
        return max((value for value in settings if type(value) is int and value <= LONGEST_PERIOD), default=0)

    def _skip_to_late_steps(self) -> None:
        for each in self._objects:
            for state in (*getattr(each, "state", {}).values(), *getattr(each, "param_groups", [])):
                if isinstance(state, dict) and isinstance(state.get("step"), int | float | Tensor):
                    state["step"] = state["step"] + MANY_STEPS


def _gradients(params: list[nn.Parameter], steps: int) -> list[list[Tensor]]:
    """The same for every run, random with a mean that stays: some optimizers need to get on before they adapt."""
    numbers = torch.Generator().manual_seed(1)
    drawn = [torch.randn((steps + 1, *p.shape), generator=numbers, dtype=torch.float64).to(p.dtype) for p in params]
    return [[each[0] + each[1 + step] for each in drawn] for step in range(steps)]


def _seed() -> None:
    torch.default_generator.manual_seed(0)
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)


def _plain_step(optimizer: Any, params: list[nn.Parameter], linear: list[Tensor]) -> None:
    for param, grad in zip(params, linear, strict=True):
        param.grad = grad
    optimizer.step()


def _loss(params: list[nn.Parameter], linear: list[Tensor]) -> Tensor:
    terms = [(param * (grad + param / 2)).sum() for param, grad in zip(params, linear, strict=True)]
    return torch.stack(terms).sum()


def _step_with_closure(optimizer: Any, params: list[nn.Parameter], linear: list[Tensor]) -> None:
    left = iter(range(MOST_EVALUATIONS))

    def closure() -> Tensor:
        if next(left, None) is None:
            raise ProbeError("a step evaluates the loss many times")
        with torch.enable_grad():
            loss = _loss(params, linear)
        for param, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
            param.grad = grad
        return loss

    closure()
    optimizer.step(closure)


def _step_with_graph(optimizer: Any, params: list[nn.Parameter], linear: list[Tensor]) -> None:
    grads = torch.autograd.grad(_loss(params, linear), params, create_graph=True)
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    optimizer.step()


def probe(given: Any, only: Iterable[Tensor] | None = None, inside: bool = False) -> Linearity:
    """Run scratch copies of an optimizer; ProbeError if that cannot be done.

    With `inside`, `given` is a wrapper, and the steps of the optimizers in it are scaled. `only` says which parameters
    matter: param groups without any of them are not run. What was found is kept by class and settings.
    """
    ids = None if only is None else {id(param) for param in only}
    known = _known.setdefault(type(given), {})
    key = f"{inside} {key_of(given, ids)}"
    if key not in known:
        with isolated(given):
            known[key] = _probe(given, ids, inner_optimizers if inside else lambda optimizer: [optimizer])
    found = known[key]
    if isinstance(found, str):
        raise ProbeError(found)
    return found


def _probe(given: Any, only: set[int] | None, hooked: Callable[[Any], list[Optimizer]]) -> Linearity | str:
    """What was found, or why nothing was."""
    reasons: list[str] = []
    until = time.process_time() + MOST_SECONDS
    for build, feed in _ways(given, only):
        try:
            return _measure(build, feed, hooked, until)
        except ProbeError as error:
            reasons.insert(0, str(error))
        except Exception as error:  # of any kind: this is other people's code
            reasons.append(f"{type(error).__name__}: {error}")
    return reasons[0]


def _ways(given: Any, only: set[int] | None) -> Iterator[tuple[Callable[[], tuple[Scratch, Any]], Feed]]:
    """How to make and how to step a scratch optimizer; the first way that runs is taken."""
    makers: list[Callable[[Scratch, Any], Any]] = [Scratch.copy, Scratch.construct, Scratch.copy_in_part]
    if inner_optimizers(given):
        makers[2:2] = [Scratch.copy_around, Scratch.construct_with_class]
    feeds: list[Feed] = [_plain_step, _step_with_closure, _step_with_graph]
    for make, mixed, dtype in itertools.product(makers, (True, False), (torch.float64, torch.float32)):

        def build(
            make: Callable[[Scratch, Any], Any] = make, mixed: bool = mixed, dtype: torch.dtype = dtype
        ) -> tuple[Scratch, Any]:
            scratch = Scratch(given, only, dtype, mixed)
            return scratch, make(scratch, given)

        for feed in feeds:
            yield build, feed


def _measure(
    build: Callable[[], tuple[Scratch, Any]],
    feed: Feed,
    hooked: Callable[[Any], list[Optimizer]],
    until: float,
    constant: Sequence[float] = CONSTANT,
) -> Linearity:
    rates = [*constant, *CHANGING, *LATE]
    ends = list(itertools.accumulate(map(len, (constant, CHANGING, LATE)), initial=0))
    scratch, optimizer = build()
    grads = _gradients(scratch.params, len(rates))
    run = _Run(scratch, optimizer, feed, until)
    run.hook(hooked(optimizer))
    scaled = run.steps(grads, rates, by_lr=False)
    _deviation(scaled, scaled, 0, ends[1])  # of one that moves nothing, another run would not help
    with_lr = _Run(*build(), feed, until).steps(grads, rates, by_lr=True)
    parts = [_deviation(scaled, with_lr, *part) for part in itertools.pairwise(ends)]
    if parts[0] <= LINEAR and run.period > ends[1]:
        return _measure(build, feed, hooked, until, CONSTANT[:1] * (run.period + 2))
    reads_lr = True
    if max(parts) > LINEAR:
        same = _Run(*build(), feed, until).steps(grads, CONSTANT[:1] * len(rates), by_lr=True)
        reads_lr = _deviation(same, with_lr, *ends[1:3]) > LINEAR
    return Linearity(parts[0], parts[1], parts[2], reads_lr)


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
