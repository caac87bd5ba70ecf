"""The logits of one attention, computed in chunks, so that a long context never needs all of them in memory.

    QKLogits      computed again from queries and keys, because a fused kernel does not return them
    EagerLogits   the input of a softmax that the model itself calls

`HeadAxes` tells which of the leading axes are heads; all others are sequences:

    (B, H, I, J)                  the convention
    (B * H, I, J), (H * B, I, J)  sequences and heads merged into one axis; the shapes are the same
    (B, G, R, I, J)               G groups of R heads
    (H, B, I, J)                  the same shape as the convention, if B is H

Shapes: B sequence, H head, G key head (shared by a group of heads), I query, J key, D head dimension.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

CHUNK = 2**20  # logits in a chunk: 4 MB, which fits into a CPU's cache
MASKED = -1e38  # below every logit that is not masked
MASKING = -9e3  # a number this low, added to a logit or written in its place, is a mask, not a bias


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
    """The axes of the heads, from the leading sizes of logits, and the numbers of heads and of sequences if known.

    Successive axes are the heads if their sizes multiply to the number of heads, if no others do, and if they are the
    last ones; of one sequence, they need not be the last. A single axis of one sequence is the heads.
    """
    count, axes = math.prod(lead), [axis for axis, size in enumerate(lead) if size > 1]
    if heads is None or count % heads:  # not known, or that of another attention
        heads = count if count == 1 or (one_sequence and len(axes) == 1) else None
    if heads == 1:
        return HeadAxes(1)
    runs = [axes[i:j] for j in range(len(axes) + 1) for i in range(j) if math.prod(lead[a] for a in axes[i:j]) == heads]
    if heads and len(runs) == 1:
        are_last = runs[0][-1] == axes[-1] and runs[0] != axes
        if one_sequence or len(axes) == 1 or are_last:
            return HeadAxes(heads, tuple(runs[0]))
    return HeadAxes(count, tuple(range(len(lead))), known=False)


@dataclass(frozen=True, eq=False)
class Logits(ABC):
    """The input of the softmax of one attention. `source` is (B, H, I, ...): the queries, or the logits themselves.

    `keys` is the number of keys. `heads_known`: False if the shape does not show which entries belong to which head;
    then (1, all entries, I, ...).
    """

    source: Tensor
    keys: int
    heads_known: bool = field(default=True, kw_only=True)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, I, J): the numbers of sequences, heads, queries and keys."""
        batch, heads, queries = self.source.shape[:3]
        return batch, heads, queries, self.keys

    @abstractmethod
    def chunk(self, sequences: slice, queries: slice) -> Tensor:
        """(B, H, I, columns) logits in float32, below MASKED where masked; the caller must not write into them.

        The columns are the keys and then others, such as learned sinks. The last keys are left out if they are masked
        for all of these queries.
        """

    def chunks(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """All chunks in order: (sequences, queries, logits)."""
        batch, heads, length, keys = self.shape
        queries = min(length, max(1, CHUNK // (heads * keys)))
        sequences = max(1, CHUNK // (heads * keys * queries)) if queries == length else 1
        for b in range(0, batch, sequences):
            for i in range(0, length, queries):
                part = slice(b, min(b + sequences, batch)), slice(i, min(i + queries, length))
                yield *part, self.chunk(*part)


@dataclass(frozen=True, eq=False)
class QKLogits(Logits):
    """Logits computed from queries (`source`) and keys, as a fused kernel computes them.

    `offset`: query i sees the keys up to i + offset; None if it sees all. `mask_BHIJ`: the kernel's own mask, boolean
    (True where visible) or additive. `score_mod` changes the logits of a chunk, from its first sequence and query.
    """

    k_BGJD: Tensor
    factor: float
    offset: int | None = None
    mask_BHIJ: Tensor | None = None
    score_mod: Callable[[Tensor, int, int], Tensor] | None = None

    def chunk(self, sequences: slice, queries: slice) -> Tensor:
        """The logits of a chunk, computed at each call."""
        width = self.keys if self.offset is None else min(self.keys, max(1, queries.stop + self.offset))
        q_BHID = self.source[sequences, :, queries].float() * self.factor
        k_BGJD = self.k_BGJD[sequences, :, :width].float()
        q_BGID = q_BHID.reshape(*k_BGJD.shape[:2], -1, q_BHID.shape[-1])  # the queries of a group in one axis
        logit_BHIJ = (q_BGID @ k_BGJD.mT).view(*q_BHID.shape[:3], width)
        if self.score_mod is not None:
            logit_BHIJ = self.score_mod(logit_BHIJ, sequences.start, queries.start)
        if self.mask_BHIJ is not None:
            mask_BHIJ = self.mask_BHIJ[sequences, :, queries, :width]
            is_bias = mask_BHIJ.dtype != torch.bool
            logit_BHIJ = logit_BHIJ + mask_BHIJ if is_bias else logit_BHIJ
            logit_BHIJ = logit_BHIJ.where(mask_BHIJ > MASKING if is_bias else mask_BHIJ, -torch.inf)
        if self.offset is not None:
            future_IJ = torch.ones(logit_BHIJ.shape[2:], dtype=torch.bool, device=logit_BHIJ.device)
            logit_BHIJ.masked_fill_(future_IJ.triu_(queries.start + self.offset + 1), -torch.inf)
        return logit_BHIJ


@dataclass(frozen=True, eq=False)
class EagerLogits(Logits):
    """Logits (`source`) that the model computed itself.

    `masked_BHIJ` is True where the model is known to have masked a logit. A value near the lowest one of the dtype is
    masked too. `subtracted_BHIJ`: what the model subtracted before the softmax, such as the largest logit of the row.
    """

    masked_BHIJ: Tensor | None = None
    subtracted_BHIJ: Tensor | None = None

    def chunk(self, sequences: slice, queries: slice) -> Tensor:
        """The model's values, with what it subtracted, and with -inf for its masks."""
        logit_BHIJ = self.source[sequences, :, queries].float()
        lowest = torch.finfo(self.source.dtype).min / 2
        if lowest > MASKED:  # float16
            logit_BHIJ = logit_BHIJ.where(logit_BHIJ > lowest, -torch.inf)
        if self.subtracted_BHIJ is not None:
            logit_BHIJ = logit_BHIJ + self.subtracted_BHIJ[sequences, :, queries]
        if self.masked_BHIJ is not None:
            logit_BHIJ = logit_BHIJ.masked_fill(self.masked_BHIJ[sequences, :, queries], -torch.inf)
        return logit_BHIJ
