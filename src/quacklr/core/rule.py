"""What a rule is: it decides how far each block of weights steps.

    class HalfSteps(Rule):
        def after(self, step: Step) -> Tensor:
            return torch.full_like(self.rates, 0.5)

    QuacK(model, optimizer, rule=HalfSteps())

Rates are flat vectors with one entry for each block of weights (core/blocks.py). The rules of this library are in
rules/; examples/own_rule.py is a rule that a user could write.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from quacklr.core.blocks import Blocks, Copies
from quacklr.core.sensitivity import CompiledPaths
from quacklr.core.weight import Weight

Group = dict[str, Any]
VERSION = 3  # of the format of a state
NOT_A_STATE = "this is not the state of a QuacK of this version"
FLOAT32 = torch.finfo(torch.float32)


class Stepped:
    """Maps param groups to the parameters that they step, given by id.

    Usually a param group has the parameters themselves. The engines that flatten parameters put flat tensors into it,
    and each steps the ranges of many parameters. `of_tensor` has, by the id of a flat tensor, the ids of all parameters
    that it may hold a range of. That is the same in all processes, also in one whose range is empty: they all take part
    in the collectives of a step.
    """

    def __init__(self, of_tensor: Mapping[int, Collection[int]] | None = None) -> None:
        self._of_tensor = dict(of_tensor or {})
        self.is_plain = not self._of_tensor
        self.known = {i for ids in self._of_tensor.values() for i in ids}  # whatever is in the param groups now

    def of(self, tensor: object) -> Collection[int]:
        """The ids of the parameters that a tensor in a param group stands for."""
        return self._of_tensor.get(id(tensor), (id(tensor),))

    def groups(self, optimizer: Optimizer) -> list[tuple[Group, set[int]]]:
        """The param groups that the optimizer has now, each with the ids of its parameters."""
        return [(group, {i for tensor in group["params"] for i in self.of(tensor)}) for group in optimizer.param_groups]

    def by(self, optimizer: Optimizer) -> set[int]:
        """The ids of all parameters in the param groups that the optimizer has now."""
        return set().union(*(ids for _, ids in self.groups(optimizer)))


@dataclass(slots=True, eq=False)
class Step:
    """One step of an optimizer, from its pre-hook to its post-hook.

    Attributes:
        optimizer: the optimizer that steps.
        tensors: ids of the tensors on paths that it moves.
        begins: whether this is the first step of an iteration. With several optimizers an iteration has several steps;
            it ends when a tensor steps again.
        blocks: the blocks of all weights.
        copies: the rows before the step; None for rows that do not step.
    """

    optimizer: Optimizer
    tensors: set[int]
    begins: bool
    blocks: Blocks
    copies: Copies
    calls_step: bool = False  # whether it called the step of its parent class, or of another optimizer
    measured: tuple[Tensor, Tensor] | None = None

    def measure(self) -> tuple[Tensor, Tensor]:
        """Frobenius norms of all blocks before the step, and its largest singular values. Collective if sharded."""
        if self.measured is None:
            self.measured = self.blocks.measure_step(self.copies)
        return self.measured


class Rule(ABC):
    """Decides the rates of all blocks in every step. A rule belongs to one QuacK, also after that is removed.

    Attributes:
        linear: whether the rule needs optimizers whose step is linear in lr.
        measures: whether `after` measures the step.
        has_state: whether a resumed run needs `state_dict()`.
        rates_all: whether weights have rates that were declared with `rated=False`, such as LoRA's A.
        first_rate: the rate of weights that have not stepped.
        paths, optimizers, in_groups: the compiled paths, and what steps them; from `start` on.
        rates: (blocks,), those of the last step.
        stepped: ids of the tensors that have stepped in this iteration. QuacK writes it.
        attached: whether a QuacK has the rule.
    """

    linear = False
    measures = False
    has_state = False
    rates_all = False
    first_rate = 1.0
    paths: CompiledPaths
    optimizers: Sequence[Optimizer]
    in_groups: Stepped
    rates: Tensor
    stepped: Set[int] = frozenset()
    attached = False

    def attach(self, optimizers: Sequence[Optimizer]) -> None:  # noqa: ARG002
        """Called when QuacK is attached. The paths may not be known yet."""
        self.attached = True

    def start(self, paths: CompiledPaths, optimizers: Sequence[Optimizer], in_groups: Stepped) -> None:
        """Begin a run with these paths. Called before the first step; again if a part of the model runs later."""
        known = self.paths.by_name(self.rates) if hasattr(self, "paths") else {}
        self.paths, self.optimizers, self.in_groups = paths, optimizers, in_groups
        self.rates = paths.flat(known, self.first_rate)

    def before(self, step: Step) -> Copies:
        """Copies of the rows that the step will move."""
        return self.paths.blocks.copy(step.tensors)

    @abstractmethod
    def after(self, step: Step) -> Tensor:
        """The rates of all blocks, (blocks,): rows are set to old + rate * (new - old)."""

    def next_rates(self) -> Tensor:
        """The rates of the next step, if they are known before it; else those of the last step."""
        return self.rates

    def has_rates(self, weight: Weight) -> bool:
        """Whether `rates` has values for a weight."""
        return weight.trains

    def optimizer_loaded(self, optimizer: Optimizer) -> None:  # noqa: B027 (most rules have nothing to do)
        """Called after an optimizer has loaded a state."""

    def start_is_known(self) -> None:  # noqa: B027
        """Do not warn that the run may have begun earlier: the caller knows that it begins with these weights."""

    def state_dict(self) -> dict[str, Any]:
        """The state that a resumed run needs, by weight name; only a version for a rule without state."""
        return {"version": VERSION, "rule": type(self).__name__}

    def load_state_dict(self, state_dict: Mapping[str, Any], partial: bool = False) -> None:  # noqa: B027
        """Load a state. A rule without state loads nothing, so the state may be that of another rule.

        `partial`: the state may have weights that are on no path yet, because their part of the model has not run.
        """


def validate_number(name: str, value: object, meaning: str, *, zero: bool = False, infinite: bool = False) -> None:
    """A setting must be a positive number that float32 can hold; with `zero` also 0, with `infinite` also inf."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    exceptions = [0.0] * zero + [float("inf")] * infinite
    if not is_number or not (FLOAT32.tiny <= value <= FLOAT32.max or value in exceptions):  # type: ignore[operator]
        kinds = "0 or a positive number" if zero else "a positive number"
        raise ValueError(f"{name}={value!r}: {meaning} must be {kinds} that float32 can hold")
