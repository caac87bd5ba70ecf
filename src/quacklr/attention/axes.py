"""The leading axes of attention logits: which of them are heads; all others are sequences.

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

from torch import Tensor


@dataclass(frozen=True, slots=True)
class HeadAxes:
    """The leading axes that are heads, and their number. Without axes, the last leading axis is (sequences * heads).

    `known`: False if the shape does not show it. Then every entry is arranged as a head of one sequence.
    """

    heads: int
    axes: tuple[int, ...] = ()
    known: bool = True

    def arrange(self, tensor: Tensor, shape: Sequence[int]) -> Tensor:
        """Rearrange a tensor that broadcasts to this shape, (..., I, X), to (B, H, I, X)."""
        others = [axis for axis in range(len(shape) - 2) if axis not in self.axes]
        arranged = tensor.expand(*shape).permute(*others, *self.axes, -2, -1)
        return arranged.reshape(-1, self.heads, *shape[-2:])


def last_axis(lead: Sequence[int], heads: int | None = None) -> HeadAxes:
    """The last leading axis is the heads, or (sequences * heads): for functions of torch that define it."""
    separate = heads is None or lead[-1] == heads
    return HeadAxes(lead[-1] if heads is None else heads, (len(lead) - 1,) if separate else ())


def head_axes(lead: Sequence[int], heads: int | None, one_sequence: bool = False) -> HeadAxes:
    """The axes of the heads, from the shape of logits, the number of heads if it is known, and the number of sequences.

    Successive axes are the heads if their sizes multiply to the number of heads, if no others do, and if they are the
    last ones; of one sequence, they need not be the last. Of one sequence, a single axis is the heads.
    """
    count, axes = math.prod(lead), [axis for axis, size in enumerate(lead) if size > 1]
    heads = None if heads is None or count % heads else heads
    all_heads = heads == count and (one_sequence or len(axes) == 1)
    if all_heads or count == 1 or (heads is None and one_sequence and len(axes) == 1):
        return HeadAxes(count, (1,) if len(lead) == 2 and lead[0] == 1 else tuple(range(len(lead))))
    if heads == 1:
        return HeadAxes(1)
    runs = [axes[i:j] for j in range(len(axes) + 1) for i in range(j) if math.prod(lead[a] for a in axes[i:j]) == heads]
    last = len(runs) == 1 and runs[0][-1] == axes[-1] and len(runs[0]) < len(axes)
    if heads and len(runs) == 1 and (one_sequence or last):
        return HeadAxes(heads, tuple(runs[0]))
    return HeadAxes(count, tuple(range(len(lead))), known=False)


def conventional_axes(lead: Sequence[int], heads: int | None) -> HeadAxes:
    """The same for batches of any size: two leading axes are (B, H) by convention, also if B is H."""
    return last_axis(lead) if len(lead) == 2 else head_axes(lead, heads)
