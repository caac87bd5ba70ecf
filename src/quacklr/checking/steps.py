"""Real optimizer steps: the largest change of each head's logits, and the bound of the theorem on it.

    bound[h] = |scale| max ||x|| max ||y|| * sum over paths of (prod (||v|| + rate ||u||) - prod ||v||)

The norms are the spectral norms of the blocks that head h reads, the smallest for which the bound is proved
(docs/theory.md); u is the optimizer's own step, before QuacK scales it. Operations between the weights of a path
(rotations) are assumed to preserve norms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from quacklr.checking.expected_rows import ExpectedRows
from quacklr.checking.frozen_inputs import FrozenInputs, LayerLogits
from quacklr.checking.inputs import Inputs
from quacklr.checking.sandbox import Sandbox, restored
from quacklr.core.norms import gram
from quacklr.core.step_scaler import first_after_step
from quacklr.quack import QuacK

BOUND_TOLERANCE = 1e-4  # relative to a bound
RATE_TOLERANCE = 1e-3  # relative to a step


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """(H,) each: the largest |change| of a logit in a step, the bound on it, and the root mean square of all changes.

    `exceeds_bound`: whether the change in some step exceeded its bound. `exceeds_rate`: whether rows that the head
    reads took a larger step than their rates allow.
    """

    measured: Tensor
    bound: Tensor
    root_mean_square: Tensor
    exceeds_bound: Tensor
    exceeds_rate: Tensor


class Stepper:
    """Takes steps in a sandbox. Create it after QuacK is attached, so that its hook runs first, on unscaled steps."""

    def __init__(self, sandbox: Sandbox, expected: ExpectedRows, quack: QuacK | None) -> None:
        self.sandbox, self.expected, self.quack = sandbox, expected, quack
        self._unscaled: dict[Tensor, Tensor] = {}  # parameters as the optimizer alone would have left them
        for optimizer in sandbox.optimizers:
            first_after_step(optimizer, self._record)

    def _record(self, optimizer: Optimizer, *_: Any) -> None:
        stepped = {id(param) for group in optimizer.param_groups for param in group["params"]}
        for param in self.expected.params:
            if id(param) in stepped:  # only the first time: a step that calls its parent's runs hooks twice
                self._unscaled.setdefault(param, param.detach().clone())

    def changes(self, steps: int) -> list[Change]:
        """For each layer, the maxima over a number of steps."""
        return [_maximum(of_layer) for of_layer in zip(*(self._step() for _ in range(steps)), strict=True)]

    def _step(self) -> list[Change]:
        """One step; for each layer the change of the logits that the step of the rows on paths causes."""
        frozen = FrozenInputs(self.sandbox, self.expected.layers)
        params = dict.fromkeys([*self.sandbox.model.parameters(), *self.expected.params])
        old = {param: param.detach().clone() for param in params}
        before = self._blocks()
        self._unscaled.clear()
        self.sandbox.step()
        rates, after = self._rates(), self._blocks()
        with restored(params) as new:
            _assign(self._unscaled)
            allowed = rates * spectral_norms(self._blocks(), before)
            _assign(old)
            for rows in self.expected.rows:
                param = rows.part.param
                param.copy_(torch.where(rows.spread(rows.on_path), new[param], param))
            calls = frozen.again()
        norms, taken = spectral_norms(before), spectral_norms(after, before)
        eps = torch.cat([torch.full((len(block),), torch.finfo(block.dtype).eps) for block in before])
        too_large = taken > (1 + RATE_TOLERANCE) * allowed + 4 * eps * norms
        changes = []
        for of_layer, logits in zip(calls, frozen.logits, strict=True):
            measured_H, bound_H = logits.difference(of_layer), _bound(logits, frozen.lengths, norms, allowed)
            exceeds_H = measured_H > (1 + BOUND_TOLERANCE) * bound_H + logits.rounding
            exceeds_rate_H = logits.layer.heads_reading(too_large)
            changes.append(Change(measured_H, bound_H, logits.root_mean_square(of_layer), exceeds_H, exceeds_rate_H))
        return changes

    def _rates(self) -> Tensor:
        """The rate of each flat block in the last step; 1 without QuacK."""
        flat = torch.ones(self.expected.rule.blocks.total, dtype=torch.float64)
        rates = {} if self.quack is None else self.quack.rates(last=True)
        for weight in self.expected.rule.weights:
            if weight.name in rates:
                flat[self.expected.flat_index[weight]] = rates[weight.name].cpu().double()
        return flat

    def _blocks(self) -> list[Tensor]:
        return [piece.copy() for piece in self.expected.rule.blocks.local]


def _assign(values: Mapping[Tensor, Tensor]) -> None:
    for param, value in values.items():
        param.copy_(value)


def _bound(logits: LayerLogits, inputs: Inputs, norms: Tensor, allowed: Tensor) -> Tensor:
    """(H,): the bound of one layer."""
    total_H = torch.zeros(logits.layer.heads, dtype=torch.float64)
    for path in logits.layer.paths:
        lengths = prod(inputs.of(weight) for weight in path.ends)
        total_H += lengths * ((norms + allowed)[path.reads_WH].prod(0) - norms[path.reads_WH].prod(0))
    return logits.scale * total_H


def spectral_norms(blocks: Sequence[Tensor], others: Sequence[Tensor] | None = None) -> Tensor:
    """The spectral norms of all blocks, or of their differences from others, in one vector."""
    pairs = zip(blocks, others or [torch.zeros(())] * len(blocks), strict=True)
    differences = [block - other.to(block) for block, other in pairs]
    if not all(bool(each.isfinite().all()) for each in differences):
        raise ValueError("weights are NaN or inf after a step: lower the learning rate, or check the loss")
    return torch.cat([exact_spectral_norms(each) for each in differences])


def exact_spectral_norms(blocks_BRC: Tensor) -> Tensor:
    """(B,): the exact largest singular value of each block, from its Gram matrix."""
    gram_BSS = gram(blocks_BRC.detach().cpu().double())
    return torch.linalg.eigvalsh(gram_BSS)[:, -1].clamp(min=0).sqrt()


def _maximum(steps: Sequence[Change]) -> Change:
    return Change(*(torch.stack([getattr(step, field.name) for step in steps]).amax(0) for field in fields(Change)))
