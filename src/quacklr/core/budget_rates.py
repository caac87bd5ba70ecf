"""The rates of a budget: computed from each step after it was taken, without any state."""

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
from quacklr.core.sensitivity import Rule
from quacklr.core.state import VERSION
from quacklr.core.weight import Weight

LR_ABOVE_START = (
    "the lr of a param group of {} is {:.3g} times its {}. The budget follows lr, so it is {:.3g} now instead of {:g}. "
    "If a warmup had lowered lr before QuacK was attached, set 'initial_lr' in the param group to the peak lr"
)


class HeadChange(NamedTuple):
    """(heads,) each: how much the last step changes the logits of an attention, in nats.

    Attributes:
        asked: the optimizer's own step.
        given: the step as QuacK scaled it.
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
        self._lr_at_start = {each: [_copy(group["lr"]) for group in each.param_groups] for each in optimizers}
        self._validate_lr()
        self._masks: dict[frozenset[int], Tensor] = {}
        self._shares: dict[frozenset[int], Tensor] = {}
        self._warned = False

    def before_step(self, tensors: Collection[int], new_iteration: bool) -> Copies:
        """Copies of the rows of these tensors (by id)."""
        if new_iteration:
            self.stepped.clear()
            self.asked = self.given = torch.zeros_like(self.asked)
        self.stepped |= set(tensors)
        self._ever_stepped |= self.stepped
        return self.rule.blocks.copy(tensors)

    def after_step(self, optimizer: Optimizer, copies: Copies, tensors: Collection[int]) -> Tensor:
        """The rates of all blocks, from the step that was taken. Collective for sharded weights."""
        norms, steps = self.rule.blocks.measure_step(copies)
        step = self.compiled.scale_step(norms, steps, self._allowed(optimizer, tensors), self._share(tensors))
        self.rates = step.rates.where(self._blocks_in(tensors), self.rates)
        self.asked, self.given = self.asked + step.asked, self.given + step.given
        return step.rates

    def has_rates(self, weight: Weight) -> bool:
        """Whether a weight has rates, which are those of its last step."""
        return weight.trains and any(id(part.param) in self._ever_stepped for part in weight.parts)

    def changes(self) -> dict[str, HeadChange]:
        """The change of the last iteration, by the name of the attention module."""
        return {name: HeadChange(self.asked[at], self.given[at]) for name, at in self.compiled.heads.items()}

    def state_dict(self) -> dict[str, Any]:
        """There is no state."""
        return {"version": VERSION}

    def load_state_dict(self, state_dict: object) -> None:
        """There is no state; ValueError if this is not the state of a QuacK."""
        if not isinstance(state_dict, Mapping) or not {"version", "norm"} & set(state_dict):
            raise ValueError("this is not the state of a QuacK")

    def _allowed(self, optimizer: Optimizer, tensors: Collection[int]) -> Tensor:
        """By block, the budget in nats, times the lr of its param group relative to its initial lr."""
        allowed = self.rates.new_zeros(self.rule.blocks.total)
        groups = [(i, g) for i, g in enumerate(optimizer.param_groups) if any(id(p) in tensors for p in g["params"])]
        factors = [self._lr_factor(optimizer, i, group) for i, group in groups]
        if all(not isinstance(factor, Tensor) and factor == factors[0] for factor in factors):
            return allowed.fill_(self.budget * factors[0])
        for (_, group), factor in zip(groups, factors, strict=True):
            in_group = self._blocks_in({id(param) for param in group["params"]})
            allowed = torch.maximum(allowed, self.budget * factor * in_group)
        return allowed

    def _lr_factor(self, optimizer: Optimizer, index: int, group: dict[str, Any]) -> Any:
        """The lr of a param group relative to its initial lr, or to the largest of a cyclic schedule."""
        lrs = self._lr_at_start[optimizer]
        lrs.extend(_copy(each["lr"]) for each in optimizer.param_groups[len(lrs) :])  # groups that were added
        name = "initial_lr" if "initial_lr" in group else "lr when QuacK was attached"
        reference = group.get("initial_lr", lrs[index])
        if "max_lr" in group:
            reference = max(reference, group["max_lr"])
        factor = group["lr"] / reference if isinstance(reference, Tensor) or reference else 1.0
        if not self._warned and not isinstance(factor, Tensor) and factor > 1.5:
            self._warned = True
            text = LR_ABOVE_START.format(type(optimizer).__name__, factor, name, factor * self.budget, self.budget)
            warnings.warn(text, stacklevel=8)
        return factor

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
        key = frozenset(tensors)
        if key not in self._shares:
            self._shares[key] = self._new_share(key)
        return self._shares[key]

    def _new_share(self, tensors: Collection[int]) -> Tensor:
        stepped, trained = torch.zeros(2, self.rule.blocks.total, device="cpu", dtype=torch.float32)
        for weight, index in self.rule.blocks.flat_index.items():
            for part in (part for part in weight.parts if weight.rated and part.param.requires_grad):
                trained[index] += math.sqrt(part.columns)
                stepped[index] += math.sqrt(part.columns) * (id(part.param) in tensors)
        head, block = torch.unique(torch.stack([self.compiled.head, self.compiled.block]).cpu(), dim=1)
        zeros = stepped.new_zeros(self.compiled.total_heads)
        of_stepped, of_trained = (zeros.index_add(0, head, each[block]) for each in (stepped, trained))
        return (of_stepped / of_trained.clamp(min=1)).to(self.rates.device)

    def _validate_lr(self) -> None:
        for optimizer, lrs in self._lr_at_start.items():
            for group, lr in zip(optimizer.param_groups, lrs, strict=True):
                on_paths = any(id(param) in self._on_paths for param in group["params"])
                if on_paths and "initial_lr" not in group and not isinstance(lr, Tensor) and lr == 0:
                    raise ValueError(
                        f"the lr of a param group of {type(optimizer).__name__} is 0. A budget follows lr relative to "
                        "its initial value: attach QuacK before a warmup sets lr to 0, or use a scheduler of torch"
                    )

    def __repr__(self) -> str:
        return f"budget={self.budget:g}"


def _copy(lr: Any) -> Any:
    return lr.detach().clone() if isinstance(lr, Tensor) else lr
