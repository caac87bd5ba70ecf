"""What a tape records of a forward, and how it is asked: short graphs between leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


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


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    """What goes into a softmax over keys, and the products it is made of."""

    logits: Tensor
    products: list[Product]
    modules: tuple[str, ...]  # that were running, outermost first
    calls: tuple[int, ...]


def gradients(of: Tensor, at: Sequence[Tensor], cotangent: Tensor) -> Sequence[Tensor | None]:
    """torch.autograd.grad of one tensor, which can be asked again; None where it does not depend on a tensor."""
    return torch.autograd.grad(of, at, cotangent, retain_graph=True, allow_unused=True) if at else ()


def leaves_of(tensor: Tensor) -> list[Tensor]:
    """The leaves that a tensor was computed from, as autograd knows them."""
    leaves: list[Tensor] = []
    seen: set[Any] = set()
    waiting: list[Any] = [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        waiting += [following for following, _ in node.next_functions]
    return leaves
