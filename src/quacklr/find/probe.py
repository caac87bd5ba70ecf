"""Differentiates the logits of one attention: the terms of every head's logit."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product as every
from typing import Any

import torch
from torch import Tensor

from quacklr.find.euler import Euler
from quacklr.find.owners import Rowset, rows_of
from quacklr.find.records import Attention, Product, Projection, Side, gradients, leaves_of

Chain = tuple[Rowset, ...]  # from the projection next to the logit back to the one that reads the input


class Probe:
    """One attention, and the projections that had been made when it ran."""

    def __init__(self, attention: Attention, projections: dict[int, Projection]) -> None:
        self.attention = attention
        self.sides = [side for product in attention.products for side in (product.q, product.k)]
        self.beside = {
            side: [projections[i] for i in map(id, leaves_of(side.tensor)) if i in projections] for side in self.sides
        }
        self.module, call = self._module()
        self.generator = torch.Generator(attention.logits.device).manual_seed(0)
        self.products = [p for p in attention.products if not self._is_normed(p)]
        at_sides = [self._at_sides(self._random(())) for _ in range(Euler.PASSES)]
        self.euler = Euler(self.beside, at_sides, projections, call)
        self.reach = {side: self._reach(side) for side in self.sides}

    def _is_normed(self, product: Product) -> bool:
        """Whether the logits do not depend on the scale of a product: there is a norm after it."""
        if product.leaf.dtype in (torch.float16, torch.bfloat16):
            return False  # rounding would hide it
        for _ in range(Euler.PASSES):
            (at,) = gradients(self.attention.logits, [product.leaf], self._random(()))
            leaf = product.leaf.detach()
            if at is None or not (at * leaf).sum().abs() <= 1e-5 * at.norm() * leaf.norm():
                return False
        return True

    def _module(self) -> tuple[str, int]:
        """The innermost module running that also made a query (or a key, where queries are made of nothing)."""
        for sides in (self.sides[::2], self.sides[1::2]):
            made = {call for side in sides for projection in self.beside[side] for call in projection.calls}
            for name, call in zip(self.attention.modules[::-1], self.attention.calls[::-1], strict=True):
                if call in made and name:
                    return name, call
        return "", 0

    def problem(self) -> str:
        """Why this attention cannot be described by what is multiplied, if it cannot."""
        if not self.euler.finite:
            return "its derivatives are not finite"
        direct = {id(leaf) for leaf in leaves_of(self.attention.logits)}
        if any(id(p.leaf) in direct for side in self.sides for p in self.euler.alive[side] if p.output is not None):
            return "its logits depend on queries or keys in other ways than by their product"
        return ""

    def cut(self) -> list[Projection]:
        """Projections that reach the logits, but a norm comes after them, or after their product."""
        normed = [product for product in self.attention.products if product not in self.products]
        after = [p for product in normed for side in (product.q, product.k) for p in self.beside[side]]
        return [*self.euler.cut, *after]

    def terms(self) -> list[tuple[Chain, Chain]]:
        """What makes the query and the key, for every head and every way in which they are made; each once."""
        found: dict[object, tuple[Chain, Chain]] = {}
        for cotangent in self._heads():
            at = self._at_sides(cotangent)
            for product in self.products:
                for q, k in self._terms_of(product.q, product.k, at):
                    found.setdefault((tuple(r.key for r in q), tuple(r.key for r in k)), (q, k))
        return list(found.values())

    def _heads(self) -> Iterator[Tensor]:
        """A random cotangent for each head: an index of those axes of the logits along which rows differ."""
        shape = self.attention.logits.shape
        axes = [axis for axis, size in enumerate(shape) if size > 1 and self._rows_differ(axis, size - 1)]
        for index in every(*(range(shape[axis]) for axis in axes)):
            yield self._random(axes, *index)

    def _rows_differ(self, axis: int, last: int) -> bool:
        """Whether the same projection has other rows at the other end of an axis.

        Learned tensors by themselves do not count, since theirs may differ between keys.
        """
        first, other = (
            {
                (side, projection): rows_of(projection, at).key
                for side, gradient in self._at_sides(self._random([axis], index)).items()
                for projection, at in self._at_projections(side, gradient)
                if projection.output is not None
            }
            for index in (0, last)
        )
        return any(first[both] != other[both] for both in first.keys() & other.keys())

    def _random(self, axes: Any, *index: int) -> Tensor:
        """A random cotangent of the logits at an index of some axes, zero elsewhere."""
        logits = self.attention.logits
        noise = torch.randn(logits.shape, generator=self.generator, device=logits.device, dtype=logits.dtype)
        place: list[Any] = [slice(None)] * logits.ndim
        for axis, i in zip(axes, index, strict=True):
            place[axis] = i
        cotangent = torch.zeros_like(noise)
        cotangent[tuple(place)] = noise[tuple(place)]
        return cotangent

    def _at_sides(self, cotangent: Tensor) -> dict[Side, Tensor]:
        """What a cotangent of the logits is at the query and the key of every product."""
        products = self.products
        at_products = gradients(self.attention.logits, [product.leaf for product in products], cotangent)
        found: dict[Side, Tensor] = {}
        for product, at in zip(products, at_products, strict=True):
            if at is not None:
                both = gradients(product.output, [product.q.tensor, product.k.tensor], at)
                found |= {side: g for side, g in zip((product.q, product.k), both, strict=True) if g is not None}
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
