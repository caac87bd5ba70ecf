"""The rates of a budget: computed from each step after it was taken."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from quacklr.core.blocks import Copies
from quacklr.core.budget import BudgetRule
from quacklr.core.relative_lr import RelativeLr
from quacklr.core.sensitivity import Rule
from quacklr.core.state import VERSION, validate_version
from quacklr.core.weight import Weight

MOSTLY_ROUNDING = (
    "{} is {}, and the first step was scaled by up to {:.3g}. Such a step of the optimizer is mostly rounding in 16 "
    "bits, and scaling it makes the rounding larger. Keep the weights in float32 and train with autocast, or raise lr"
)
LARGE_FOR_16_BITS = 10.0


class HeadChange(NamedTuple):
    """(heads,) each: how much the last step changes the logits of an attention, in nats; docs/theory.md says exactly.

    Attributes:
        asked: by the optimizer's own step, to first order.
        given: by the step as QuacK scaled it, at most.
    """

    asked: Tensor
    given: Tensor


class BudgetRates:
    """Rates that hold the change of each head's logits in a step to a budget.

    `rates` are those of the last step, NaN for blocks that have not stepped. `stepped` are the ids of the tensors that
    have stepped in this iteration.
    """

    def __init__(self, rule: Rule, budget: float, optimizers: Iterable[Optimizer]) -> None:
        self.rule, self.budget = rule, budget
        self.stepped: set[int] = set()
        self._ever_stepped: set[int] = set()
        self.compiled = BudgetRule(rule)
        self.rates = torch.full((rule.blocks.total,), torch.nan, device=rule.blocks.device, dtype=torch.float32)
        self.asked = self.given = self.rates.new_zeros(self.compiled.total_heads)
        self._on_paths = {id(part.param) for part in rule.parts}
        self._lr = RelativeLr(self._on_paths)
        for optimizer in optimizers:
            self._lr.remember(optimizer)
        self._checked_rounding: set[int] = set()
        self._masks: dict[frozenset[int], Tensor] = {}
        self._shares: dict[tuple[frozenset[int], frozenset[int]], Tensor] = {}

    def before_step(self, tensors: Collection[int], new_iteration: bool) -> Copies:
        """Copies of the rows of these tensors (by id)."""
        self.no_step(tensors, new_iteration)
        self._ever_stepped |= self.stepped
        return self.rule.blocks.copy(tensors)

    def no_step(self, tensors: Collection[int], new_iteration: bool) -> None:
        """Count these tensors (by id) as stepped, without a change so far. If an iteration begins, changes are 0."""
        if new_iteration:
            self.stepped.clear()
            self.asked = self.given = torch.zeros_like(self.asked)
        self.stepped |= set(tensors)

    def after_step(self, optimizer: Optimizer, copies: Copies, tensors: Collection[int]) -> Tensor:
        """The rates of all blocks, from the step that was taken. Collective for sharded weights."""
        norms, steps = self.rule.blocks.measure_step(copies)
        step = self.compiled.scale_step(norms, steps, self._allowed(optimizer, tensors), self._share(tensors))
        self.rates = step.rates.where(self._blocks_in(tensors), self.rates)
        if not self._checked_rounding.issuperset(tensors):
            self._warn_of_rounding(tensors)
        self.asked, self.given = self.asked + step.asked, self.given + step.given
        return step.rates

    def has_rates(self, weight: Weight) -> bool:
        """Whether a weight has rates, which are those of its last step."""
        return weight.trains and any(id(part.param) in self._ever_stepped for part in weight.parts)

    def changes(self) -> dict[str, HeadChange]:
        """The change of the last iteration, by the name of the attention module."""
        return {name: HeadChange(self.asked[at], self.given[at]) for name, at in self.compiled.heads.items()}

    def optimizer_loaded(self, optimizer: Optimizer) -> None:
        """The state of an optimizer was loaded. It has the initial lrs, unless it was saved without QuacK."""
        self._lr.remember(optimizer)

    def state_dict(self) -> dict[str, Any]:
        """There is no state."""
        return {"version": VERSION}

    def load_state_dict(self, state_dict: object) -> None:
        """There is no state; ValueError if this is not the state of a QuacK."""
        if not isinstance(state_dict, Mapping) or not {"version", "norm"} & set(state_dict):
            raise ValueError("this is not the state of a QuacK")
        validate_version(state_dict)

    def _allowed(self, optimizer: Optimizer, tensors: Collection[int]) -> Tensor:
        """By block, the budget in nats, times the lr of its param group relative to its initial lr."""
        allowed = self.rates.new_zeros(self.rule.blocks.total)
        groups = [group for group in optimizer.param_groups if any(id(param) in tensors for param in group["params"])]
        factors = [self._lr.now(optimizer, group, self.budget) for group in groups]
        if all(not isinstance(factor, Tensor) and factor == factors[0] for factor in factors):
            return allowed.fill_(self.budget * factors[0])
        for group, factor in zip(groups, factors, strict=True):
            in_group = self._blocks_in({id(param) for param in group["params"]})
            allowed = torch.maximum(allowed, self.budget * factor * in_group)
        return allowed

    def _warn_of_rounding(self, tensors: Collection[int]) -> None:
        """Warn in the first step of these tensors (by id) if 16-bit weights have large rates. Waits for the device."""
        self._checked_rounding |= set(tensors)
        for weight, index in self.rule.blocks.flat_index.items():
            if weight.rated and weight.param.element_size() == 2 and id(weight.param) in tensors:
                rate = float(self.rates[index].max())
                if rate > LARGE_FOR_16_BITS:
                    text = MOSTLY_ROUNDING.format(weight.name, str(weight.param.dtype).removeprefix("torch."), rate)
                    warnings.warn(text, stacklevel=7)
                    return

    def _blocks_in(self, tensors: Collection[int]) -> Tensor:
        """(blocks,): whether a block has rows in these tensors (by id)."""
        key = frozenset(tensors)
        if key not in self._masks:
            mask = torch.zeros(self.rule.blocks.total, dtype=torch.bool, device="cpu")
            for weight, index in self.rule.blocks.flat_index.items():
                mask[index] = weight.rated and any(id(part.param) in key for part in weight.parts)
            self._masks[key] = mask.to(self.rates.device)
        return self._masks[key]

    def _share(self, tensors: Collection[int]) -> Tensor:
        """(heads,): the share of the budget for a step of these tensors (by id); 1 if they are all that a head trains.

        If several optimizers step the weights of a head, a parameter counts by the square root of its columns. The
        first steps of AdamW have norms in this ratio, so rates are nearly those of one optimizer for all of them.
        """
        parts = (part.param for part in self.rule.parts)
        trained = frozenset(id(param) for param in parts if param.requires_grad or id(param) in tensors)
        key = frozenset(tensors), trained
        if key not in self._shares:
            self._shares[key] = self._new_share(*key)
        return self._shares[key]

    def _new_share(self, tensors: Collection[int], trained: Collection[int]) -> Tensor:
        of_step, of_all = torch.zeros(2, self.rule.blocks.total, device="cpu", dtype=torch.float32)
        for weight, index in self.rule.blocks.flat_index.items():
            for part in (part for part in weight.parts if weight.rated and id(part.param) in trained):
                of_all[index] += math.sqrt(part.columns)
                of_step[index] += math.sqrt(part.columns) * (id(part.param) in tensors)
        head, block = torch.unique(torch.stack([self.compiled.head, self.compiled.block]).cpu(), dim=1)
        zeros = of_step.new_zeros(self.compiled.total_heads)
        step, total = (zeros.index_add(0, head, each[block]) for each in (of_step, of_all))
        return (step / total.clamp(min=1)).to(self.rates.device)

    def __repr__(self) -> str:
        return f"budget={self.budget:g}"
