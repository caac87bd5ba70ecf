"""Finds the projections that a query or a key is made of, and those whose scale does not matter.

By Euler's theorem, the sum of y * df/dy is f where f is linear in y, and 0 where y is normed. This sum is the share of
projection y in f. Shares are computed for the projections that make the queries and the keys; then, for each projection
with a share, for the earlier projections that its input is computed from.

If the shares of a function do not add up to it, the function is not linear. Lemma 1 needs only that it is Lipschitz:
then a step of the weights changes the logit, up to a constant, no more than if it were linear. So y * df/dy is measured
again with all leaves SCALE times as large, and its growth decides:

    softplus, GELU, SiLU, ELU of a query     SCALE times as large             on the path
    a gate, sigmoid(g) * q                   that of q SCALE times, of g not  q is on the path, g is not
    q * q, q * g, silu(g) * q                SCALE ** 2 times                 cannot be written as a path
    tanh(q)                                  not larger                       on no path: the logit is bounded

The logit as a function of the product must be Lipschitz too: its slope at the larger scale must not be larger.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

import torch
from torch import Tensor

from quacklr.find.measure.records import THRESHOLD, Factor, Projection, recorded_in
from quacklr.util.autograd import depends, gradients, sums

SCALE = 2.0**12
UNCHANGED = SCALE**0.5  # a size that changes by a smaller factor counts as unchanged
MOST_ROWS = 0.75  # a softmax at a SCALE times larger input is flat in all rows but a few
PASSES = 4  # random directions
NO_SHARE = 1e-3  # a smaller share counts as none: an epsilon in a norm leaves about 1e-5
ROUNDING = 8  # times the dtype's epsilon, if that is more

# The mean |y * df/dy|, one for every row of y. The key has the numbers of the records, because another forward pass has
# other tensors: that of the product or of the projection that f makes, which part of it f is, and that of y.
Sizes = dict[tuple[int, str, int], Tensor]


class Homogeneity:
    """The projections with a share in each query and key of an attention, and in each projection that has one.

    `cotangents` are random directions for each query and key. `at_scale` has the sizes at the larger scale; None if
    they are not measured yet.
    """

    def __init__(
        self, call: int, cotangents: dict[Factor, Tensor], projections: dict[int, Projection], at_scale: Sizes | None
    ) -> None:
        self.projections, self.call, self.at_scale = projections, call, at_scale
        dtypes = [factor.tensor.dtype for factor in cotangents if factor.tensor.is_floating_point()]
        self.rounding = ROUNDING * max(torch.finfo(dtype).eps for dtype in dtypes)
        self.is_finite = True
        self.is_disproportionate = False  # as q = g * h, which no path describes
        self.needs_scale = False  # whether sizes at the larger scale are needed, and not measured yet
        self.is_unreached = False  # whether a query or a key has no gradient at any projection that it is made of
        self.contributing: dict[Factor | Projection, list[Projection]] = {}  # those with a share in it
        self.cut: dict[Projection, None] = {}  # those with a gradient, but no share
        self.bounded: list[Projection] = []  # those that change a logit by no more than some bound
        self.partial: set[Factor | Projection] = set()  # what has other terms besides the contributing projections
        self.leaf_gradients: dict[Projection, list[Tensor]] = {}
        self.sizes: Sizes = {}
        for factor, directions in cotangents.items():
            self._add_factor(factor, directions)
        waiting = self.on_paths
        while waiting:
            projection = waiting.pop()
            if projection not in self.contributing:
                self._add_projection(projection)
                waiting += self.contributing[projection]
        on_paths = set(self.on_paths)
        self.cut = {p: None for p in self.cut if p not in on_paths}

    @property
    def on_paths(self) -> list[Projection]:
        """Every projection that has a share."""
        return list(dict.fromkeys(p for found in self.contributing.values() for p in found))

    def growth(self, key: tuple[int, str, int], linear: bool = False, gate: bool = False) -> str:
        """How a size changes at the larger scale: "in proportion", "more", or "less", which is not at all.

        `linear`: the function is linear in y, times something that may vanish. `gate`: y is a factor of another
        projection; a few of its rows may not be flat, by chance.
        """
        if self.at_scale is None:
            self.needs_scale = True
            return "in proportion"
        before, after = self.sizes[key], self.at_scale.get(key)
        if after is None or after.shape != before.shape or not after.isfinite().all():
            return "more"
        read = before > THRESHOLD * before.max()
        growth = after[read] / before[read]
        stays = growth < UNCHANGED
        if not linear and stays.float().mean() >= (MOST_ROWS if gate else 1):
            return "less"
        # sizes that stay in some rows only (they are normed, and others are not) have no path either
        is_more = growth.max() > SCALE * UNCHANGED or (not linear and bool(stays.any()))
        return "more" if is_more else "in proportion"

    def _add_factor(self, factor: Factor, cotangents: Tensor) -> None:
        """Find the projections with a share in a query or key."""
        found = recorded_in(factor.tensor, self.projections)
        at = gradients(factor.tensor, [p.leaf for p in found], cotangents)
        self._add(factor, sums(factor.tensor.detach() * cotangents), found, at)
        made = [at for p in found if p.output is not None for at in self.leaf_gradients.get(p, [])]
        self.is_unreached |= bool(made) and not any(bool(at.any()) for at in made)

    def _add_projection(self, projection: Projection) -> None:
        """Find the projections with a share in a projection, that ran before it in the same call of the module."""
        self.contributing[projection] = []
        x, output = projection.input, projection.output
        inside = [p for p in self.projections.values() if self.call and self.call in p.calls and p.output is not None]
        earlier = [p for p in inside if p.number < projection.number]
        if not earlier or x is None or output is None or not x.requires_grad:
            return
        at_input, *at = gradients(output, [x, *(p.leaf for p in earlier)], torch.cat(self.leaf_gradients[projection]))
        if at_input is not None:
            self._add(projection, sums(x.detach() * at_input), earlier, at)

    def _add(
        self, of: Factor | Projection, totals: Tensor, found: list[Projection], at: Sequence[Tensor | None]
    ) -> None:
        """Find the projections with a share in a function, from the totals and the gradients in random directions.

        If shares add up to more than the total, there is a gate or a learned scale; if to less, a residual. Projections
        of other modules count only if the shares are complete.
        """
        shares_PF = totals.new_zeros(len(totals), len(found))
        for i, (p, at_leaf) in enumerate(zip(found, at, strict=True)):
            if at_leaf is not None:
                self.leaf_gradients.setdefault(p, []).append(at_leaf)
                share = p.leaf.detach().float() * at_leaf
                shares_PF[:, i] = sums(share)
                self.sizes[(*of.key, p.number)] = p.per_row(share, Tensor.mean).sum(0)
        totals, shares_PF = totals.cpu(), shares_PF.cpu()
        self.is_finite &= bool((totals + shares_PF.sum(1)).isfinite().all())
        no_share = max(NO_SHARE, self.rounding) * totals.norm()
        some = bool(shares_PF.sum(1).norm() > no_share)
        contributing = [p for p, s in zip(found, shares_PF.norm(dim=0), strict=True) if some and s > no_share]
        reached = (shares_PF != 0).any(0).tolist()
        self.cut |= dict.fromkeys(p for p, r in zip(found, reached, strict=True) if r and p not in contributing)

        def are_complete() -> bool:
            """Whether the shares of the contributing projections add up to the total."""
            added = shares_PF[:, [p in contributing for p in found]].sum(1)
            return bool((added - totals).norm() <= max(0.01, self.rounding) * totals.norm())

        if not are_complete():
            self.partial.add(of)
            contributing = self._in_proportion(of, contributing)
        inside = [p for p in contributing if self.call and self.call in p.calls]
        self.contributing[of] = contributing if are_complete() else inside

    def _in_proportion(self, of: Factor | Projection, found: list[Projection]) -> list[Projection]:
        """The projections that a function grows in proportion to, without gates and others that do not matter."""
        found = [p for p in found if p.output is not None]  # a learned tensor, such as a temperature, is a gate
        output = of.tensor if isinstance(of, Factor) else of.output
        assert output is not None
        depends_on: dict[Projection, set[Projection]] = {}
        for p in found:
            (at,) = torch.autograd.grad(output, [p.leaf], torch.randn_like(output), create_graph=True)
            depends_on[p] = set(compress(found, depends(at, [other.leaf for other in found])))
        linear = [p for p in found if p not in depends_on[p]]
        gates = {gate for p in linear for gate in depends_on[p]}
        growth = {p: self.growth((*of.key, p.number), p in linear, p in gates) for p in found}
        self.is_disproportionate |= "more" in growth.values()
        self.bounded += [p for p in found if growth[p] == "less"]
        return [p for p in found if growth[p] != "less"]
