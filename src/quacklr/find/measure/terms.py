"""Finds the terms of every head's logit in one attention, by differentiating its queries and keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product as pairs

import torch
from torch import Tensor

from quacklr.find.measure.homogeneity import PASSES, Homogeneity, Sizes
from quacklr.find.measure.mixing import Heads, are_mixed
from quacklr.find.measure.records import Attention, Factor, Product, Projection, Rows, recorded_in
from quacklr.util.autograd import batches, depends, gradients, sums

Chain = tuple[Rows, ...]  # from the projection next to the logit to the one that reads the input
MIXED = "it mixes the logits of its heads before the softmax"
OTHER_WAYS = "its logits depend on queries or keys in other ways than by their product"
DECLARE = "; if you know its paths, declare them in a method logit_paths() of the module"
NOT_LINEAR = f"its logits are not linear in its queries or keys, and do not grow in proportion to them either{DECLARE}"
NOT_FINITE = "its derivatives are not finite"
SPARSE = (
    "some entries of its queries or keys have no gradient, as after a ReLU, so the measurement may miss rows that they "
    f"are made of{DECLARE}"
)


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredAttention:
    """The terms of one attention's logits, head by head, and the projections that are on no path."""

    module: str
    problem: str  # why paths cannot describe it; empty if they can
    terms: list[tuple[Chain, Chain]]  # the chain of the query and that of the key
    cut: list[Projection]  # projections that a norm follows
    bounded: list[Projection]  # gates, and projections that a bounded function follows, such as tanh


class TermFinder:
    """The terms of one attention's logits. Derivatives of all heads are taken together."""

    def __init__(self, attention: Attention, projections: dict[int, Projection], at_scale: Sizes | None) -> None:
        self.attention, self.projections = attention, projections
        self.logits, self.products = attention.logits, attention.products
        self.generator = torch.Generator(self.logits.device).manual_seed(0)
        self.cotangents: dict[Factor, Tensor] = {}  # random, at the entries of the summed axis where the other is not 0
        for product in self.products:  # not the gradients themselves, which are 0 where the other is, as after a ReLU
            for factor, other in ((product.q, product.k), (product.k, product.q)):
                met = (other.tensor.detach() != 0).movedim(other.axis, 0).flatten(1).any(1)
                self.cotangents[factor] = self._noise(factor.tensor) * _along(factor.axis, met[None], factor)
        self.homogeneity = Homogeneity(attention.call, self.cotangents, projections, at_scale)
        self.entries = {factor: self._entries_of(factor) for factor in self.cotangents}
        self.normed = [] if attention.fused else self._normed()
        curved = self.products if not attention.fused and self._is_curved() else []
        self.grows = any(self.homogeneity.growth((product.number, "logits", -1)) != "less" for product in curved)

    def measured(self) -> MeasuredAttention:
        """The terms of all heads, and the problem that paths have with this attention."""
        terms, is_mixed = self._terms()
        cut = list(self.homogeneity.cut)
        for product in self.normed:
            cut += [p for f in (product.q, product.k) for p in recorded_in(f.tensor, self.projections)]
        return MeasuredAttention(self.attention.module, self._problem(is_mixed), terms, cut, self.homogeneity.bounded)

    def _problem(self, is_mixed: bool) -> str:
        found = self.homogeneity
        if not found.is_finite:
            return NOT_FINITE
        if found.is_unreached or any(p.is_sparse(at) for p in found.on_paths for at in found.leaf_gradients[p]):
            return SPARSE
        if is_mixed:
            return MIXED
        direct = [p for p in recorded_in(self.logits, self.projections) if p.output is not None]
        if self.attention.nested or any(p in direct for f in self.cotangents for p in found.contributing[f]):
            return OTHER_WAYS
        return NOT_LINEAR if found.is_disproportionate or self.grows else ""

    def _normed(self) -> list[Product]:
        """The products whose scale, alone or all together, does not change the logits, because a norm follows them."""
        leaves = [product.leaf for product in self.products]
        of_products, of_bounds = [], []
        for product, at in zip(self.products, gradients(self.logits, leaves, self._noise(self.logits)), strict=True):
            assert at is not None
            self.homogeneity.is_finite &= bool(at.isfinite().all())
            self.homogeneity.sizes[product.number, "logits", -1] = at.abs().float().mean()
            of_products.append(sums(at * product.leaf.detach()))
            of_bounds.append(1e-4 * at.flatten(1).norm(dim=1) * product.leaf.detach().norm())
        if self.logits.dtype in (torch.float16, torch.bfloat16):
            return []  # rounding errors exceed the bounds
        shares, bounds = torch.stack(of_products), torch.stack(of_bounds)
        together = bool((shares.sum(0).abs() <= bounds.sum(0)).all())
        alone = (shares.abs() <= bounds).all(1).tolist()
        return [product for product, is_normed in zip(self.products, alone, strict=True) if together or is_normed]

    def _is_curved(self) -> bool:
        """Whether the logits are not linear in the products: capped, or multiplied by a projection."""
        leaves = [product.leaf for product in self.products]
        at = torch.autograd.grad(self.logits, leaves, self._noise(self.logits)[0], create_graph=True)
        leaves += [p.leaf for p in recorded_in(self.logits, self.projections) if p.output is not None]
        return any(any(depends(each, leaves)) for each in at)

    def _terms(self) -> tuple[list[tuple[Chain, Chain]], bool]:
        """The distinct pairs of chains that make the query and the key, of all heads; and whether heads are mixed."""
        found: dict[tuple[Chain, Chain], None] = {}
        heads: dict[Product, Heads] = {}
        for product in self.products:
            axes = self._head_axes(product)
            sizes = [size if axis in axes else 1 for axis, size in enumerate(product.output.shape)]
            numbers: dict[tuple[frozenset[Rows], ...], int] = {}  # of heads: the entries that are made of the same rows
            head_of_entry = []
            for some in batches(torch.ones(sizes, device=self.logits.device).nonzero(), product.leaf):
                for terms in self._terms_at(product, axes, some):
                    if product not in self.normed:
                        found |= dict.fromkeys(terms)
                    nearest = [
                        [chain[0] for chain in side if chain and chain[0].projection.output is not None]
                        for side in zip(*terms, strict=True)
                    ]
                    head_of_entry.append(numbers.setdefault(tuple(map(frozenset, nearest)), len(numbers)))
            head_of = torch.tensor(head_of_entry, device=self.logits.device).view(sizes)
            heads[product] = head_of, [frozenset().union(*rows) for rows in numbers]
        is_mixed = not self.attention.fused and are_mixed(self.logits, heads, self.generator)
        return list(found), is_mixed

    def _head_axes(self, product: Product) -> list[int]:
        """The axes of a product along which the first and the last entry are made of different rows of a projection."""
        sizes = product.output.shape
        axes = [axis for axis, size in enumerate(sizes) if size > 1]
        if not axes:
            return []
        ends = torch.tensor([[0] * len(sizes), [size - 1 for size in sizes]], device=self.logits.device)
        found: set[int] = set()
        for factor in (product.q, product.k):
            cotangents = torch.cat([self._at(factor, [axis], ends) for axis in axes])
            for projection, at in self._at_projections(factor, cotangents):
                if projection.output is not None:  # different keys may read different rows of learned tensors
                    rows = projection.rows_with(at)
                    of_ends = zip(axes, rows[::2], rows[1::2], strict=True)
                    found |= {axis for axis, first, last in of_ends if first and last and first != last}
        return sorted(found)

    def _noise(self, like: Tensor) -> Tensor:
        """Random cotangents for a tensor, in several directions."""
        shape = (PASSES, *like.shape)
        return torch.randn(shape, generator=self.generator, device=like.device, dtype=like.dtype)

    def _at(self, factor: Factor, axes: Sequence[int], indices: Tensor) -> Tensor:
        """For each index of a product, a random cotangent for what its factor has at this index of some axes."""
        at = self.cotangents[factor][0].expand(len(indices), *factor.tensor.shape)
        for axis, own in factor.axes:
            size = factor.tensor.shape[own]
            if axis in axes and size > 1:
                at = at * _along(own, indices[:, axis, None] == torch.arange(size, device=at.device), factor)
        return at

    def _at_projections(self, factor: Factor, cotangents: Tensor) -> list[tuple[Projection, Tensor]]:
        """The gradients at each contributing projection."""
        found = self.homogeneity.contributing[factor]
        each = gradients(factor.tensor, [p.leaf for p in found], cotangents)
        return [(projection, at) for projection, at in zip(found, each, strict=True) if at is not None]

    def _entries_of(self, factor: Factor) -> dict[Projection | None, Tensor]:
        """The entries along the summed axis that each projection makes; all of them if there is one projection."""
        contributing = self.homogeneity.contributing
        found, size = contributing[factor], factor.tensor.shape[factor.axis]
        if not found or all(len(contributing[other]) <= 1 for other in self.cotangents):
            return {(found[0] if found else None): torch.ones(size, dtype=torch.bool)}  # None: normed, or of no weight
        entries: dict[Projection | None, Tensor] = {p: torch.zeros(size, dtype=torch.bool) for p in found}
        each = torch.eye(size, dtype=torch.bool, device=factor.tensor.device)
        for some in batches(each, factor.tensor):
            cotangents = self.cotangents[factor][0] * _along(factor.axis, some, factor)
            for projection, at in self._at_projections(factor, cotangents):
                entries[projection] |= some[at.flatten(1).any(1)].any(0).cpu()
        return entries

    def _terms_at(self, product: Product, axes: Sequence[int], indices: Tensor) -> list[list[tuple[Chain, Chain]]]:
        """For each head, the pairs of chains that begin with projections that share entries of the summed axis."""
        q, k = product.q, product.k
        at_q, at_k = self._at(q, axes, indices), self._at(k, axes, indices)
        terms: list[list[tuple[Chain, Chain]]] = [[] for _ in indices]
        for (one, q_entries), (other, k_entries) in pairs(self.entries[q].items(), self.entries[k].items()):
            both = q_entries & k_entries
            if both.any() and (one is not None or other is not None):
                chains = self._chains(q, at_q, one, both), self._chains(k, at_k, other, both)
                for of_head, of_q, of_k in zip(terms, *chains, strict=True):
                    of_head += pairs(of_q, of_k)
        return terms

    def _chains(self, factor: Factor, at: Tensor, first: Projection | None, entries: Tensor) -> list[list[Chain]]:
        """For each head, the chains that begin with a projection, through these entries of the query or key only."""
        if first is None:
            return [[()] for _ in at]
        only = _along(factor.axis, entries[None].to(at.device), factor)
        (at_first,) = gradients(factor.tensor, [first.leaf], at * only)
        return self._continued(first, at_first) if at_first is not None else [[] for _ in at]

    def _continued(self, projection: Projection, at: Tensor) -> list[list[Chain]]:
        """For each head, the chains from a projection to earlier ones; also it alone, if it has other inputs."""
        earlier = self.homogeneity.contributing.get(projection, [])
        before = gradients(projection.output, [p.leaf for p in earlier], at) if projection.output is not None else ()
        longer = [self._continued(p, each) for p, each in zip(earlier, before, strict=True) if each is not None]
        found: list[list[Chain]] = []
        for head, rows in enumerate(projection.rows_with(at)):
            rest = [chain for chains in longer for chain in chains[head]]
            alone: list[Chain] = [()] if not rest or projection in self.homogeneity.partial else []
            found.append([(rows, *chain) for chain in (*alone, *rest)] if rows else [])
        return found


def _along(axis: int, masks: Tensor, factor: Factor) -> Tensor:
    """Masks of the entries along one axis of a factor, in a shape that broadcasts to several such factors."""
    return masks.view(-1, *(masks.shape[1] if each == axis else 1 for each in range(factor.tensor.ndim)))
