"""The logits of one attention, a few queries at a time, so that a long context never has them all at once.

    Made       again, from queries and keys: a fused kernel had them and showed nobody
    Written    by the model itself, which then took their softmax

Shapes: B batch, H head, G key head (that a group of heads reads), I query, J key, D size of a head. Masks have one
head if they are the same for all: they are then cheap beside the logits.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 2**20  # logits made at a time: 4 MB, which caches hold
HIDDEN = -1e38  # less than any logit
FAR = -9e3  # what is added to a logit or put in its place, this low, is a mask and no bias

Modify = Callable[[Tensor, int, int], Tensor]  # logits of some sequences and queries, from the first of each


class Logits(ABC):
    """What goes into the softmax of one attention."""

    extra: int = 0  # columns after the keys that the softmax sees too: learned sinks

    @property
    @abstractmethod
    def made_of(self) -> Tensor:
        """(B, H, I, ...): what they are made of, or they themselves."""

    @property
    @abstractmethod
    def keys(self) -> int:
        """How many positions are asked."""

    @property
    @abstractmethod
    def scale(self) -> float:
        """How many times the product of a query and a key the logit is, at most; caps and biases aside."""

    @property
    def batch(self) -> int:
        """How many sequences there are."""
        return self.made_of.shape[0]

    @property
    def heads(self) -> int:
        """How many heads attend."""
        return self.made_of.shape[1]

    @property
    def queries(self) -> int:
        """How many positions ask."""
        return self.made_of.shape[2]

    @property
    def device(self) -> torch.device:
        """Where they are made."""
        return self.made_of.device

    @abstractmethod
    def part(self, sequences: slice, queries: slice) -> Tensor:
        """(B, H, I, columns) in float32, to be read only; less than HIDDEN where a query may not look.

        Columns are all keys and what is extra, or without the last keys if none of these queries may look there.
        """

    @abstractmethod
    def seen(self, sequences: slice, queries: slice, part_BHIJ: Tensor) -> Tensor:
        """Where a query may look in such a part; broadcasts to it."""

    def rows(self, queries: slice) -> Tensor:
        """The part of all sequences, with all columns; -inf where a query may not look."""
        start, stop, _ = queries.indices(self.queries)
        logit_BHIJ = self.part(slice(0, self.batch), slice(start, stop))
        logit_BHIJ = logit_BHIJ.masked_fill(logit_BHIJ < HIDDEN, -torch.inf)
        return F.pad(logit_BHIJ, (0, self.keys + self.extra - logit_BHIJ.shape[-1]), value=-torch.inf)

    def chunks(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """Everything in order, as much at a time as CHUNK allows: which sequences, which queries, their part."""
        row = self.heads * (self.keys + self.extra)
        queries = min(self.queries, max(1, CHUNK // row))
        sequences = max(1, CHUNK // (row * queries)) if queries == self.queries else 1
        for b in range(0, self.batch, sequences):
            for i in range(0, self.queries, queries):
                picked = slice(b, min(b + sequences, self.batch)), slice(i, min(i + queries, self.queries))
                yield *picked, self.part(*picked)

    def largest(self) -> Tensor:
        """(H,): the largest logit of each head."""
        found = [logit_BHIJ[..., : self.keys].amax((0, 2, 3)) for _, _, logit_BHIJ in self.chunks()]
        return torch.stack(found).amax(0)


@dataclass(frozen=True, eq=False)
class QKLogits(Logits):
    """From queries and keys, as a fused kernel makes them.

    `offset`: a query may look at the keys up to its own number plus this; None if at all. `mask` is what the kernel was
    given, True where a query may look, or numbers to add; `modify` what flex attention does to a logit.
    """

    q_BHID: Tensor
    k_BGJD: Tensor
    factor: float
    offset: int | None = None
    mask_BHIJ: Tensor | None = None
    modify: Modify | None = None

    @property
    def made_of(self) -> Tensor:
        """The queries."""
        return self.q_BHID

    @property
    def keys(self) -> int:
        """How many keys there are."""
        return self.k_BGJD.shape[2]

    @property
    def scale(self) -> float:
        """As the kernel was told."""
        return abs(self.factor)

    @cached_property
    def _float_keys(self) -> Tensor:
        return self.k_BGJD.float()

    def part(self, sequences: slice, queries: slice) -> Tensor:
        """Made now."""
        width = self.keys if self.offset is None else min(self.keys, max(1, queries.stop + self.offset))
        q_BHID = self.q_BHID[sequences, :, queries].float() * self.factor
        k_BGJD = self._float_keys[sequences, :, :width]
        batch, groups = k_BGJD.shape[:2]
        q_BGID = q_BHID.reshape(batch, groups, -1, q_BHID.shape[-1])  # all queries that read the same key, in a row
        logit_BHIJ = (q_BGID @ k_BGJD.mT).view(batch, self.heads, -1, width)
        if self.modify is not None:
            logit_BHIJ = self.modify(logit_BHIJ, sequences.start, queries.start)
        if self.mask_BHIJ is not None:
            logit_BHIJ += to_add(cut(self.mask_BHIJ, sequences, queries, width))
        if self.offset is not None:
            hide_future(logit_BHIJ, queries.start + self.offset)
        return logit_BHIJ

    def seen(self, sequences: slice, queries: slice, part_BHIJ: Tensor) -> Tensor:
        """From the masks; what flex attention hides is found in the logits."""
        if self.modify is not None:
            return part_BHIJ > -torch.inf
        open_BHIJ = torch.zeros(1, 1, *part_BHIJ.shape[2:], device=self.device)
        if self.mask_BHIJ is not None:
            open_BHIJ = open_BHIJ + to_add(cut(self.mask_BHIJ, sequences, queries, part_BHIJ.shape[-1]))
        if self.offset is not None:
            hide_future(open_BHIJ, queries.start + self.offset)
        return open_BHIJ > -torch.inf


@dataclass(frozen=True, eq=False)
class EagerLogits(Logits):
    """As the model wrote them.

    `hidden_BHIJ` is True where it is known to have masked one. `taken_BHIJ` is what it took off before the softmax.
    """

    logit_BHIJ: Tensor
    hidden_BHIJ: Tensor | None = None
    taken_BHIJ: Tensor | None = None
    extra: int = 0
    factors: Sequence[float | Tensor] = ()

    @property
    def made_of(self) -> Tensor:
        """They themselves."""
        return self.logit_BHIJ

    @property
    def keys(self) -> int:
        """How many columns are keys."""
        return self.logit_BHIJ.shape[3] - self.extra

    @property
    def scale(self) -> float:
        """The product of all that they were multiplied by."""
        return math.prod(float(each.abs().max()) if isinstance(each, Tensor) else abs(each) for each in self.factors)

    @cached_property
    def _hidden(self) -> tuple[Tensor | None, bool]:
        """All that is masked, None if nothing is; and whether the numbers show it, being the least there are.

        What shows in the first head is held against what is known; if that is not all of it, all heads are looked at.
        """
        least, known = torch.finfo(self.logit_BHIJ.dtype).min / 2, self.hidden_BHIJ
        if known is None and not self.logit_BHIJ.amin() <= least:
            return None, True
        first_BHIJ = self.logit_BHIJ[:, :1] <= least
        if known is not None and known.shape[1] == 1 and bool((known | ~first_BHIJ).all()):
            return known, least < HIDDEN and bool((first_BHIJ | ~known).all())
        shown_BHIJ = self.logit_BHIJ <= least
        return (shown_BHIJ, least < HIDDEN) if known is None else (shown_BHIJ | known, False)

    def part(self, sequences: slice, queries: slice) -> Tensor:
        """As they are, if they show what is masked."""
        logit_BHIJ = self.logit_BHIJ[sequences, :, queries].float()
        if self.taken_BHIJ is not None:
            logit_BHIJ = logit_BHIJ + cut(self.taken_BHIJ, sequences, queries, self.keys + self.extra)
        hidden_BHIJ, shows = self._hidden
        if hidden_BHIJ is None or shows:
            return logit_BHIJ
        return logit_BHIJ + to_add(~cut(hidden_BHIJ, sequences, queries, self.keys + self.extra))

    def seen(self, sequences: slice, queries: slice, part_BHIJ: Tensor) -> Tensor:
        """All that is not hidden."""
        hidden_BHIJ, _ = self._hidden
        if hidden_BHIJ is None:
            return torch.ones(1, 1, *part_BHIJ.shape[2:], dtype=torch.bool, device=self.device)
        hidden_BHIJ = cut(hidden_BHIJ, sequences, queries, self.keys + self.extra)
        return ~hidden_BHIJ.expand(-1, -1, *part_BHIJ.shape[2:])


def to_add(mask: Tensor) -> Tensor:
    """What a mask adds to a logit: 0 or -inf where it says whether a query may look, itself where it is a bias."""
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, -torch.inf)
    return mask.float().masked_fill(mask <= FAR, -torch.inf)


def cut(mask_BHIJ: Tensor, sequences: slice, queries: slice, columns: int) -> Tensor:
    """The part of something that broadcasts to all logits."""
    wanted = (sequences, slice(None), queries, slice(columns))
    whole = slice(None)
    return mask_BHIJ[tuple(whole if size == 1 else one for size, one in zip(mask_BHIJ.shape, wanted, strict=True))]


def hide_future(logit_BHIJ: Tensor, last: int) -> None:
    """Mask what is ahead: the first of these queries may look at keys up to `last`, each next one at one more."""
    first = max(0, last + 1)
    corner_BHIJ = logit_BHIJ[..., first:]
    if corner_BHIJ.numel():
        ones = torch.ones(corner_BHIJ.shape[-2:], dtype=torch.bool, device=logit_BHIJ.device)
        corner_BHIJ += to_add(~ones.triu(last + 1 - first))


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """Which entry of all leading axes, taken as one, belongs to each sequence and head. Made by head_order.py.

    Without an `index_BH` the axis is (heads x sequences); (sequences x heads) needs no Order.
    """

    sequences: int
    heads: int
    index_BH: Tensor | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """(..., I, X) as (B, H, I, X)."""
        flat = tensor.flatten(0, -3)
        if self.index_BH is None:
            return flat.unflatten(0, (self.heads, self.sequences)).transpose(0, 1)
        return flat[self.index_BH.to(flat.device)]


def headless(mask: Tensor, lead: Sequence[int], heads: int | None, order: Order | None = None) -> Tensor:
    """A mask that broadcasts to (*lead, I, J), as one that broadcasts to (B, H, I, J)."""
    if math.prod(mask.shape[:-2]) == 1:
        return mask.reshape(1, 1, *mask[(None,) * (2 - mask.ndim)].shape[-2:])
    if order is None and len(lead) == 2 and (lead[0] == 1 or heads != lead[0] * lead[1]):
        return mask[(None,) * (4 - mask.ndim)]
    return arranged(mask.expand(*lead, *mask.shape[-2:]), heads, order)


def arranged(tensor: Tensor, heads: int | None, order: Order | None = None) -> Tensor:
    """(..., I, X) as (B, H, I, X), wherever heads are: (B, H, I, X), (B * H, I, X), (B, G, R, I, X) with G * R heads.

    If their number is not known, or does not fit, the axis before the queries counts as heads. An `order` that was
    measured is followed.
    """
    if order is not None:
        return order.of(tensor)
    lead = tensor.shape[:-2]
    for start in range(len(lead)):
        if heads == math.prod(lead[start:]):
            return tensor.flatten(start, -3).flatten(0, start - 1) if start else tensor.flatten(0, -3)[None]
    if heads and len(lead) == 1 and lead[0] % heads == 0:
        return tensor.unflatten(0, (-1, heads))
    if len(lead) > 2 and heads in lead:
        return tensor.movedim(len(lead) - 1 - lead[::-1].index(heads), -3).flatten(0, -4)
    return tensor.flatten(0, -4) if len(lead) > 1 else tensor.reshape(1, *tensor.shape[-3:])
