"""Real steps, and what they do to each head's logits: the largest change, beside what the theorem allows.

    bound[h] = |scale| max ||x|| max ||y|| * sum over paths of (prod (||v|| + rate ||u||) - prod ||v||)

with spectral norms of the blocks that head h reads, the tightest for which it is proved (docs/theory.md), and u the
step that the optimizer would have taken by itself. What stands between the weights of a path (rotations) is taken to
keep lengths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from quacklr.checking.expected_rows import ExpectedLayer, ExpectedRows
from quacklr.checking.frozen_inputs import FrozenInputs
from quacklr.checking.sandbox import Sandbox, aside
from quacklr.optimizers.attach import first_after_step
from quacklr.quack import QuacK

ROUNDING = 1e-4  # of a bound
RATE = 1e-3  # of a step


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """(H,) each: the largest |change| of a logit in a step, the bound on it, and whether a step went beyond.

    `overstepped`: whether rows that the head reads took a larger step than their rates allow.
    """

    measured: Tensor
    bound: Tensor
    beyond: Tensor
    overstepped: Tensor


class Stepper:
    """Takes steps, knowing what the optimizers alone would have done: to be made after QuacK is attached."""

    def __init__(self, twin: Sandbox, claims: ExpectedRows) -> None:
        self.twin, self.claims = twin, claims
        self._alone: dict[Tensor, Tensor] = {}
        for optimizer in twin.optimizers:
            first_after_step(optimizer, self._note)

    def _note(self, optimizer: Optimizer, *_: Any) -> None:
        stepped = {id(param) for group in optimizer.param_groups for param in group["params"]}
        own = [param for param in self.claims.params.values() if id(param) in stepped]
        for param in own:  # the first time: a step that calls its parent's has hooks called twice
            self._alone.setdefault(param, param.detach().clone())

    def step(self, rates: Mapping[str, Tensor]) -> Steps:
        """One step of every claimed block."""
        before = self._blocks()
        rate = torch.ones(self.claims.rule.blocks.total, dtype=torch.float64)
        for weight in self.claims.rule.weights:
            if weight.name in rates:
                rate[self.claims.rule.blocks.flat_index[weight]] = rates[weight.name].cpu().double()
        self._alone.clear()
        self.twin.step()
        after = self._blocks()
        with aside(self._alone):
            for param, alone in self._alone.items():
                param.copy_(alone)
            u = norms(self._blocks(), before)
        v, dv = norms(before), norms(after, before)
        eps = torch.cat([torch.full((len(block),), torch.finfo(block.dtype).eps) for block in before])
        return Steps(v, rate * u, dv > (1 + RATE) * rate * u + 4 * eps * v)

    def _blocks(self) -> list[Tensor]:
        return [piece.copy() for piece in self.claims.rule.blocks.local]


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """Of each flat block its norm, the step that its rate allows, and whether it took a larger one."""

    v: Tensor
    allowed: Tensor
    over: Tensor


def changes(stepper: Stepper, steps: int, quack: QuacK | None) -> list[Change]:
    """For each layer what some steps do, the largest of them."""
    taken = [_step(stepper, {} if quack is None else quack.rates()) for _ in range(steps)]
    return [_worst([step[number] for step in taken]) for number in range(len(stepper.claims.layers))]


def _step(stepper: Stepper, rates: Mapping[str, Tensor]) -> list[Change]:
    """One step, and the change of every layer that its claimed rows alone make of it."""
    twin, claims = stepper.twin, stepper.claims
    hearing = FrozenInputs(twin.model, claims.layers, twin.batch, twin.orders)
    every = dict.fromkeys([*twin.model.parameters(), *claims.params.values()])
    old = [(param, param.detach().clone()) for param in every]
    taken = stepper.step(rates)
    with aside(every) as new:
        for param, was in old:
            param.copy_(was)
        stepped = dict(new)
        for rows in claims.rows:
            param = rows.part.param
            param.copy_(torch.where(rows.spread(rows.claimed), stepped[param], param))
        measured = hearing.change()
    return _beside(hearing, measured, taken)


def _beside(hearing: FrozenInputs, measured: Sequence[Tensor], taken: Steps) -> list[Change]:
    found = []
    for number, layer in enumerate(hearing.layers):
        bound_H = hearing.scales[number] * _allowed(layer, hearing, taken)
        slack = ROUNDING * bound_H + hearing.rounding[number]
        beyond_H = measured[number] > bound_H + slack
        found.append(Change(measured[number], bound_H, beyond_H, layer.readers(taken.over)))
    return found


def _allowed(layer: ExpectedLayer, hearing: FrozenInputs, taken: Steps) -> Tensor:
    """(H,): the bound but for the scale."""
    total_H = torch.zeros(layer.heads, dtype=torch.float64)
    for term in layer.terms:
        lengths = prod(hearing.lengths.of(weight) for weight in term.ends)
        both_WH = (taken.v + taken.allowed)[term.reads_WH]
        total_H += lengths * (both_WH.prod(0) - taken.v[term.reads_WH].prod(0))
    return total_H


def norms(blocks: Sequence[Tensor], others: Sequence[Tensor] | None = None) -> Tensor:
    """The spectral norms of all blocks, or of how far they are from others, in one vector."""
    pairs = zip(blocks, others or [torch.zeros(())] * len(blocks), strict=True)
    differences = [block - other.to(block) for block, other in pairs]
    if not all(bool(each.isfinite().all()) for each in differences):
        raise ValueError("a step made weights that are no finite numbers: lower the learning rate, or look at the loss")
    return torch.cat([spectral(each) for each in differences])


def spectral(blocks_BRC: Tensor) -> Tensor:
    """(B,): the largest singular value of each block, exactly."""
    blocks_BRC = blocks_BRC.detach().cpu().double()
    wide = blocks_BRC.shape[1] <= blocks_BRC.shape[2]
    gram = blocks_BRC @ blocks_BRC.mT if wide else blocks_BRC.mT @ blocks_BRC
    return torch.linalg.eigvalsh(gram)[:, -1].clamp(min=0).sqrt()


def _worst(steps: Sequence[Change]) -> Change:
    measured, bound, beyond, overstepped = (
        torch.stack([getattr(step, field.name) for step in steps]) for field in fields(Change)
    )
    return Change(measured.amax(0), bound.amax(0), beyond.any(0), overstepped.any(0))
