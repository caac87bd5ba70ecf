"""The logits of one attention, computed in chunks, so that a long context never needs all of them in memory.

    QKLogits      computed again from queries and keys, because a fused kernel does not return them
    EagerLogits   the input of a softmax that the model itself calls

Shapes: B sequence, H head, G key head (shared by a group of heads), I query, J key, D head dimension. A mask that is
the same for all heads has H = 1.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 2**20  # logits in a chunk: 4 MB, which fits into a CPU's cache
MASKED = -1e38  # below every logit that is not masked
MASKING = -9e3  # a number this low, added to a logit or written in its place, is a mask, not a bias

ScoreMod = Callable[[Tensor, int, int], Tensor]  # (logits of a chunk, its first sequence, its first query) -> logits


@dataclass(frozen=True, eq=False)
class Logits(ABC):
    """The input of the softmax of one attention. `source` is (B, H, I, ...): the queries, or the logits themselves.

    `extra`: number of columns of the softmax after the keys, such as learned sinks. `heads_known`: False if the shape
    does not show which entries belong to which head; then (1, all entries, I, ...).
    """

    source: Tensor
    extra: int = field(default=0, kw_only=True)
    heads_known: bool = field(default=True, kw_only=True)

    @property
    @abstractmethod
    def keys(self) -> int:
        """Number of keys."""

    @property
    @abstractmethod
    def scale(self) -> float:
        """Largest factor between q . k and the logit, without caps and biases."""

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return self.source.shape[0]

    @property
    def heads(self) -> int:
        """Number of heads."""
        return self.source.shape[1]

    @property
    def queries(self) -> int:
        """Number of queries."""
        return self.source.shape[2]

    @property
    def device(self) -> torch.device:
        """Device of the logits."""
        return self.source.device

    @abstractmethod
    def chunk(self, sequences: slice, queries: slice) -> Tensor:
        """(B, H, I, columns) logits in float32, below MASKED where masked; the caller must not write into them.

        The columns are the keys and then the extra ones. The last keys are left out if they are masked for all of
        these queries.
        """

    @abstractmethod
    def visible(self, sequences: slice, queries: slice, chunk_BHIJ: Tensor) -> Tensor:
        """Boolean mask that broadcasts to a chunk: True where a logit is not masked."""

    def rows(self, queries: slice) -> Tensor:
        """The logits of some queries, in all sequences and with all columns; -inf where masked."""
        start, stop, _ = queries.indices(self.queries)
        logit_BHIJ = self.chunk(slice(0, self.batch), slice(start, stop))
        logit_BHIJ = logit_BHIJ.masked_fill(logit_BHIJ < MASKED, -torch.inf)
        return F.pad(logit_BHIJ, (0, self.keys + self.extra - logit_BHIJ.shape[-1]), value=-torch.inf)

    def chunks(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """All chunks in order: (sequences, queries, logits)."""
        row = self.heads * (self.keys + self.extra)
        queries = min(self.queries, max(1, CHUNK // row))
        sequences = max(1, CHUNK // (row * queries)) if queries == self.queries else 1
        for b in range(0, self.batch, sequences):
            for i in range(0, self.queries, queries):
                part = slice(b, min(b + sequences, self.batch)), slice(i, min(i + queries, self.queries))
                yield *part, self.chunk(*part)

    def max_per_head(self) -> Tensor:
        """(H,): the largest logit of each head."""
        maxima = [logit_BHIJ[..., : self.keys].amax((0, 2, 3)) for _, _, logit_BHIJ in self.chunks()]
        return torch.stack(maxima).amax(0)


@dataclass(frozen=True, eq=False)
class QKLogits(Logits):
    """Logits computed from queries (`source`) and keys, as a fused kernel computes them.

    `offset`: query i sees the keys up to i + offset; None if it sees all. `mask_BHIJ`: the kernel's own mask, boolean
    (True where visible) or additive. `score_mod`: flex attention's change of a logit.
    """

    k_BGJD: Tensor
    factor: float
    offset: int | None = None
    mask_BHIJ: Tensor | None = None
    score_mod: ScoreMod | None = None

    @property
    def keys(self) -> int:
        """Number of keys."""
        return self.k_BGJD.shape[2]

    @property
    def scale(self) -> float:
        """The scale of the kernel."""
        return abs(self.factor)

    @cached_property
    def _float_keys(self) -> Tensor:
        return self.k_BGJD.float()

    def chunk(self, sequences: slice, queries: slice) -> Tensor:
        """The logits of a chunk, computed at each call."""
        width = self.keys if self.offset is None else min(self.keys, max(1, queries.stop + self.offset))
        q_BHID = self.source[sequences, :, queries].float() * self.factor
        k_BGJD = self._float_keys[sequences, :, :width]
        batch, groups = k_BGJD.shape[:2]
        q_BGID = q_BHID.reshape(batch, groups, -1, q_BHID.shape[-1])  # the queries of a group in one axis
        logit_BHIJ = (q_BGID @ k_BGJD.mT).view(batch, self.heads, -1, width)
        if self.score_mod is not None:
            logit_BHIJ = self.score_mod(logit_BHIJ, sequences.start, queries.start)
        return self._mask(logit_BHIJ, sequences, queries)

    def visible(self, sequences: slice, queries: slice, chunk_BHIJ: Tensor) -> Tensor:
        """Computed from the masks; for flex attention, from the logits, which are -inf where masked."""
        if self.score_mod is not None:
            return chunk_BHIJ > -torch.inf
        return self._mask(torch.zeros(1, 1, *chunk_BHIJ.shape[2:], device=self.device), sequences, queries) > -torch.inf

    def _mask(self, logit_BHIJ: Tensor, sequences: slice, queries: slice) -> Tensor:
        if self.mask_BHIJ is not None:
            logit_BHIJ = logit_BHIJ + additive(slice_mask(self.mask_BHIJ, sequences, queries, logit_BHIJ.shape[-1]))
        if self.offset is not None:
            mask_future_(logit_BHIJ, queries.start + self.offset)
        return logit_BHIJ


@dataclass(frozen=True, eq=False)
class EagerLogits(Logits):
    """Logits (`source`) that the model computed itself.

    `masked_BHIJ` is True where the model is known to have masked a logit. `subtracted_BHIJ`: numbers that the model
    subtracted before the softmax, such as the largest logit of the row. `factors`: what q . k was multiplied by.
    """

    masked_BHIJ: Tensor | None = None
    subtracted_BHIJ: Tensor | None = None
    factors: Sequence[float | Tensor] = ()

    @property
    def keys(self) -> int:
        """Number of columns that are keys."""
        return self.source.shape[3] - self.extra

    @property
    def scale(self) -> float:
        """The product of all factors."""
        return math.prod(float(each.abs().max()) if isinstance(each, Tensor) else abs(each) for each in self.factors)

    @cached_property
    def _masked(self) -> tuple[Tensor | None, bool]:
        """The mask of the logits (None if none is masked), and whether all masked values are below MASKED.

        A value near the lowest one of the dtype is masked too. To save time, only the first head is compared with the
        known mask; if the known mask is incomplete there, all heads are.
        """
        lowest, known = torch.finfo(self.source.dtype).min / 2, self.masked_BHIJ
        if known is None and not self.source.amin() <= lowest:
            return None, True
        first_BHIJ = self.source[:, :1] <= lowest
        if known is not None and known.shape[1] == 1 and bool((known | ~first_BHIJ).all()):
            return known, lowest < MASKED and bool((first_BHIJ | ~known).all())
        low_BHIJ = self.source <= lowest
        return (low_BHIJ, lowest < MASKED) if known is None else (low_BHIJ | known, False)

    def chunk(self, sequences: slice, queries: slice) -> Tensor:
        """The model's values; the mask is added if the values alone do not show it."""
        logit_BHIJ = self.source[sequences, :, queries].float()
        if self.subtracted_BHIJ is not None:
            logit_BHIJ = logit_BHIJ + slice_mask(self.subtracted_BHIJ, sequences, queries)
        masked_BHIJ, is_shown = self._masked
        if masked_BHIJ is None or is_shown:
            return logit_BHIJ
        return logit_BHIJ + additive(~slice_mask(masked_BHIJ, sequences, queries))

    def visible(self, sequences: slice, queries: slice, chunk_BHIJ: Tensor) -> Tensor:
        """All logits that are not masked."""
        masked_BHIJ, _ = self._masked
        if masked_BHIJ is None:
            return torch.ones(1, 1, *chunk_BHIJ.shape[2:], dtype=torch.bool, device=self.device)
        return ~slice_mask(masked_BHIJ, sequences, queries).expand(-1, -1, *chunk_BHIJ.shape[2:])


def additive(mask: Tensor) -> Tensor:
    """A mask as a term of the logit: 0 or -inf for a boolean mask; a bias unchanged, but -inf below MASKING."""
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, -torch.inf)
    return mask.float().masked_fill(mask <= MASKING, -torch.inf)


def slice_mask(mask_BHIJ: Tensor, sequences: slice, queries: slice, columns: int | None = None) -> Tensor:
    """The part of a mask that broadcasts to a chunk of the logits."""
    wanted = (sequences, slice(None), queries, slice(columns))
    return mask_BHIJ[tuple(slice(None) if size == 1 else s for size, s in zip(mask_BHIJ.shape, wanted, strict=True))]


def mask_future_(logit_BHIJ: Tensor, last: int) -> None:
    """Mask later keys in place: keys up to `last` are visible to the first query, and one more to each next query."""
    first = max(0, last + 1)
    corner_BHIJ = logit_BHIJ[..., first:]
    if corner_BHIJ.numel():
        ones = torch.ones(corner_BHIJ.shape[-2:], dtype=torch.bool, device=logit_BHIJ.device)
        corner_BHIJ += additive(~ones.triu(last + 1 - first))
