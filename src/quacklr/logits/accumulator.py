"""Sums over the logits of one attention, made in one pass over their chunks.

Shapes: B batch, H head, I query, J key.
"""

from __future__ import annotations

from bisect import bisect_left

import torch
from torch import Tensor

from quacklr.logits.logits import HIDDEN, Logits

KEPT = 2**20  # logits of one attention that are kept for the next time: 4 MB
LEAST = -1e4  # a logit so far below the largest has no share: its exponential is 0 in float32


class StatsAccumulator:
    """What the statistics of one rank, or of many, are made of; and logits to compare the next ones with.

    `before_BHIJ` are those of the last time; without them, or if they were of another shape, the change is NaN.
    """

    def __init__(self, logits: Logits, before_BHIJ: Tensor | None) -> None:
        batch, heads, device = logits.batch, logits.heads, logits.device
        self.keys = logits.keys
        self.largest_H = torch.full((heads,), -torch.inf, device=device)
        self.compared_H, self.entropy_H, self.looking_H, self.choosing_H = torch.zeros(4, heads, device=device)
        self.first_BH = torch.full((batch, heads), self.keys, device=device)
        self.sink_BH, self.learned_H = torch.zeros(batch, heads, device=device), torch.zeros(heads, device=device)
        self.picked, self.every = evenly_spaced(logits)
        kept = (batch, heads, len(self.picked), -(-self.keys // self.every))
        self.kept_BHIJ = torch.full(kept, HIDDEN, device=device)
        comparable = before_BHIJ is not None and before_BHIJ.shape == self.kept_BHIJ.shape
        self.before_BHIJ = before_BHIJ if comparable else None
        self.moved_H = torch.full((heads,), 0.0 if comparable else torch.nan, device=device)
        for sequences, queries, logit_BHIJ in logits.chunks():
            seen_BHIJ = logits.seen(sequences, queries, logit_BHIJ)
            self._keep(sequences, queries, logit_BHIJ, seen_BHIJ)
            self._add(sequences, logit_BHIJ, seen_BHIJ)
        del self.before_BHIJ

    def sums(self) -> Tensor:
        """(6, heads): of |changes| and how many, of entropies and how many, of sink shares and how many."""
        sink_H = self.sink_BH.sum(0) + self.learned_H
        return torch.stack([self.moved_H, self.compared_H, self.entropy_H, self.looking_H, sink_H, self.choosing_H])

    def _keep(self, sequences: slice, queries: slice, logit_BHIJ: Tensor, seen_BHIJ: Tensor) -> None:
        """Of these queries the picked ones. What may not be looked at is the same number every time."""
        start, stop = (bisect_left(self.picked, edge) for edge in (queries.start, queries.stop))
        rows = [query - queries.start for query in self.picked[start:stop]]
        if len(rows) < logit_BHIJ.shape[2]:
            logit_BHIJ, seen_BHIJ = logit_BHIJ[:, :, rows], seen_BHIJ[:, :, rows]
        logit_BHIJ, seen_BHIJ = (each[..., : self.keys : self.every] for each in (logit_BHIJ, seen_BHIJ))
        batch, heads, _, width = logit_BHIJ.shape
        self.compared_H += seen_BHIJ.sum((2, 3)).expand(batch, heads).sum(0)
        place_BHIJ = self.kept_BHIJ[sequences, :, start:stop]
        place_BHIJ[..., :width] = logit_BHIJ.clamp(min=HIDDEN)
        if self.before_BHIJ is not None:
            moved_BHIJ = (place_BHIJ - self.before_BHIJ[sequences, :, start:stop]).abs_()
            if moved_BHIJ.numel() and moved_BHIJ.amax() > -HIDDEN / 2:  # masks that are not the same every time
                stray_BHIJ = moved_BHIJ > -HIDDEN / 2
                moved_BHIJ.masked_fill_(stray_BHIJ, 0)
                self.compared_H -= (stray_BHIJ & (place_BHIJ > HIDDEN)).sum((0, 2, 3))
            self.moved_H += moved_BHIJ.sum((0, 2, 3))

    def _add(self, sequences: slice, logit_BHIJ: Tensor, seen_BHIJ: Tensor) -> None:
        """A chunk."""
        top_BHI = logit_BHIJ[..., : self.keys].amax(-1)
        self.largest_H = torch.maximum(self.largest_H, top_BHI.amax((0, 2)))
        count_BHI = seen_BHIJ[..., : self.keys].sum(-1).expand_as(top_BHI)
        looking_BHI, choosing_BHI = count_BHI > 0, count_BHI > 1
        first_BH = self._first(sequences, seen_BHIJ[..., : self.keys])

        top_BHI = top_BHI if logit_BHIJ.shape[-1] <= self.keys else logit_BHIJ.amax(-1)
        below_BHIJ = (logit_BHIJ - top_BHI.clamp(min=HIDDEN)[..., None]).clamp_(min=LEAST)
        share_BHIJ = below_BHIJ.softmax(-1)
        entropy_BHI = -share_BHIJ.amax(-1).log() - torch.linalg.vecdot(share_BHIJ, below_BHIJ)
        index_BHI1 = first_BH.clamp(max=share_BHIJ.shape[-1] - 1)[..., None, None].expand(*top_BHI.shape, 1)
        sink_BHI = share_BHIJ.gather(-1, index_BHI1)[..., 0]
        learned_BHI = share_BHIJ[..., self.keys :].sum(-1)

        self.looking_H += looking_BHI.sum((0, 2))
        self.choosing_H += choosing_BHI.sum((0, 2))
        self.entropy_H += entropy_BHI.where(looking_BHI, 0).sum((0, 2))
        self.sink_BH[sequences] += sink_BHI.where(choosing_BHI, 0).sum(2)
        self.learned_H += learned_BHI.where(choosing_BHI, 0).sum((0, 2))

    def _first(self, sequences: slice, seen_BHIJ: Tensor) -> Tensor:
        """The first key of each sequence that any query so far may look at.

        If it moves to the left, the queries before could not look there: what they gave to it is nothing.
        """
        any_BHJ = seen_BHIJ.any(2)
        first_BH = any_BHJ.int().argmax(-1).where(any_BHJ.any(-1), self.keys)
        known_BH = self.first_BH[sequences]
        self.sink_BH[sequences] *= first_BH >= known_BH
        self.first_BH[sequences] = torch.minimum(first_BH, known_BH)
        return self.first_BH[sequences]


def evenly_spaced(logits: Logits) -> tuple[list[int], int]:
    """Queries to keep, spread over the sequence, and every how many of their keys: all and every one if they fit."""
    row = logits.batch * logits.heads * logits.keys
    count = max(1, min(logits.queries, KEPT // row))
    return [(i + 1) * logits.queries // count - 1 for i in range(count)], -(-row // KEPT)
