"""What a layer remembers of the positions that it has read, so that the next one costs one position's work.

Shapes: B batch, G head, S position so far, T new position, X numbers of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class Cache:
    """Named tensors of one layer, made once for all the positions that there may be, and filled from the left.

    `room` says how many heads each has, and how many numbers a head has of a position.
    """

    def __init__(self, room: Mapping[str, tuple[int, int]], batch: int, positions: int, **kind: Any) -> None:
        self._kept = {name: torch.empty(batch, heads, positions, x, **kind) for name, (heads, x) in room.items()}
        self.positions, self.length = positions, 0

    def add(self, **new_BGTX: Tensor) -> list[Tensor]:
        """Remember new positions; what is remembered of all of them, in the order of the arguments."""
        start, end = self.length, self.length + next(iter(new_BGTX.values())).shape[2]
        if end > self.positions:
            raise ValueError(f"a cache with room for {self.positions} positions cannot remember {end}")
        for name, tensor_BGTX in new_BGTX.items():
            self._kept[name][:, :, start:end] = tensor_BGTX
        self.length = end
        return [self._kept[name][:, :, :end] for name in new_BGTX]

    @property
    def bytes_per_position(self) -> float:
        """How much memory a position of one sequence takes."""
        return sum(kept.nbytes / (kept.shape[0] * kept.shape[2]) for kept in self._kept.values())
