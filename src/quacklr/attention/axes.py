"""The leading axes of attention logits: which entries belong to which sequence and head.

    (B, H, I, J)                  the convention
    (B * H, I, J), (H * B, I, J)  sequences and heads merged into one axis; the shapes are the same
    (B, G, R, I, J)               G * R heads
    (H, B, I, J)                  the same shape as the convention, if B is H

Shapes: B sequence, H head, G group of R heads, I query, J key, X key or head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class HeadOrder:
    """The order of sequences and heads in the leading axes of attention logits.

    `heads`: the number of heads, None if unknown. `heads_first`: all leading axes, flattened, are (heads * sequences).
    `index_BH`: for any other order that was measured, the index of each sequence and head in the flattened axes.
    Without either, the convention is used: see `arrange`.
    """

    heads: int | None = None
    heads_first: bool = False
    index_BH: Tensor | None = None

    @classmethod
    def from_index(cls, index_BH: Tensor, lead: Sequence[int]) -> Self:
        """The simplest order of these leading axes that agrees with an index."""
        heads, entries = index_BH.shape[1], torch.arange(index_BH.numel()).view(*lead, 1, 1)
        for order in (cls(heads), cls(heads, heads_first=True)):
            if torch.equal(order.arrange(entries)[..., 0, 0], index_BH):
                return order
        return cls(heads, index_BH=index_BH)

    @property
    def is_convention(self) -> bool:
        """Whether the order was not measured, or agrees with the convention."""
        return not self.heads_first and self.index_BH is None

    def arrange(self, tensor: Tensor) -> Tensor:
        """Rearrange (..., I, X) to (B, H, I, X).

        By convention, the last leading axes whose sizes multiply to the number of heads are the heads; a single
        leading axis is (B * H). If that does not fit, the last axis of that size is the heads; if the number of heads
        is unknown or does not fit at all, the axis before the queries is.
        """
        heads, lead = self.heads, tensor.shape[:-2]
        if self.index_BH is not None:
            return tensor.flatten(0, -3)[self.index_BH.to(tensor.device)]
        if self.heads_first and heads:
            return tensor.flatten(0, -3).unflatten(0, (heads, -1)).transpose(0, 1)
        for start in range(len(lead)):
            if heads == math.prod(lead[start:]):
                return tensor.reshape(-1, heads, *tensor.shape[-2:])
        if heads and len(lead) == 1 and lead[0] % heads == 0:
            return tensor.unflatten(0, (-1, heads))
        if len(lead) > 2 and heads in lead:
            return tensor.movedim(len(lead) - 1 - lead[::-1].index(heads), -3).flatten(0, -4)
        return tensor.reshape(-1, *tensor.shape[-3:])

    def arrange_mask(self, mask: Tensor, lead: Sequence[int]) -> Tensor:
        """Rearrange a mask that broadcasts to (*lead, I, J) to one that broadcasts to (B, H, I, J)."""
        if math.prod(mask.shape[:-2]) == 1:
            return mask.reshape(1, 1, *mask[(None,) * (2 - mask.ndim)].shape[-2:])
        if self.is_convention and len(lead) == 2 and (lead[0] == 1 or self.heads != lead[0] * lead[1]):
            return mask[(None,) * (4 - mask.ndim)]
        return self.arrange(mask.expand(*lead, *mask.shape[-2:]))


def is_ambiguous(lead: Sequence[int], heads: int | None, queries: int) -> bool:
    """Whether the shape of logits does not determine which of their leading axes are the heads.

    It does if the last axes, and no others, have as many entries as there are heads; and in (B, I, H, J).
    """
    count = math.prod(lead)
    if count == 1 or heads is None:
        return count > 1
    if len(lead) == 1:
        return heads not in (1, count)
    if count % heads or (len(lead) == 2 and lead[1] != heads == queries and lead[0] != heads):
        return False
    if heads == 1:
        return lead[-1] != 1
    axes = [size for size in lead if size > 1]
    runs = [(i, j) for i in range(len(axes)) for j in range(i + 1, len(axes) + 1) if math.prod(axes[i:j]) == heads]
    return len(runs) != 1 or runs[0][1] != len(axes) or (runs[0][0] == 0 and len(axes) > 1)
