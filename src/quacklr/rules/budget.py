"""Rates that follow from a budget: each head's step is scaled so that its logits change by a given amount, in nats.

    rate = nats * (lr now / initial lr) / asked(h);   a block takes the smallest rate of the heads that read it

`asked(h)` is what the optimizer's own step would change the logits of head h by (core/sensitivity.py). It is measured
after each step of the optimizer, so the rule needs no state, and no optimizer that is linear in lr.

The initial lr is the largest of: `initial_lr` and `max_lr` of the param group, which torch's schedulers write, its lr
when QuacK was attached, and every lr since. So a head is never allowed more than `nats`. QuacK keeps this lr in the
param group as `quack_initial_lr`, so it is part of the optimizer's state dict, and a resumed run has the same one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import cache, reduce
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from quacklr.core.rule import FLOAT32, Group, Rule, Step, Stepped, validate_number
from quacklr.core.sensitivity import CompiledPaths, LogitChanges
from quacklr.core.weight import Weight
from quacklr.util.caller import warn

INITIAL_LR = "quack_initial_lr"
WARMUP_BY_HAND = (
    "the lr of a param group of {} is {:.3g} now, and was {:.3g} when QuacK was attached. {!r} did not follow this "
    "rise: every step was allowed {:g} nats. If this is a warmup, set 'initial_lr' in the param group to the peak lr "
    "before you attach QuacK; the first steps are then allowed less"
)
MOSTLY_ROUNDING = (
    "{} is {}, and the first step was scaled by up to {:.3g}. Such a step of the optimizer is mostly rounding in 16 "
    "bits, and scaling it makes the rounding larger. Keep the weights in float32 and train with autocast, or raise lr"
)


class Budget(Rule):
    """The step of each head is scaled to the change that is allowed, down or up.

    Args:
        nats: how much one step changes the logits of a head (root mean square). It can be set during training. It is
            multiplied by lr / initial lr, so it follows the schedule. Begin with 0.02.

    `rates` are those of the last step, NaN for blocks that have not stepped.
    """

    measures = True
    rates_all = True
    first_rate = math.nan
    largest_rate = 100.0  # a head with almost no gradient has a step of rounding errors, which must not become large

    def __init__(self, nats: float = 0.02) -> None:
        self.nats = nats
        self._ever_stepped: set[int] = set()
        self._warned_of_warmup = False

    @property
    def nats(self) -> float:
        """How much one step may change the logits of a head."""
        return self._nats

    @nats.setter
    def nats(self, nats: float) -> None:
        validate_number("nats", nats, "the change of logits in a step", infinite=self.largest_rate <= 1)
        self._nats = nats

    def start(self, paths: CompiledPaths, optimizers: Sequence[Optimizer], in_groups: Stepped) -> None:
        """Compile the changes of heads."""
        super().start(paths, optimizers, in_groups)
        self._changes = LogitChanges(paths)
        self._parts = [(part, index) for weight, index in paths.blocks.flat_index.items() for part in weight.parts]
        self._blocks_in = cache(lambda tensors: (self._sizes(tensors) > 0).to(self.rates.device))  # a mask of blocks
        self._ones_in = cache(lambda tensors: self._blocks_in(tensors).to(torch.float32))
        self._share = cache(self._new_share)

    def attach(self, optimizers: Sequence[Optimizer]) -> None:
        """Keep the initial lrs."""
        super().attach(optimizers)
        for optimizer in optimizers:
            self.optimizer_loaded(optimizer)

    def optimizer_loaded(self, optimizer: Optimizer) -> None:
        """Keep the initial lrs, unless they were loaded."""
        for group in optimizer.param_groups:
            initial_lr(group)

    def after(self, step: Step) -> Tensor:
        """The rates of all blocks, from the step that was taken. Collective for sharded weights.

        The first rates assume that the partners of a block do not change. They give an upper bound on all norms after
        the step. The second rates use these larger norms, so they are not larger than the first. All rates are finite.
        A block has rate 1, so its step is not scaled, if it changes no logit, or if the change of every head that reads
        it is NaN or inf.
        """
        norms, steps = step.measure()
        tensors, params = frozenset(step.tensors), (part.param for part, _ in self._parts)
        trained = tensors.union(id(param) for param in params if param.requires_grad)
        allowed, share = self._allowed(step), self._share(tensors, trained)
        first = self._limited(self._changes.asked(norms, steps), share, allowed, self.largest_rate)
        larger = self._changes.larger(norms, steps, first)
        rates = self._limited(self._changes.asked(larger, steps), share, allowed, first)
        self.rates = rates.where(self._blocks_in(tensors), self.rates)
        if not self._ever_stepped.issuperset(step.tensors):
            self._warn_of_rounding(step.tensors)
        self._ever_stepped = self._ever_stepped | step.tensors  # copies of the rule share the old set
        return rates

    def _limited(self, changes: Tensor, share: Tensor, allowed: Tensor, largest: float | Tensor) -> Tensor:
        """The rates of all blocks from the changes of heads; a block takes the smallest rate of its heads."""
        limits = share / changes.nan_to_num(posinf=0.0)  # inf for a change of 0, NaN or inf
        rates = allowed * self._changes.smallest_of_heads(limits)
        return rates.nan_to_num_(nan=1.0, posinf=1.0).clamp_(max=largest)

    def has_rates(self, weight: Weight) -> bool:
        """Whether a weight has rates, which are those of its last step."""
        return weight.trains and any(id(part.param) in self._ever_stepped for part in weight.parts)

    def _allowed(self, step: Step) -> Tensor:
        """By block, the budget in nats, times lr / initial lr of its param group."""
        allowed = [
            self._ones_in(frozenset(tensors)) * (self.nats * self._relative_lr(step.optimizer, group))
            for group, ids in self.in_groups.groups(step.optimizer)
            if (tensors := step.tensors.intersection(ids))
        ]
        return reduce(torch.maximum, allowed)

    def _relative_lr(self, optimizer: Optimizer, group: Group) -> float | Tensor:
        """lr now / initial lr, at most 1. Warns once if lr has risen by hand, as in a warmup without a scheduler."""
        before, initial = group.get(INITIAL_LR), initial_lr(group)
        if "lr" not in group:
            return 1.0
        lr = _readable(group["lr"])
        if isinstance(initial, Tensor):
            return (lr / initial).nan_to_num(1.0)
        if lr == initial and before is not None and lr > 1.5 * before and not self._warned_of_warmup:
            self._warned_of_warmup = True
            warn(WARMUP_BY_HAND.format(type(optimizer).__name__, lr, before, self, self.nats))
        return lr / initial if initial else 1.0

    def _warn_of_rounding(self, tensors: Collection[int]) -> None:
        """Warn in the first step of these tensors (by id) if 16-bit weights have large rates. Waits for the device."""
        for part, index in self._parts:
            if part.param.element_size() == 2 and id(part.param) in tensors:
                rate = float(self.rates[index].max())
                if rate > 10:
                    warn(MOSTLY_ROUNDING.format(part.name, str(part.param.dtype).removeprefix("torch."), rate))
                    return

    def _sizes(self, tensors: Collection[int]) -> Tensor:
        """(blocks,): the sum of sqrt(columns) of those of these tensors (by id) that have rows of a block."""
        sizes = torch.zeros(len(self.rates), device="cpu", dtype=torch.float32)
        for part, index in self._parts:
            sizes[index] += math.sqrt(part.columns) * (id(part.param) in tensors)
        return sizes

    def _new_share(self, tensors: frozenset[int], trained: frozenset[int]) -> Tensor:
        """(heads,): the share of the budget for a step of these tensors (by id); 1 if a head trains no others.

        If several optimizers step the weights of a head, shares are in proportion to the square root of the number of
        columns of each parameter. The first steps of AdamW have norms in this proportion, so the rates are nearly those
        of a single optimizer.
        """
        head, block = torch.stack([self._changes.head, self._changes.block]).cpu().unique(dim=1)
        zeros = torch.zeros(self._changes.total_heads, device="cpu", dtype=torch.float32)
        step, total = (zeros.index_add(0, head, self._sizes(each)[block]) for each in (tensors, trained))
        return (step / total.clamp(min=1)).clamp(min=FLOAT32.tiny).to(self.rates.device)  # 0 / 0 is no limit

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.nats:g})"


def initial_lr(group: Group) -> Any:
    """The largest lr that a param group has had since QuacK was attached, or will have. It is kept in the group."""
    lrs = [0.0, *(_readable(group[key]) for key in ("initial_lr", "max_lr", INITIAL_LR, "lr") if key in group)]
    of_tensors = any(isinstance(lr, Tensor) for lr in lrs)
    group[INITIAL_LR] = reduce(torch.maximum, map(torch.as_tensor, lrs)) if of_tensors else max(lrs)
    return group[INITIAL_LR]


def _readable(lr: Any) -> Any:
    """The lr as a number. A tensor on an accelerator is returned as it is: reading it would wait for the device."""
    return float(lr) if isinstance(lr, Tensor) and lr.device.type == "cpu" else lr
