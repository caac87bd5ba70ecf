"""Rates that follow from a budget. They are computed after each step of the optimizer, from the step itself."""

from __future__ import annotations

import math
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
from quacklr.core.stepped import PLAIN, Stepped
from quacklr.core.weight import Weight
from quacklr.util.caller import warn

MOSTLY_ROUNDING = (
    "{} is {}, and the first step was scaled by up to {:.3g}. Such a step of the optimizer is mostly rounding in 16 "
    "bits, and scaling it makes the rounding larger. Keep the weights in float32 and train with autocast, or raise lr"
)
LARGE_FOR_16_BITS = 10.0


class HeadChange(NamedTuple):
    """How much the last step changes the logits of an attention module, in nats. docs/theory.md has the formulas.

    Attributes:
        asked: (heads,) the change by the optimizer's own step, to first order.
        given: (heads,) an upper bound of the change by the step as QuacK scaled it.
    """

    asked: Tensor
    given: Tensor


class BudgetRates:
    """Rates that hold the change of each head's logits in a step to a budget.

    `rates` are those of the last step, NaN for blocks that have not stepped. `stepped` are the ids of the tensors that
    have stepped in this iteration. An iteration ends when one of them steps again.
    """

    def __init__(self, rule: Rule, budget: float, optimizers: Iterable[Optimizer], in_groups: Stepped = PLAIN) -> None:
        self.rule, self.budget, self._in_groups = rule, budget, in_groups
        self.stepped: set[int] = set()
        self._ever_stepped: set[int] = set()
        self.compiled = BudgetRule(rule)
        self.rates = torch.full((rule.blocks.total,), torch.nan, device=rule.blocks.device, dtype=torch.float32)
        self.asked = self.given = self.rates.new_zeros(self.compiled.total_heads)
        self._on_paths = {id(part.param) for part in rule.parts}
        self._lr = RelativeLr(self._on_paths, in_groups)
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
        """Count these tensors (by id) as stepped, also if every lr is 0. An iteration begins with changes of 0."""
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
        """Keep the initial lrs after an optimizer's state was loaded, unless that state has them."""
        self._lr.remember(optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Only a version: a budget needs no state."""
        return {"version": VERSION}

    def load_state_dict(self, state_dict: object) -> None:
        """Load nothing, because a budget needs no state; ValueError if this is not the state of a QuacK."""
        if not isinstance(state_dict, Mapping) or not {"version", "norm"} & set(state_dict):
            raise ValueError("this is not the state of a QuacK")
        validate_version(state_dict)

    def _allowed(self, optimizer: Optimizer, tensors: Collection[int]) -> Tensor:
        """By block, the budget in nats, times lr / initial lr of its param group."""
        allowed = self.rates.new_zeros(self.rule.blocks.total)
        groups = [(group, ids) for group, ids in self._in_groups.groups(optimizer) if not ids.isdisjoint(tensors)]
        factors = [self._lr.now(optimizer, group, self.budget) for group, _ in groups]
        if all(not isinstance(factor, Tensor) and factor == factors[0] for factor in factors):
            return allowed.fill_(self.budget * factors[0])
        for (_, ids), factor in zip(groups, factors, strict=True):
            in_group = self._blocks_in(ids & self._on_paths)
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
                    warn(text)
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
        """(heads,): the share of the budget for a step of these tensors (by id); 1 if a head trains no others.

        If several optimizers step the weights of a head, shares are in proportion to the square root of the number of
        columns of each parameter. The first steps of AdamW have norms in this proportion, so the rates are nearly those
        of a single optimizer.
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
