"""Differentiates the logits of one attention: the terms of every head's logit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product as every
from typing import Any

import torch
from torch import Tensor

from quacklr.find.measure.growth import Change, Slope
from quacklr.find.measure.homogeneity import Homogeneity
from quacklr.find.measure.mixing import Heads, are_mixed
from quacklr.find.measure.projection_rows import Rowset, is_sparse, rows_of
from quacklr.find.measure.records import Attention, Product, Projection, Side
from quacklr.util.autograd import gradients, leaves_of

Chain = tuple[Rowset, ...]  # from the projection next to the logit back to the one that reads the input
MIXED = "it mixes the logits of its heads before the softmax"
OTHER_WAYS = "its logits depend on queries or keys in other ways than by their product"
NOT_LINEAR = (
    "its logits are not linear in its queries or keys, and do not grow in proportion to them either; if you know its "
    "paths, declare them: a method logit_paths() of the module is believed"
)
NOT_FINITE = "its derivatives are not finite"
SPARSE = (
    "entries of its queries or keys have no gradient here and there, as behind a ReLU, so which rows they are made of "
    "may not all be seen; if you know its paths, declare them: a method logit_paths() of the module is believed"
)


class TermFinder:
    """One attention, and the projections that had been made when it ran."""

    def __init__(
        self, attention: Attention, projections: dict[int, Projection], changes: Mapping[Slope, Change]
    ) -> None:
        self.attention, self.projections = attention, projections
        self.logits, self.products = attention.logits, attention.products
        self.sides = [side for product in self.products for side in (product.q, product.k)]
        self.beside = {side: self._projections_in(side.tensor) for side in self.sides}
        self.generator = torch.Generator(self.logits.device).manual_seed(0)
        at_sides = [self._at_all_sides() for _ in range(Homogeneity.PASSES)]
        self.euler = Homogeneity(attention, self.beside, at_sides, projections, changes)
        self.reach = {side: self._reach(side) for side in self.sides}
        self.normed = [] if attention.fused else self._normed()
        self.mixed = False
        self.terms = self._terms()
        curved = [] if attention.fused or not self._is_curved() else [Slope("logits", p.number) for p in self.products]
        self.grows = any(changes.get(slope) is Change.GROWS for slope in curved)
        self.unknown = [*self.euler.unknown, *(slope for slope in curved if slope not in changes)]

    def _projections_in(self, tensor: Tensor) -> list[Projection]:
        return [self.projections[i] for i in map(id, leaves_of(tensor)) if i in self.projections]

    def problem(self) -> str:
        """Why this attention cannot be described by what is multiplied, if it cannot."""
        if not self.euler.finite:
            return NOT_FINITE
        if self.euler.unreached or any(is_sparse(p, at) for p in self.euler.on_paths for at in self.euler.at[p][:1]):
            return SPARSE
        if self.mixed:
            return MIXED
        direct = {id(leaf) for leaf in leaves_of(self.logits)}
        if any(id(p.leaf) in direct for side in self.sides for p in self.euler.alive[side] if p.output is not None):
            return OTHER_WAYS
        return NOT_LINEAR if self.euler.out_of_proportion or self.grows else ""

    def cut(self) -> list[Projection]:
        """Projections that reach the logits, but a norm comes after them, or after their product."""
        after = [p for product in self.normed for side in (product.q, product.k) for p in self.beside[side]]
        return [*self.euler.cut, *after]

    def _normed(self) -> list[Product]:
        """Products that the logits do not depend on the scale of, alone or all together: a norm comes after them."""
        alone, together = dict.fromkeys(self.products, True), True
        for _ in range(Homogeneity.PASSES):
            at = gradients(self.logits, [product.leaf for product in self.products], self._noise(self.logits))
            shares, bounds = [], []
            for product, gradient in zip(self.products, at, strict=True):
                assert gradient is not None
                self.euler.finite &= bool(gradient.isfinite().all())
                shares.append(float((gradient * product.leaf.detach()).double().sum()))
                bounds.append(1e-4 * float(gradient.norm() * product.leaf.detach().norm()))
                alone[product] &= abs(shares[-1]) <= bounds[-1]
            together &= abs(sum(shares)) <= sum(bounds)
        if self.logits.dtype in (torch.float16, torch.bfloat16):
            return []  # rounding would hide it
        return [product for product in self.products if together or alone[product]]

    def _is_curved(self) -> bool:
        """Whether the logits are not linear in the products: capped, or multiplied by something that is projected."""
        leaves = [product.leaf for product in self.products]
        at = torch.autograd.grad(self.logits, leaves, self._noise(self.logits), create_graph=True)
        bent = [each for each in at if each.requires_grad]
        leaves += [p.leaf for p in self._projections_in(self.logits) if p.output is not None]
        again = [second for each in bent for second in gradients(each, leaves, torch.randn_like(each))]
        return any(second is not None and bool(second.any()) for second in again)

    def _terms(self) -> list[tuple[Chain, Chain]]:
        """What makes the query and the key, for every head and every way in which they are made; each once.

        A head is the entries of a product that are made of the same rows.
        """
        found: dict[object, tuple[Chain, Chain]] = {}
        heads: dict[Product, Heads] = {}
        for product in self.products:
            sizes = product.output.shape
            axes = [axis for axis, size in enumerate(sizes) if size > 1 and self._rows_differ(product, axis, size)]
            numbers: dict[tuple[frozenset[object], ...], int] = {}
            head_of_entry = torch.zeros([size if axis in axes else 1 for axis, size in enumerate(sizes)])
            for index in every(*(range(size) for size in head_of_entry.shape)):
                at = self._at_sides(product, self._noise(product.output, axes, [index[axis] for axis in axes]))
                terms = list(self._terms_of(product.q, product.k, at))
                if product not in self.normed:
                    found |= {(tuple(r.key for r in q), tuple(r.key for r in k)): (q, k) for q, k in terms}
                nearest = [
                    [of[0] for of in side if of and of[0].projection.output is not None]
                    for side in zip(*terms, strict=True)
                ]
                rows = tuple(frozenset(rows.key for rows in side) for side in nearest)
                head_of_entry[index] = numbers.setdefault(rows, len(numbers))
            heads[product] = head_of_entry.to(product.leaf.device), [frozenset().union(*rows) for rows in numbers]
        self.mixed = not self.attention.fused and are_mixed(self.logits, heads, self.generator)
        return list(found.values())

    def _rows_differ(self, product: Product, axis: int, size: int) -> bool:
        """Whether the same projection has other rows at the other end of an axis of a product."""
        first, last = (
            self._rows(self._at_sides(product, self._noise(product.output, [axis], [index]))) for index in (0, size - 1)
        )
        return any(first[both] != last[both] for both in first.keys() & last.keys())

    def _rows(self, at: dict[Side, Tensor]) -> dict[tuple[Side, Projection], object]:
        """The rows of every projection that have a gradient.

        Learned tensors by themselves do not count, since theirs may differ between keys.
        """
        return {
            (side, projection): rows_of(projection, at_leaf).key
            for side, gradient in at.items()
            for projection, at_leaf in self._at_projections(side, gradient)
            if projection.output is not None
        }

    def _noise(self, like: Tensor, axes: Sequence[int] = (), index: Sequence[int] = ()) -> Tensor:
        """A random cotangent of a tensor at an index of some axes, zero elsewhere."""
        noise = torch.randn(like.shape, generator=self.generator, device=like.device, dtype=like.dtype)
        place: list[Any] = [slice(None)] * like.ndim
        for axis, i in zip(axes, index, strict=True):
            place[axis] = i
        cotangent = torch.zeros_like(noise)
        cotangent[tuple(place)] = noise[tuple(place)]
        return cotangent

    def _at_all_sides(self) -> dict[Side, Tensor]:
        """What a random cotangent of every product is at its query and its key."""
        at = [self._at_sides(product, self._noise(product.output)) for product in self.products]
        return {side: gradient for of_product in at for side, gradient in of_product.items()}

    def _at_sides(self, product: Product, cotangent: Tensor) -> dict[Side, Tensor]:
        """A random cotangent of the query and the key, at those entries that a cotangent of their product reaches.

        It is not the gradient itself, which is zero where the other factor is, as behind a ReLU.
        """
        q, k = product.q, product.k
        found: dict[Side, Tensor] = {}
        both = gradients(product.output, [q.tensor, k.tensor], cotangent)
        for side, other, gradient in zip((q, k), (k, q), both, strict=True):
            if gradient is not None:
                summed = [size if axis == side.axis else 1 for axis, size in enumerate(gradient.shape)]
                met = (other.tensor.detach() != 0).movedim(other.axis, 0).flatten(1).any(1).view(summed)
                reached = (gradient != 0).any(side.axis, keepdim=True)
                found[side] = self._noise(gradient) * (met & reached)
        return found

    def _at_projections(self, side: Side, gradient: Tensor) -> Iterator[tuple[Projection, Tensor]]:
        found = self.euler.alive[side]
        for projection, at in zip(found, gradients(side.tensor, [p.leaf for p in found], gradient), strict=True):
            if at is not None and at.any():
                yield projection, at

    def _reach(self, side: Side) -> dict[Projection | None, Tensor]:
        """Which entries along the summed axis each projection makes; asked only where there are several."""
        found = self.euler.alive[side]
        size = side.tensor.shape[side.axis]
        everything = torch.ones(size, dtype=torch.bool)
        if not found:
            return {None: everything}  # normed, or no weight at all
        if len(found) == 1 and all(len(self.euler.alive[other]) <= 1 for other in self.sides):
            return {found[0]: everything}
        reach: dict[Projection | None, Tensor] = {p: torch.zeros(size, dtype=torch.bool) for p in found}
        for entry in range(size):
            at = torch.zeros_like(side.tensor)
            at.select(side.axis, entry).normal_(generator=self.generator)
            for projection, _ in self._at_projections(side, at):
                reach[projection][entry] = True
        return reach

    def _terms_of(self, q: Side, k: Side, at: dict[Side, Tensor]) -> Iterator[tuple[Chain, Chain]]:
        """Every projection that makes the query with every one that makes entries of the key that it meets."""
        if q not in at or k not in at:
            return
        for (one, q_reach), (other, k_reach) in every(self.reach[q].items(), self.reach[k].items()):
            both = q_reach & k_reach
            if both.any() and not (one is None and other is None):
                yield from every(self._chains(q, at[q], one, both), self._chains(k, at[k], other, both))

    def _chains(self, side: Side, gradient: Tensor, first: Projection | None, entries: Tensor) -> list[Chain]:
        """The chains that begin with a projection, through these entries of the query or key alone."""
        if first is None:
            return [()]
        only = entries.to(gradient).view([-1 if axis == side.axis else 1 for axis in range(gradient.ndim)])
        (at,) = gradients(side.tensor, [first.leaf], gradient * only)
        return list(self._followed(first, at)) if at is not None and at.any() else []

    def _followed(self, projection: Projection, gradient: Tensor) -> Iterator[Chain]:
        """A projection, with what is behind it in the same call of the attention module; alone, if it reads more."""
        here = rows_of(projection, gradient)
        behind = self.euler.alive.get(projection, [])
        leaves = [earlier.leaf for earlier in behind]
        at = gradients(projection.output, leaves, gradient) if projection.output is not None else ()
        longer = [(earlier, g) for earlier, g in zip(behind, at, strict=True) if g is not None and g.any()]
        if not longer or projection in self.euler.partly:
            yield (here,)
        for earlier, at_earlier in longer:
            yield from ((here, *rest) for rest in self._followed(earlier, at_earlier))
