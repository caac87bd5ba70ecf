"""What a tape records of a forward, and how it is asked: short graphs between leaves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from quacklr.util.autograd import leaves_of


@dataclass(slots=True, eq=False)
class Projection:
    """An activation times a weight. `rows`: which axis of the output is which axis of the weight."""

    leaf: Tensor  # stands for the output
    output: Tensor | None  # the real one, with its graph back to earlier leaves; None: a learned tensor by itself
    input: Tensor | None
    weight: Tensor
    bias: Tensor | None
    rows: tuple[tuple[int, int], ...]
    calls: tuple[int, ...]  # of modules that were running, outermost first
    number: int  # of projections and products, in the order they ran; -1 of a learned tensor by itself


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """A factor of a product, queries or keys, and its axis that is summed over."""

    tensor: Tensor
    axis: int


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """The product of two activations, summed over one axis of each."""

    leaf: Tensor
    output: Tensor
    q: Side
    k: Side
    calls: tuple[int, ...]
    number: int


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    """What goes into a softmax over keys, and the products it is made of."""

    logits: Tensor
    products: list[Product]
    module: str  # the innermost one that was running and made a query or a key
    call: int  # of that module
    fused: bool  # the logits are the product itself


class MadeOf:
    """The products that a tensor is made of, and the numbers of projections and products in between.

    Looked for is what was made in one call of a module, no more than DEPTH projections back.
    """

    DEPTH = 4

    def __init__(self, call: int, projections: Mapping[int, Projection], products: Mapping[int, Product]) -> None:
        self.call, self.known = call, (projections, products)
        self.products: list[Product] = []
        self.between: set[int] = set()
        self.seen: dict[int, bool] = {}

    def search(self, tensor: Tensor, depth: int = 0) -> bool:
        """Whether it is made of products."""
        found = [self._is_product(leaf, depth) for leaf in map(id, leaves_of(tensor))]  # all are visited
        return any(found)

    def _is_product(self, leaf: int, depth: int) -> bool:
        """Whether a leaf stands for a product, or for something that is made of products."""
        projections, products = self.known
        node = products.get(leaf) or projections.get(leaf)
        if node is None or node.output is None or (depth and self.call not in node.calls):
            return False
        if leaf not in self.seen:
            self.seen[leaf] = False
            behind = depth < self.DEPTH and self.search(node.output, depth + 1)
            if behind:
                self.between.add(node.number)
            elif isinstance(node, Product):
                self.products.append(node)
            self.seen[leaf] = behind or isinstance(node, Product)
        return self.seen[leaf]
