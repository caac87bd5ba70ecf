"""Gradients that keep the graph, many at a time, and the leaves of a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

MOST = 2**24  # entries of all cotangents of one call


def gradients(of: Tensor, at: Sequence[Tensor], cotangents: Tensor) -> Sequence[Tensor | None]:
    """The gradients for each cotangent, along a new first axis; None for tensors that `of` does not depend on.

    All cotangents go through the graph at once, or one after another if an operation cannot be vectorized.
    """
    if not at:
        return ()
    try:
        return torch.autograd.grad(of, at, cotangents, retain_graph=True, allow_unused=True, is_grads_batched=True)
    except RuntimeError:
        each = [torch.autograd.grad(of, at, one, retain_graph=True, allow_unused=True) for one in cotangents]
        return [None if found[0] is None else torch.stack(found) for found in zip(*each, strict=True)]


def depends(gradient: Tensor, on: Sequence[Tensor]) -> list[bool]:
    """Whether a gradient, whose graph was kept, depends on each tensor."""
    if not gradient.requires_grad:
        return [False for _ in on]
    again = gradients(gradient, on, torch.randn_like(gradient)[None])
    return [each is not None and bool(each.any()) for each in again]


def batches(of: Tensor, like: Tensor) -> Sequence[Tensor]:
    """The rows of a tensor in batches, so small that one cotangent like `like` for each row fits into memory."""
    return of.split(max(1, MOST // max(1, like.numel())))


def sums(tensor: Tensor) -> Tensor:
    """The sum for each entry of the first axis, in float32 at least. Not in float64, which some devices do not have."""
    return tensor.flatten(1).sum(1, dtype=torch.promote_types(tensor.dtype, torch.float32))


def leaves_of(tensor: Tensor) -> list[Tensor]:
    """The leaves of the autograd graph that a tensor was computed from."""
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
