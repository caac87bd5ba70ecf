"""Finds the terms of every head's logit in one attention, by differentiating its queries and keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product as pairs
from typing import Any

import torch
from torch import Tensor

from quacklr.find.measure.homogeneity import PASSES, Homogeneity, Sizes
from quacklr.find.measure.mixing import Heads, are_mixed
from quacklr.find.measure.records import Attention, Factor, Product, Projection, RowMask, recorded_in
from quacklr.util.autograd import gradients, total_of

Chain = tuple[RowMask, ...]  # from the projection next to the logit to the one that reads the input
MIXED = "it mixes the logits of its heads before the softmax"
OTHER_WAYS = "its logits depend on queries or keys in other ways than by their product"
NOT_LINEAR = (
    "its logits are not linear in its queries or keys, and do not grow in proportion to them either; if you know its "
    "paths, declare them in a method logit_paths() of the module"
)
NOT_FINITE = "its derivatives are not finite"
SPARSE = (
    "some entries of its queries or keys have no gradient, as after a ReLU, so the measurement may miss rows that they "
    "are made of; if you know its paths, declare them in a method logit_paths() of the module"
)


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredAttention:
    """The terms of one attention's logits, head by head, and the projections that are on no path.

    A term is the chain of the query and that of the key, each from the logit to the input.
    """

    module: str
    problem: str  # why paths cannot describe it; empty if they can
    terms: list[tuple[Chain, Chain]]
    cut: list[Projection]  # projections that a norm follows
    bounded: list[Projection]  # gates, and projections that a bounded function follows, such as tanh


class TermFinder:
    """The terms of one attention's logits, each a query chain and a key chain.

    `projections` are those recorded before the attention. `at_scale` has the sizes at a larger scale; None if they are
    not measured yet.
    """

    def __init__(self, attention: Attention, projections: dict[int, Projection], at_scale: Sizes | None) -> None:
        self.attention, self.projections = attention, projections
        self.logits, self.products = attention.logits, attention.products
        self.factors = [factor for product in self.products for factor in (product.q, product.k)]
        self.generator = torch.Generator(self.logits.device).manual_seed(0)
        cotangents: dict[Factor, list[Tensor]] = {factor: [] for factor in self.factors}
        for product in self.products * PASSES:
            for factor, cotangent in self._cotangents(product, self._noise(product.output)).items():
                cotangents[factor].append(cotangent)
        self.homogeneity = Homogeneity(attention, cotangents, projections, at_scale)
        self.entries = {factor: self._entries_of(factor) for factor in self.factors}
        self.normed = [] if attention.fused else self._normed()
        curved = self.products if not attention.fused and self._is_curved() else []
        self.grows = any(self.homogeneity.growth((product.number, "logits", -1)) != "less" for product in curved)

    def measured(self) -> MeasuredAttention:
        """The terms of all heads, and the problem that paths have with this attention."""
        terms, is_mixed = self._terms()
        problem = self._problem(is_mixed)
        normed = [p for x in self.normed for f in (x.q, x.k) for p in recorded_in(f.tensor, self.projections)]
        cut = [*self.homogeneity.cut, *normed]
        return MeasuredAttention(self.attention.module, problem, terms, cut, self.homogeneity.bounded)

    def _problem(self, is_mixed: bool) -> str:
        """The reason why paths cannot describe this attention; empty if they can."""
        found = self.homogeneity
        if not found.is_finite:
            return NOT_FINITE
        if found.is_unreached or any(p.is_sparse(found.largest_gradient(p)) for p in found.on_paths):
            return SPARSE
        if is_mixed:
            return MIXED
        direct = recorded_in(self.logits, self.projections)
        made = [p for factor in self.factors for p in found.contributing[factor] if p.output is not None]
        if self.attention.nested or any(p in direct for p in made):
            return OTHER_WAYS
        return NOT_LINEAR if found.is_disproportionate or self.grows else ""

    def _normed(self) -> list[Product]:
        """The products whose scale, alone or all together, does not change the logits, because a norm follows them."""
        alone, together = dict.fromkeys(self.products, True), True
        for _ in range(PASSES):
            at = gradients(self.logits, [product.leaf for product in self.products], self._noise(self.logits))
            shares, bounds = [], []
            for product, gradient in zip(self.products, at, strict=True):
                assert gradient is not None
                self.homogeneity.is_finite &= bool(gradient.isfinite().all())
                self.homogeneity.sizes[product.number, "logits", -1] = gradient.abs().float().mean()
                shares.append(total_of(gradient * product.leaf.detach()))
                bounds.append(1e-4 * float(gradient.norm() * product.leaf.detach().norm()))
                alone[product] &= abs(shares[-1]) <= bounds[-1]
            together &= abs(sum(shares)) <= sum(bounds)
        if self.logits.dtype in (torch.float16, torch.bfloat16):
            return []  # rounding errors exceed the bounds
        return [product for product in self.products if together or alone[product]]

    def _is_curved(self) -> bool:
        """Whether the logits are not linear in the products: capped, or multiplied by a projection."""
        leaves = [product.leaf for product in self.products]
        at = torch.autograd.grad(self.logits, leaves, self._noise(self.logits), create_graph=True)
        nonlinear = [each for each in at if each.requires_grad]
        leaves += [p.leaf for p in recorded_in(self.logits, self.projections) if p.output is not None]
        again = [second for each in nonlinear for second in gradients(each, leaves, torch.randn_like(each))]
        return any(second is not None and bool(second.any()) for second in again)

    def _terms(self) -> tuple[list[tuple[Chain, Chain]], bool]:
        """The distinct pairs of chains that make the query and the key, of all heads; and whether heads are mixed.

        A head is the entries of a product that are made of the same rows.
        """
        found: dict[object, tuple[Chain, Chain]] = {}
        heads: dict[Product, Heads] = {}
        for product in self.products:
            sizes = product.output.shape
            axes = [axis for axis, size in enumerate(sizes) if size > 1 and self._rows_differ(product, axis, size)]
            numbers: dict[tuple[frozenset[object], ...], int] = {}
            head_of_entry = torch.zeros([size if axis in axes else 1 for axis, size in enumerate(sizes)])
            for index in pairs(*(range(size) for size in head_of_entry.shape)):
                at = self._cotangents(product, self._noise(product.output, axes, [index[axis] for axis in axes]))
                terms = list(self._terms_of(product.q, product.k, at))
                if product not in self.normed:
                    found |= {(tuple(r.key for r in q), tuple(r.key for r in k)): (q, k) for q, k in terms}
                nearest = [
                    [chain[0] for chain in side if chain and chain[0].projection.output is not None]
                    for side in zip(*terms, strict=True)
                ]
                rows = tuple(frozenset(rows.key for rows in side) for side in nearest)
                head_of_entry[index] = numbers.setdefault(rows, len(numbers))
            heads[product] = head_of_entry.to(product.leaf.device), [frozenset().union(*rows) for rows in numbers]
        is_mixed = not self.attention.fused and are_mixed(self.logits, heads, self.generator)
        return list(found.values()), is_mixed

    def _rows_differ(self, product: Product, axis: int, size: int) -> bool:
        """Whether the first and the last entry along an axis of a product read different rows of one projection."""
        first, last = (
            self._rows(self._cotangents(product, self._noise(product.output, [axis], [index])))
            for index in (0, size - 1)
        )
        return any(first[both] != last[both] for both in first.keys() & last.keys())

    def _rows(self, at: dict[Factor, Tensor]) -> dict[tuple[Factor, Projection], object]:
        """The rows of every projection that have a gradient.

        Learned tensors do not count, because different keys may read different rows of them.
        """
        return {
            (factor, projection): projection.rows_with(at_leaf).key
            for factor, gradient in at.items()
            for projection, at_leaf in self._at_projections(factor, gradient)
            if projection.output is not None
        }

    def _noise(self, like: Tensor, axes: Sequence[int] = (), index: Sequence[int] = ()) -> Tensor:
        """A random cotangent for a tensor, at this index of some axes, and zero elsewhere."""
        noise = torch.randn(like.shape, generator=self.generator, device=like.device, dtype=like.dtype)
        where: list[Any] = [slice(None)] * like.ndim
        for axis, i in zip(axes, index, strict=True):
            where[axis] = i
        cotangent = torch.zeros_like(noise)
        cotangent[tuple(where)] = noise[tuple(where)]
        return cotangent

    def _cotangents(self, product: Product, cotangent: Tensor) -> dict[Factor, Tensor]:
        """Random cotangents for the query and the key, at the entries that a cotangent of their product reaches.

        They are not the gradients themselves, which are zero where the other factor is zero, as after a ReLU.
        """
        q, k = product.q, product.k
        found: dict[Factor, Tensor] = {}
        both = gradients(product.output, [q.tensor, k.tensor], cotangent)
        for factor, other, gradient in zip((q, k), (k, q), both, strict=True):
            if gradient is not None:
                shape = [size if axis == factor.axis else 1 for axis, size in enumerate(gradient.shape)]
                met = (other.tensor.detach() != 0).movedim(other.axis, 0).flatten(1).any(1).view(shape)
                reached = (gradient != 0).any(factor.axis, keepdim=True)
                found[factor] = self._noise(gradient) * (met & reached)
        return found

    def _at_projections(self, factor: Factor, cotangent: Tensor) -> Iterator[tuple[Projection, Tensor]]:
        """The gradient at each contributing projection where it is not zero."""
        found = self.homogeneity.contributing[factor]
        for projection, at in zip(found, gradients(factor.tensor, [p.leaf for p in found], cotangent), strict=True):
            if at is not None and at.any():
                yield projection, at

    def _entries_of(self, factor: Factor) -> dict[Projection | None, Tensor]:
        """The entries along the summed axis that each projection makes; all of them if there is one projection."""
        contributing = self.homogeneity.contributing
        found, size = contributing[factor], factor.tensor.shape[factor.axis]
        if not found:
            return {None: torch.ones(size, dtype=torch.bool)}  # normed, or made of no weight
        if all(len(contributing[other]) <= 1 for other in self.factors):
            return {found[0]: torch.ones(size, dtype=torch.bool)}
        entries: dict[Projection | None, Tensor] = {p: torch.zeros(size, dtype=torch.bool) for p in found}
        for entry in range(size):
            at = torch.zeros_like(factor.tensor)
            at.select(factor.axis, entry).normal_(generator=self.generator)
            for projection, _ in self._at_projections(factor, at):
                entries[projection][entry] = True
        return entries

    def _terms_of(self, q: Factor, k: Factor, at: dict[Factor, Tensor]) -> Iterator[tuple[Chain, Chain]]:
        """The chains of each projection of the query, paired with those of each one of the key that shares entries."""
        if q not in at or k not in at:
            return
        for (one, q_entries), (other, k_entries) in pairs(self.entries[q].items(), self.entries[k].items()):
            both = q_entries & k_entries
            if both.any() and not (one is None and other is None):
                yield from pairs(self._chains(q, at[q], one, both), self._chains(k, at[k], other, both))

    def _chains(self, factor: Factor, cotangent: Tensor, first: Projection | None, entries: Tensor) -> list[Chain]:
        """The chains that begin with a projection, through these entries of the query or key only."""
        if first is None:
            return [()]
        only = entries.to(cotangent).view([-1 if axis == factor.axis else 1 for axis in range(cotangent.ndim)])
        (at,) = gradients(factor.tensor, [first.leaf], cotangent * only)
        return list(self._continued(first, at)) if at is not None and at.any() else []

    def _continued(self, projection: Projection, gradient: Tensor) -> Iterator[Chain]:
        """The chains from a projection to earlier ones; also the projection alone, if it has another input as well."""
        rows = projection.rows_with(gradient)
        contributing = self.homogeneity.contributing.get(projection, [])
        leaves = [earlier.leaf for earlier in contributing]
        at = gradients(projection.output, leaves, gradient) if projection.output is not None else ()
        longer = [(earlier, g) for earlier, g in zip(contributing, at, strict=True) if g is not None and g.any()]
        if not longer or projection in self.homogeneity.partial:
            yield (rows,)
        for earlier, at_earlier in longer:
            yield from ((rows, *rest) for rest in self._continued(earlier, at_earlier))
