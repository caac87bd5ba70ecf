"""Sums over the logits of one attention, accumulated in one pass over their chunks.

Shapes: B sequence, H head, I query, J key.
"""

from __future__ import annotations

from bisect import bisect_left

import torch
from torch import Tensor

from quacklr.attention.logits import MASKED, Logits

KEPT = 2**20  # logits of one attention that are kept for the next measurement: 4 MB
NEGLIGIBLE = -1e4  # a logit this far below the largest has probability 0 in float32


class StatsAccumulator:
    """Sums from which the statistics of one rank, or of many, are computed; and the logits to keep.

    `sums` is (6, heads): the sums of |changes|, entropies and sink shares, then the numbers of compared logits, of
    queries that see at least one key, and of those that see at least two. `before_BHIJ`: the logits that the last
    measurement kept. Without them, or if their shape differs, the change is NaN. `parts`: the limit of kept logits is
    divided by it. `rounding`: relative, of the logits.
    """

    def __init__(self, logits: Logits, before_BHIJ: Tensor | None, parts: int = 1) -> None:
        batch, heads, queries, self.keys = logits.shape
        device, self.heads_known = logits.source.device, logits.heads_known
        self.rounding = torch.finfo(logits.source.dtype).eps ** 0.5
        self.max_BH = torch.full((batch, heads), -torch.inf, device=device)
        self.sums = torch.zeros(6, heads, device=device)
        self.change_H, self.entropy_H, self.sink_H, self.compared_H, self.see_one_H, self.see_two_H = self.sums
        self.first_BH = torch.full((batch, heads), self.keys, device=device)
        self.first_share_BH = torch.zeros(batch, heads, device=device)
        row, limit = batch * heads * self.keys, max(1, KEPT // parts)
        kept = max(1, min(queries, limit // row))  # queries, evenly spaced over the sequence
        self.sampled, self.stride = [(i + 1) * queries // kept - 1 for i in range(kept)], -(-row // limit)
        self.kept_BHIJ = torch.full((batch, heads, kept, -(-self.keys // self.stride)), MASKED, device=device)
        if before_BHIJ is None or before_BHIJ.shape != self.kept_BHIJ.shape:
            before_BHIJ, self.change_H[:] = None, torch.nan
        for sequences, part, logit_BHIJ in logits.chunks():
            self._keep(sequences, part, logit_BHIJ, before_BHIJ)
            self._add(sequences, logit_BHIJ)
        self.sink_H += self.first_share_BH.sum(0)

    def _keep(self, sequences: slice, queries: slice, logit_BHIJ: Tensor, before_BHIJ: Tensor | None) -> None:
        """Keep the sampled queries and keys of a chunk, and compare them with those kept before."""
        start, stop = (bisect_left(self.sampled, edge) for edge in (queries.start, queries.stop))
        rows = [query - queries.start for query in self.sampled[start:stop]]
        logit_BHIJ = logit_BHIJ if len(rows) == logit_BHIJ.shape[2] else logit_BHIJ[:, :, rows]
        logit_BHIJ = logit_BHIJ[..., : self.keys : self.stride]
        kept_BHIJ = self.kept_BHIJ[sequences, :, start:stop]
        kept_BHIJ[..., : logit_BHIJ.shape[-1]] = logit_BHIJ.clamp(min=MASKED)
        if before_BHIJ is not None:
            before_BHIJ = before_BHIJ[sequences, :, start:stop]
            masked_BHIJ = (kept_BHIJ <= MASKED).logical_or_(before_BHIJ <= MASKED)
            self.change_H += (kept_BHIJ - before_BHIJ).abs_().masked_fill_(masked_BHIJ, 0).sum((0, 2, 3))
            self.compared_H += masked_BHIJ.logical_not_().sum((0, 2, 3))

    def _add(self, sequences: slice, logit_BHIJ: Tensor) -> None:
        """Add the maxima, entropies and sink shares of a chunk."""
        max_BHI = logit_BHIJ[..., : self.keys].amax(-1)
        self.max_BH[sequences] = torch.maximum(self.max_BH[sequences], max_BHI.amax(2))
        visible_BHIJ = (logit_BHIJ[..., : self.keys] < MASKED).logical_not_()
        count_BHI = visible_BHIJ.sum(-1)
        see_one_BHI, see_two_BHI = count_BHI > 0, count_BHI > 1
        first_BH = self._first_visible(sequences, visible_BHIJ)

        max_BHI = max_BHI if logit_BHIJ.shape[-1] <= self.keys else logit_BHIJ.amax(-1)
        below_BHIJ = (logit_BHIJ - max_BHI.clamp(min=MASKED)[..., None]).clamp_(min=NEGLIGIBLE)
        share_BHIJ = below_BHIJ.softmax(-1)
        entropy_BHI = -share_BHIJ.amax(-1).log() - torch.linalg.vecdot(share_BHIJ, below_BHIJ)
        index_BHI1 = first_BH.clamp(max=share_BHIJ.shape[-1] - 1)[..., None, None].expand(*max_BHI.shape, 1)
        first_share_BHI = share_BHIJ.gather(-1, index_BHI1)[..., 0]
        learned_BHI = share_BHIJ[..., self.keys :].sum(-1)

        self.see_one_H += see_one_BHI.sum((0, 2))
        self.see_two_H += see_two_BHI.sum((0, 2))
        self.entropy_H += entropy_BHI.where(see_one_BHI, 0).sum((0, 2))
        self.first_share_BH[sequences] += first_share_BHI.where(see_two_BHI, 0).sum(2)
        self.sink_H += learned_BHI.where(see_two_BHI, 0).sum((0, 2))

    def _first_visible(self, sequences: slice, visible_BHIJ: Tensor) -> Tensor:
        """The first key of each sequence that is visible to any query so far.

        If an earlier key becomes visible, it was masked for the queries before, so their share of it is 0.
        """
        any_BHJ = visible_BHIJ.any(2)
        first_BH = any_BHJ.int().argmax(-1).where(any_BHJ.any(-1), self.keys)
        known_BH = self.first_BH[sequences]
        self.first_share_BH[sequences] *= first_BH >= known_BH
        self.first_BH[sequences] = torch.minimum(first_BH, known_BH)
        return self.first_BH[sequences]
