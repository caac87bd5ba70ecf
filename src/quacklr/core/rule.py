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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from quacklr.core.blocks import Blocks, Copies
from quacklr.core.sensitivity import CompiledPaths
from quacklr.core.state import VERSION
from quacklr.core.stepped import Stepped
from quacklr.core.weight import Weight


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
        """After a step, for all blocks: Frobenius norms before it, and its largest singular values.

        Collective for sharded weights.
        """
        if self.measured is None:
            self.measured = self.blocks.measure_step(self.copies)
        return self.measured


class Rule(ABC):
    """Decides the rates of all blocks in every step. A rule belongs to one QuacK.

    Attributes:
        linear: whether the rule needs optimizers whose step is linear in lr.
        measures: whether `after` measures the step.
        has_state: whether a resumed run needs `state_dict()`.
        rates_all: whether weights have rates that were declared with `rated=False`, such as LoRA's A.
        paths, optimizers, in_groups: the compiled paths, and what steps them; from `start` on.
        rates: (blocks,), those of the last step.
        stepped: ids of the tensors that have stepped in this iteration. QuacK writes it.
    """

    linear = False
    measures = False
    has_state = False
    rates_all = False
    paths: CompiledPaths
    optimizers: Sequence[Optimizer]
    in_groups: Stepped
    rates: Tensor
    stepped: set[int]

    def start(self, paths: CompiledPaths, optimizers: Sequence[Optimizer], in_groups: Stepped) -> None:
        """Begin a run with these paths. Called before the first step; again if a part of the model runs later."""
        self.paths, self.optimizers, self.in_groups, self.stepped = paths, optimizers, in_groups, set()
        self.rates = torch.ones(paths.blocks.total, device=paths.blocks.device, dtype=torch.float32)

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
