"""What a logit is linear in, and what a norm has cut off from it.

For what is linear in y, the sum of y * dlogit/dy is the logit itself (Euler); for what is normed it is zero. So each
projection is asked for its share, next to the query and the key first, then behind every projection that has one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quacklr.find.measure.growth import Change, Slope
from quacklr.find.measure.records import Attention, Projection, Side
from quacklr.util.autograd import gradients

Asked = list[tuple[float, list[float]]]  # for each random direction: the whole, and each projection's share of it


class Homogeneity:
    """Of the projections beside the query and the key of an attention, and of those behind: which have a share."""

    PASSES = 4  # random directions in which is asked
    NOTHING = 1e-3  # a share that is none: an epsilon in a norm leaves about 1e-5
    ROUNDING = 8  # times the dtype's epsilon, if that is more

    def __init__(
        self,
        attention: Attention,
        beside: Mapping[Side, list[Projection]],
        at_sides: Sequence[Mapping[Side, Tensor]],
        projections: Mapping[int, Projection],
        changes: Mapping[Slope, Change],
    ) -> None:
        self.projections, self.call, self.changes = projections, attention.call, changes
        self.number = attention.products[0].number
        dtypes = [side.tensor.dtype for side in beside]
        self.rounding = self.ROUNDING * max(torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point)
        self.finite = True
        self.unreached = False  # whether what a query or a key is made of has no gradient at all
        self.out_of_proportion = False  # whether it is not linear, and no path either
        self.unknown: list[Slope] = []  # of what is on a path, but not linear
        self.alive: dict[Side | Projection, list[Projection]] = {}
        self.cut: dict[Projection, None] = {}
        self.bounded: list[Projection] = []  # those that move a logit no further than some bound
        self.partly: set[Projection] = set()  # those whose input is more than what is behind them
        self.at: dict[Projection, list[Tensor]] = {}
        for product in attention.products:
            for part, side in (("q", product.q), ("k", product.k)):
                found = beside[side]
                asked = [
                    self._ask(side.tensor, at[side], side.tensor, at[side], found) for at in at_sides if side in at
                ]
                self.alive[side] = self._beside(Slope(part, product.number), side, asked, found)
                made = [at for p in found if p.output is not None for at in self.at.get(p, [])]
                self.unreached |= bool(made) and not any(bool(at.any()) for at in made)
        waiting = [p for side in beside for p in self.alive[side]]
        while waiting:
            projection = waiting.pop()
            if projection not in self.alive:
                self.alive[projection] = self._behind(projection)
                waiting += self.alive[projection]
        self.cut = {p: None for p in self.cut if not any(p in alive for alive in self.alive.values())}

    @property
    def on_paths(self) -> list[Projection]:
        """Every projection that is on a path."""
        return list(dict.fromkeys(p for alive in self.alive.values() for p in alive))

    def _beside(self, slope: Slope, side: Side, asked: Asked, found: list[Projection]) -> list[Projection]:
        """What makes a query or a key; of other modules only if it leaves nothing out.

        Where shares are more than the whole, there is a gate or a learned scale; where they are less, a residual.
        """
        alive = self._with_a_share(asked, found)
        if not self._are_whole(asked, found, alive):
            alive = self._without_gates(side.tensor, alive, slope)
        inside = [p for p in alive if self.call and self.call in p.calls]
        return alive if inside == alive or self._are_whole(asked, found, alive) else inside

    def _are_whole(self, asked: Asked, found: list[Projection], some: list[Projection]) -> bool:
        """Whether the shares of some of them make up the whole."""
        size = torch.tensor([whole for whole, _ in asked])
        shares = torch.tensor([sum(s for p, s in zip(found, shares, strict=True) if p in some) for _, shares in asked])
        return bool((shares - size).norm() <= max(0.01, self.rounding) * size.norm())

    def _without_gates(self, output: Tensor, alive: list[Projection], slope: Slope) -> list[Projection]:
        """Those that something is linear in, and those of which it is another function; but not factors of others.

        Learned tensors by themselves are factors here, as a temperature is, and not counted.
        """
        bounded = [p for p in alive if self.changes.get(replace(slope, at=p.number)) is Change.VANISHES]
        self.bounded += bounded
        alive = [p for p in alive if p not in bounded]
        if not alive:
            return []
        gradients_at = torch.autograd.grad(output, [p.leaf for p in alive], torch.randn_like(output), create_graph=True)
        at = dict(zip(alive, gradients_at, strict=True))
        bent_by = {p: _bent_by(gradient, alive) for p, gradient in at.items()}
        made = [p for p in alive if p.output is not None]
        linear = [p for p in made if p not in bent_by[p]]
        gates = [p for p in made if p in bent_by[p] and any(p in bent_by[other] for other in linear)]
        kept = [p for p in made if p not in gates]
        self.cut |= dict.fromkeys(gates)
        if not linear and any(p in bent_by[other] and not _close(at[p], at[other]) for p in kept for other in kept):
            self.out_of_proportion = True  # one function of several, and not of their sum
        bent = [p for p in kept if any(by.output is not None for by in bent_by[p])]
        for each in [replace(slope, at=p.number, linear=p in linear) for p in bent]:
            self.out_of_proportion |= self.changes.get(each) is Change.GROWS
            if each not in self.changes:
                self.unknown.append(each)
        return kept

    def _behind(self, projection: Projection) -> list[Projection]:
        """What lies behind a projection, in the same call of the attention module, and has a share."""
        earlier = self._earlier(projection)
        if not earlier or projection.output is None or projection.input is None:
            return []
        asked = []
        for at in self.at.get(projection, []):
            (at_input,) = gradients(projection.output, [projection.input], at)
            if at_input is not None:
                asked.append(self._ask(projection.input, at_input, projection.output, at, earlier))
        alive = self._with_a_share(asked, earlier)
        if not self._are_whole(asked, earlier, alive):
            self.partly.add(projection)
            slope = Slope("output", self.number, of=projection.number)
            alive = self._without_gates(projection.output, alive, slope)
        return alive

    def _earlier(self, projection: Projection) -> list[Projection]:
        """What was projected before it in the same call of the attention module."""
        found: list[Projection] = []
        if projection.input is None or not projection.input.requires_grad or self.call == 0:
            return found
        for earlier in self.projections.values():
            if earlier is projection:
                break
            if self.call in earlier.calls and earlier.output is not None:
                found.append(earlier)
        return found

    def _ask(
        self, tensor: Tensor, at: Tensor, through: Tensor, at_through: Tensor, found: list[Projection]
    ) -> tuple[float, list[float]]:
        whole = float((tensor.detach() * at).double().sum())
        shares = []
        for projection, at_leaf in zip(found, gradients(through, [p.leaf for p in found], at_through), strict=True):
            if at_leaf is not None:
                self.at.setdefault(projection, []).append(at_leaf)
            shares.append(0.0 if at_leaf is None else float((projection.leaf.detach() * at_leaf).double().sum()))
        self.finite &= math.isfinite(whole + sum(shares))
        return whole, shares

    def _with_a_share(self, asked: Asked, found: list[Projection]) -> list[Projection]:
        """Those with a share; none if together they have none. The others that are reached are cut."""
        if not asked or not found:
            return []
        nothing = max(self.NOTHING, self.rounding) * torch.tensor([whole for whole, _ in asked]).norm()
        shares_PF = torch.tensor([shares for _, shares in asked])
        some = bool(shares_PF.sum(1).norm() > nothing)
        alive = [p for p, share in zip(found, shares_PF.norm(dim=0), strict=True) if some and share > nothing]
        reached = (shares_PF != 0).any(0).tolist()
        self.cut |= dict.fromkeys(p for p, r in zip(found, reached, strict=True) if r and p not in alive)
        return alive


def _bent_by(gradient: Tensor, projections: Sequence[Projection]) -> set[Projection]:
    """The projections that a gradient depends on: what it is the gradient of is not linear in them."""
    if not gradient.requires_grad:
        return set()
    again = gradients(gradient, [p.leaf for p in projections], torch.randn_like(gradient))
    return {p for p, second in zip(projections, again, strict=True) if second is not None and second.any()}


def _close(one: Tensor, other: Tensor) -> bool:
    return one is other or (one.shape == other.shape and torch.allclose(one, other))
