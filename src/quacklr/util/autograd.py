"""Gradients that keep the graph, and the leaves of a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def gradients(of: Tensor, at: Sequence[Tensor], cotangent: Tensor) -> Sequence[Tensor | None]:
    """torch.autograd.grad of one tensor, keeping the graph; None for tensors that it does not depend on."""
    return torch.autograd.grad(of, at, cotangent, retain_graph=True, allow_unused=True) if at else ()


def total_of(tensor: Tensor) -> float:
    """The sum of all entries, in float32 at least. Not in float64, which some devices do not have."""
    return float(tensor.sum(dtype=torch.promote_types(tensor.dtype, torch.float32)))


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
