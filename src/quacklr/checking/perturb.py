"""Whose rows are whose: nudge some rows, and see which heads move.

A head may move only if it reads a nudged block, and a block must move some head that reads it. Layers, blocks and rows
are nudged in halves, by each bit of their number, so that the forwards it takes grow with the logarithm of the model;
only where something is wrong are they nudged one by one, to say what.

Nudges are random and as large as the weights, not steps: what a row makes is a matter of the forward, and a row that
is frozen, or has no gradient yet, is to be right too.

Shapes: H heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quacklr.checking.expected_rows import ExpectedLayer, ExpectedRows, WeightRows
from quacklr.checking.frozen_inputs import FrozenInputs
from quacklr.checking.sandbox import Sandbox, aside

Pick = Callable[[WeightRows], Tensor | bool]
Half = Callable[[Any], Any]


@dataclass(frozen=True, slots=True, eq=False)
class Perturbation:
    """What one did: the flat blocks that it touched, and for each layer (H,) the heads that it moved, and did not."""

    touched: Tensor
    moved: list[Tensor]
    still: list[Tensor]

    def strays(self, layers: Iterable[ExpectedLayer]) -> list[Tensor]:
        """For each layer (H,): the heads that moved and read none of it."""
        return [of & ~layer.readers(self.touched) for layer, of in zip(layers, self.moved, strict=True)]

    def dead(self, layers: Iterable[ExpectedLayer]) -> Tensor:
        """The flat blocks that were touched and moved none of the heads that read them."""
        alive = torch.zeros_like(self.touched)
        for layer, still in zip(layers, self.still, strict=True):
            for term in layer.terms:
                alive[term.reads_WH[:, ~still]] = True
        return self.touched & ~alive


class Perturbations:
    """Nudges of a model whose inputs to every attention are held fixed. Rows of zeros are filled first.

    `lost`: of each layer, whether its logits could not be compared after a nudge.
    """

    def __init__(self, twin: Sandbox, claims: ExpectedRows) -> None:
        self.claims = claims
        generator = torch.Generator().manual_seed(0)
        self.noise = {id(param): _noise(param, generator) for param in claims.params.values()}
        with torch.no_grad():  # what is multiplied with zeros would move nothing
            for rows in claims.rows:
                self._add(rows, rows.claimed & ~rows.part.rows_first().reshape(len(rows.block), -1).any(1).cpu())
        self.hearing = FrozenInputs(twin.model, claims.layers, twin.batch, twin.orders)
        self.lost = [False] * len(claims.layers)

    def nudge(self, pick: Pick) -> Perturbation:
        """Nudge the claimed rows that are picked."""
        touched = torch.zeros(self.claims.rule.blocks.total, dtype=torch.bool)
        with aside(self.claims.params.values()):
            for rows in self.claims.rows:
                picked = rows.claimed & pick(rows)
                touched[rows.place[rows.block[picked]]] = True
                self._add(rows, picked)
            change = self._change()
        pairs = list(zip(change, self.hearing.rounding, strict=True))
        return Perturbation(touched, [of > still for of, still in pairs], [of <= still for of, still in pairs])

    def _change(self) -> list[Tensor]:
        change = self.hearing.change()
        self.lost = [lost or bool(of.isnan().any()) for lost, of in zip(self.lost, change, strict=True)]
        return change

    def _add(self, rows: WeightRows, picked: Tensor) -> None:
        rows.part.param.add_(self.noise[id(rows.part.param)] * rows.spread(picked))

    def double_unclaimed(self) -> list[Tensor]:
        """For each layer (H,): the |change| when rows that nobody claims, beside rows that somebody does, are doubled.

        Doubled, because before a norm (DeepSeek's latents) rows make the logit, and rightly are on no path: its scale
        does not depend on theirs.
        """
        with aside(self.claims.params.values()):
            for part, free in self.claims.unclaimed():
                part.param.mul_(part.spread(1 + free.to(part.param)))
            return self._change()

    def layers_in_halves(self) -> Iterator[Perturbation]:
        """All rows of half of the layers, for each bit of a layer's number."""
        for half in _halves(len(self.claims.layers)):
            yield self.nudge(_of_layers(half))

    def blocks_in_halves(self, role: int) -> Iterator[Perturbation]:
        """Half of the blocks of one weight of every layer, for each bit of a block's number."""
        for half in _halves(self.blocks(role)):
            yield self.nudge(_of_blocks(role, half))

    def rows_in_halves(self, role: int) -> Iterator[Perturbation]:
        """Half of the rows of every block of one weight of every layer, for each bit of a row's number in its block."""
        for half in _halves(1 + max((int(rows.rank[rows.claimed].max()) for rows in self.of_role(role)), default=0)):
            yield self.nudge(_of_ranks(role, half))

    def layer(self, number: int) -> Perturbation:
        """All rows of one layer."""
        return self.nudge(lambda rows: rows.layer == number)

    def role(self, role: int) -> Perturbation:
        """One weight of every layer."""
        return self.nudge(lambda rows: rows.role == role)

    def block(self, role: int, block: int) -> Perturbation:
        """One block of one weight of every layer."""
        return self.nudge(lambda rows: (rows.block == block) & (rows.role == role))

    def blocks(self, role: int) -> int:
        """How many blocks a weight of that role has at most."""
        return max((int(rows.block.max()) + 1 for rows in self.of_role(role)), default=0)

    def of_role(self, role: int) -> list[WeightRows]:
        """The rows of the weights that are the so-manieth of their layer."""
        return [rows for rows in self.claims.rows if rows.role == role]


def _of_layers(half: Half) -> Pick:
    return lambda rows: half(rows.layer)


def _of_blocks(role: int, half: Half) -> Pick:
    return lambda rows: half(rows.block) & (rows.role == role)


def _of_ranks(role: int, half: Half) -> Pick:
    return lambda rows: half(rows.rank) & (rows.role == role)


def _halves(count: int) -> Iterator[Half]:
    """Whether a number below the count has a bit, and whether it has not, for each bit."""
    for bit in range((count - 1).bit_length()):
        for value in (0, 1):
            yield partial(_has, bit, value)


def _has(bit: int, value: int, number: Any) -> Any:
    return (number >> bit & 1) == value


def _noise(param: Tensor, generator: torch.Generator) -> Tensor:
    """Random numbers as large as the parameter's."""
    size = float(param.detach().float().square().mean().sqrt()) or 0.1
    return size * torch.randn(param.shape, generator=generator).to(param)
