"""What a logit is linear in, and what a norm has cut off from it.

For what is linear in y, the sum of y * dlogit/dy is the logit itself (Euler); for what is normed it is zero. So each
projection is asked for its share, next to the query and the key first, then behind every projection that has one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from quacklr.find.records import Projection, Side, gradients

Asked = list[tuple[float, list[float]]]  # for each random direction: the whole, and each projection's share of it


class Euler:
    """Of the projections beside the query and the key of an attention, and of those behind: which have a share."""

    PASSES = 4  # random directions in which is asked
    NOTHING = 1e-3  # a share that is none: an epsilon in a norm leaves about 1e-5
    ROUNDING = 8  # times the dtype's epsilon, if that is more

    def __init__(
        self,
        beside: Mapping[Side, list[Projection]],
        at_sides: Sequence[Mapping[Side, Tensor]],
        projections: Mapping[int, Projection],
        call: int,
    ) -> None:
        self.projections, self.call = projections, call
        dtypes = [side.tensor.dtype for side in beside]
        self.rounding = self.ROUNDING * max(torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point)
        self.finite = True
        self.alive: dict[Side | Projection, list[Projection]] = {}
        self.cut: dict[Projection, None] = {}
        self.partly: set[Projection] = set()  # those whose input is more than what is behind them
        self.at: dict[Projection, list[Tensor]] = {}
        for side, found in beside.items():
            asked = [self._ask(side.tensor, at[side], side.tensor, at[side], found) for at in at_sides if side in at]
            self.alive[side] = self._beside(side, asked, found)
        waiting = list(self.at)
        while waiting:
            projection = waiting.pop()
            if projection not in self.alive:
                self.alive[projection] = self._behind(projection)
                waiting += self.alive[projection]
        self.cut = {p: None for p in self.cut if not any(p in alive for alive in self.alive.values())}

    def _beside(self, side: Side, asked: Asked, found: list[Projection]) -> list[Projection]:
        """What makes a query or a key: what is linear in it; of other modules only if it leaves nothing out.

        Where shares are more than the whole, there is a gate or a learned scale; where they are less, a residual.
        """
        alive = self._with_a_share(asked, found)
        if not self._are_whole(asked, found, alive):
            linear = [p for p in alive if p.output is not None and self._is_linear(side, p)]
            self.cut |= dict.fromkeys(p for p in alive if p not in linear and p.output is not None)
            alive = linear
        inside = [p for p in alive if self.call and self.call in p.calls]
        return alive if inside == alive or self._are_whole(asked, found, alive) else inside

    def _are_whole(self, asked: Asked, found: list[Projection], some: list[Projection]) -> bool:
        """Whether the shares of some of them make up the whole."""
        size = torch.tensor([whole for whole, _ in asked])
        shares = torch.tensor([sum(s for p, s in zip(found, shares, strict=True) if p in some) for _, shares in asked])
        return bool((shares - size).norm() <= max(0.01, self.rounding) * size.norm())

    def _is_linear(self, side: Side, projection: Projection) -> bool:
        """Whether a query or a key is linear in a projection: its gradient does not depend on the projection.

        A gate is not, nor is what a norm follows.
        """
        noise = torch.randn_like(side.tensor)
        (at,) = torch.autograd.grad(side.tensor, [projection.leaf], noise, create_graph=True)
        if not at.requires_grad:
            return True
        again = gradients(at, [projection.leaf], torch.randn_like(at))[0]
        return again is None or not bool(again.any())

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
