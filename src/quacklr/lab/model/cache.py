"""The key-value (or latent) cache of one attention layer, for decoding token by token.

Shapes: B batch, G head, S position so far, T new position, X elements per head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class Cache:
    """Named tensors of one layer, allocated once for the maximum number of positions.

    `layout` gives for each tensor the number of heads, and the elements per head and position. `options` are those of
    `torch.empty`.
    """

    def __init__(self, layout: Mapping[str, tuple[int, int]], batch: int, positions: int, **options: Any) -> None:
        self._tensors = {
            name: torch.empty(batch, heads, positions, x, **options) for name, (heads, x) in layout.items()
        }
        self.positions, self.length = positions, 0

    def append(self, **new_BGTX: Tensor) -> list[Tensor]:
        """Append new positions, and return the tensors of all positions so far, in the order of the arguments."""
        start, end = self.length, self.length + next(iter(new_BGTX.values())).shape[2]
        if end > self.positions:
            raise ValueError(f"a cache with room for {self.positions} positions cannot hold {end}")
        for name, tensor_BGTX in new_BGTX.items():
            self._tensors[name][:, :, start:end] = tensor_BGTX
        self.length = end
        return [self._tensors[name][:, :, :end] for name in new_BGTX]

    @property
    def bytes_per_position(self) -> float:
        """Memory of one position of one sequence."""
        return sum(tensor.nbytes / (tensor.shape[0] * tensor.shape[2]) for tensor in self._tensors.values())
