"""Finds the projections that a query or a key is linear in, and those whose scale a norm removes.

By Euler's theorem, the sum of y * df/dy is f where f is linear in y, and 0 where y is normed. This sum is the share of
projection y in f. Shares are computed for the projections that make the queries and the keys; then, for each projection
with a share, for the earlier projections that its input is computed from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile

import torch
from torch import Tensor

from quacklr.find.measure.growth import Slope, SlopeChange
from quacklr.find.measure.records import Attention, Factor, Projection
from quacklr.util.autograd import gradients, total_of

Shares = list[tuple[float, list[float]]]  # for each random direction: the total, and each projection's share


class Homogeneity:
    """The projections with a share in each query and key of an attention, and in each projection that has one.

    `contributing` maps a query, a key or a projection to the projections with a share in it. `cut` are projections with
    a gradient, but no share. `bounded` are those that change a logit by no more than some bound. `partial` are those
    whose input has other terms besides the contributing projections.
    """

    PASSES = 4  # random directions
    NO_SHARE = 1e-3  # a smaller share counts as none: an epsilon in a norm leaves about 1e-5
    ROUNDING = 8  # times the dtype's epsilon, if that is more

    def __init__(
        self,
        attention: Attention,
        made_of: Mapping[Factor, list[Projection]],
        cotangents: Mapping[Factor, list[Tensor]],
        projections: Mapping[int, Projection],
        changes: Mapping[Slope, SlopeChange],
    ) -> None:
        self.projections, self.call, self.changes = projections, attention.call, changes
        self.number = attention.products[0].number
        dtypes = [factor.tensor.dtype for factor in made_of]
        self.rounding = self.ROUNDING * max(torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point)
        self.finite = True
        self.unreached = False  # whether a query or a key has no gradient at any projection that it is made of
        self.disproportionate = False  # whether a query or key is neither linear nor can be described by a path
        self.unknown: list[Slope] = []  # slopes at projections on a path that the query or key is not linear in
        self.contributing: dict[Factor | Projection, list[Projection]] = {}
        self.cut: dict[Projection, None] = {}
        self.bounded: list[Projection] = []
        self.partial: set[Projection] = set()
        self.leaf_gradients: dict[Projection, list[Tensor]] = {}
        for product in attention.products:
            for part, factor in (("q", product.q), ("k", product.k)):
                found, slope = made_of[factor], Slope(part, product.number)
                self.contributing[factor] = self._of_factor(slope, factor, found, cotangents[factor])
                made = [at for p in found if p.output is not None for at in self.leaf_gradients.get(p, [])]
                self.unreached |= bool(made) and not any(bool(at.any()) for at in made)
        waiting = [p for factor in made_of for p in self.contributing[factor]]
        while waiting:
            projection = waiting.pop()
            if projection not in self.contributing:
                self.contributing[projection] = self._of_projection(projection)
                waiting += self.contributing[projection]
        on_paths = set(self.on_paths)
        self.cut = {p: None for p in self.cut if p not in on_paths}

    @property
    def on_paths(self) -> list[Projection]:
        """Every projection that has a share."""
        return list(dict.fromkeys(p for found in self.contributing.values() for p in found))

    def largest_gradient(self, projection: Projection) -> Tensor:
        """The largest absolute gradient of each entry of the output over the random directions.

        In one direction alone, 16-bit rounding can cancel the gradient of an entry.
        """
        return torch.stack(self.leaf_gradients[projection][: self.PASSES]).abs().amax(0)

    def _of_factor(
        self, slope: Slope, factor: Factor, found: list[Projection], cotangents: list[Tensor]
    ) -> list[Projection]:
        """The projections with a share in a query or key; those of other modules only if the shares are complete.

        If shares add up to more than the total, there is a gate or a learned scale; if to less, a residual.
        """
        shares = [self._shares(factor.tensor, at, factor.tensor, at, found) for at in cotangents]
        contributing = self._with_share(shares, found)
        if not self._are_complete(shares, found, contributing):
            contributing = self._without_gates(factor.tensor, contributing, slope)
        inside = [p for p in contributing if self.call and self.call in p.calls]
        complete = inside == contributing or self._are_complete(shares, found, contributing)
        return contributing if complete else inside

    def _are_complete(self, shares: Shares, found: list[Projection], some: list[Projection]) -> bool:
        """Whether the shares of some of the projections found add up to the total."""
        total = torch.tensor([total for total, _ in shares])
        added = torch.tensor([sum(s for p, s in zip(found, each, strict=True) if p in some) for _, each in shares])
        return bool((added - total).norm() <= max(0.01, self.rounding) * total.norm())

    def _without_gates(self, output: Tensor, found: list[Projection], slope: Slope) -> list[Projection]:
        """The projections that the output is a function of, linear or not, without gates and bounded projections.

        Gates are projections that multiply another one. Learned tensors, such as a temperature, count as gates here.
        """
        bounded = [p for p in found if self.changes.get(replace(slope, at=p.number)) is SlopeChange.VANISHES]
        self.bounded += bounded
        found = [p for p in found if p not in bounded]
        if not found:
            return []
        first = torch.autograd.grad(output, [p.leaf for p in found], torch.randn_like(output), create_graph=True)
        at = dict(zip(found, first, strict=True))
        nonlinear_in = {p: _depends_on(gradient, found) for p, gradient in at.items()}
        made = [p for p in found if p.output is not None]
        linear = [p for p in made if p not in nonlinear_in[p]]
        gates = [p for p in made if p in nonlinear_in[p] and any(p in nonlinear_in[other] for other in linear)]
        kept = [p for p in made if p not in gates]
        self.cut |= dict.fromkeys(gates)
        if not linear and any(
            p in nonlinear_in[other] and not _close(at[p], at[other]) for p in kept for other in kept
        ):
            self.disproportionate = True  # a function of several projections that is not a function of their sum
        curved = [p for p in kept if any(by.output is not None for by in nonlinear_in[p])]
        for each in [replace(slope, at=p.number, linear=p in linear) for p in curved]:
            self.disproportionate |= self.changes.get(each) is SlopeChange.GROWS
            if each not in self.changes:
                self.unknown.append(each)
        return kept

    def _of_projection(self, projection: Projection) -> list[Projection]:
        """The earlier projections in the same call of the attention module with a share in a projection."""
        earlier = self._earlier(projection)
        if not earlier or projection.output is None or projection.input is None:
            return []
        shares = []
        for at in self.leaf_gradients.get(projection, []):
            (at_input,) = gradients(projection.output, [projection.input], at)
            if at_input is not None:
                shares.append(self._shares(projection.input, at_input, projection.output, at, earlier))
        contributing = self._with_share(shares, earlier)
        if not self._are_complete(shares, earlier, contributing):
            self.partial.add(projection)
            slope = Slope("output", self.number, of=projection.number)
            contributing = self._without_gates(projection.output, contributing, slope)
        return contributing

    def _earlier(self, projection: Projection) -> list[Projection]:
        """The projections that ran before this one in the same call of the attention module."""
        if projection.input is None or not projection.input.requires_grad or self.call == 0:
            return []
        before = takewhile(lambda earlier: earlier is not projection, self.projections.values())
        return [earlier for earlier in before if self.call in earlier.calls and earlier.output is not None]

    def _shares(
        self, tensor: Tensor, at: Tensor, output: Tensor, at_output: Tensor, found: list[Projection]
    ) -> tuple[float, list[float]]:
        """The sum of tensor * at, and each projection's share in it, from gradients of `output` at `at_output`."""
        total = total_of(tensor.detach() * at)
        shares = []
        for projection, at_leaf in zip(found, gradients(output, [p.leaf for p in found], at_output), strict=True):
            if at_leaf is not None:
                self.leaf_gradients.setdefault(projection, []).append(at_leaf)
            shares.append(0.0 if at_leaf is None else total_of(projection.leaf.detach() * at_leaf))
        self.finite &= math.isfinite(total + sum(shares))
        return total, shares

    def _with_share(self, shares: Shares, found: list[Projection]) -> list[Projection]:
        """The projections with a share; none if all together have none. Others with a gradient become `cut`."""
        if not shares or not found:
            return []
        no_share = max(self.NO_SHARE, self.rounding) * torch.tensor([total for total, _ in shares]).norm()
        shares_PF = torch.tensor([each for _, each in shares])
        some = bool(shares_PF.sum(1).norm() > no_share)
        contributing = [p for p, s in zip(found, shares_PF.norm(dim=0), strict=True) if some and s > no_share]
        reached = (shares_PF != 0).any(0).tolist()
        self.cut |= dict.fromkeys(p for p, r in zip(found, reached, strict=True) if r and p not in contributing)
        return contributing


def _depends_on(gradient: Tensor, projections: Sequence[Projection]) -> set[Projection]:
    """The projections that a gradient depends on. The output it is the gradient of is not linear in them."""
    if not gradient.requires_grad:
        return set()
    again = gradients(gradient, [p.leaf for p in projections], torch.randn_like(gradient))
    return {p for p, second in zip(projections, again, strict=True) if second is not None and second.any()}


def _close(one: Tensor, other: Tensor) -> bool:
    return one is other or (one.shape == other.shape and torch.allclose(one, other))
