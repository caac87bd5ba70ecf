"""Records of a forward pass: projections, products of two activations, and attentions.

The output of each projection and product is replaced by a new leaf of the autograd graph. So the graph of a record's
output ends at the leaves of earlier records, and is short.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from quacklr.util.autograd import leaves_of

DEPTH = 4  # records between logits and the products that they are computed from
Axes = tuple[tuple[int, int], ...]
THRESHOLD = 1e-6  # relative to the largest gradient of a row: smaller ones are rounding


@dataclass(slots=True, eq=False)
class Projection:
    """The product of an activation and a weight; or a learned tensor that is used like an activation."""

    leaf: Tensor  # replaces the output
    output: Tensor | None  # as computed. A learned tensor has no output and no input
    input: Tensor | None
    weight: Tensor
    bias: Tensor | None
    rows: Axes  # (axis of the output, axis of the weight) for all axes that both have
    calls: tuple[int, ...]  # numbers of the module calls that were running, outermost first
    number: int  # position among projections and products and learned tensors in the order they ran
    key: tuple[int, str]  # the number, "output"

    def per_row(self, gradients: Tensor, reduce: Callable[..., Tensor]) -> Tensor:
        """The sizes of several gradients, along the first axis, reduced over all axes but those of the rows."""
        kept = [0, *(axis + 1 for axis, _ in self.rows)]
        others = [axis for axis in range(gradients.ndim) if axis not in kept]
        sizes = gradients.detach().abs()
        return reduce(sizes, others) if others else sizes

    def rows_with(self, gradients: Tensor) -> list[Rows | None]:
        """For each of several gradients, the rows whose output has one; None if no row has."""
        largest = self.per_row(gradients, Tensor.amax)
        nonzero = largest > THRESHOLD * largest.flatten(1).amax(1).view(-1, *[1] * (largest.ndim - 1))
        in_output = [axis for _, axis in sorted(self.rows)]
        shape = [size if axis in in_output else 1 for axis, size in enumerate(self.weight.shape)]
        masks = nonzero.permute(0, *(in_output.index(axis) + 1 for axis in sorted(in_output))).reshape(-1, *shape).cpu()
        return [Rows((id(self.weight), mask_key(mask)), self, mask) if mask.any() else None for mask in masks]

    def is_sparse(self, gradients: Tensor) -> bool:
        """Whether single entries have no gradient, as after a ReLU. Whole rows of it may have none by chance."""
        if len(self.rows) != 1 or self.output is None:
            return False
        # an entry counts if it has a gradient in one direction: in some, 16-bit rounding may cancel it
        by_row = (gradients != 0).any(0).movedim(self.rows[0][0], 0).flatten(1)
        rows, tokens = by_row.any(1), by_row.any(0)
        one_token = bool(tokens.sum() == 1 < len(tokens))  # the other tokens may have none by chance
        return one_token or not bool(by_row[rows][:, tokens].all())


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of a projection. The key is equal for the same rows of the same weight."""

    key: tuple[int, bytes]
    projection: Projection = field(compare=False)
    mask: Tensor = field(compare=False)  # in the shape of the weight, with size 1 along the axes that it sums over


@dataclass(frozen=True, slots=True, eq=False)
class Factor:
    """A factor of a product: the queries or the keys."""

    key: tuple[int, str]  # the number of the product, "q" or "k"
    tensor: Tensor
    axis: int  # the product sums over it
    axes: Axes  # (axis of the product, axis of the factor) for all axes that both have


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """The product of two activations, summed over one axis of each."""

    leaf: Tensor
    output: Tensor
    q: Factor
    k: Factor
    calls: tuple[int, ...]
    number: int

    def is_near(self, logits: Tensor, calls: tuple[int, ...]) -> bool:
        """Whether logits, made while these calls run, may be computed from the product by a projection."""
        if self.calls == calls:  # the axes of queries and keys
            return set(logits.shape[-2:]) <= set(self.output.shape)
        is_around = all(one == other for one, other in zip(self.calls, calls, strict=False))
        return is_around and sorted(logits.shape) == sorted(self.output.shape)


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    """The input of a softmax over keys, and the products that it is computed from."""

    logits: Tensor
    products: list[Product]
    module: str  # the innermost running module in which a query or a key was projected
    call: int  # number of the call of that module
    fused: bool  # whether the logits are the product itself
    nested: bool = False  # whether a query or a key is itself computed from a product of two activations


R = TypeVar("R", Projection, Product)


def recorded_in(tensor: Tensor, records: Mapping[int, R]) -> list[R]:
    """The records, by id of their leaf, that a tensor is computed from."""
    return [records[leaf] for leaf in map(id, leaves_of(tensor)) if leaf in records]


def mask_key(mask: Tensor) -> bytes:
    """Equal for equal masks."""
    return bytes(mask.flatten().tolist())


def products_behind(
    logits: Tensor, records: Mapping[int, Projection | Product], call: int, own: Product | None
) -> tuple[list[Product], set[int]]:
    """The products that logits are computed from, in one call of a module and at most DEPTH records back.

    Also the numbers of the records that lie between the logits and these products. The first product is `own`, if any.
    """
    products = [] if own is None else [own]
    between: set[int] = set()
    visited = {id(product.leaf): True for product in products}

    def search(tensor: Tensor, depth: int) -> bool:
        """Whether the tensor is computed from products. All its leaves are visited."""
        found = False
        for leaf in map(id, leaves_of(tensor)):
            record = records.get(leaf)
            if record is None or record.output is None or (depth and call not in record.calls):
                continue
            if leaf not in visited:
                visited[leaf] = False
                if depth < DEPTH and search(record.output, depth + 1):
                    between.add(record.number)
                    visited[leaf] = True
                elif isinstance(record, Product):
                    products.append(record)
                    visited[leaf] = True
            found |= visited[leaf]
        return found

    return (products, between) if search(logits, 0) else ([], set())
