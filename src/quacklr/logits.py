"""The logits of one attention, a few queries at a time, so that a long context never has them all at once.

    Made       again, from queries and keys: a fused kernel had them and showed nobody
    Written    by the model itself, which then took their softmax

Shapes: B batch, H head, G key head (that a group of heads reads), I query, J key, D size of a head.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 2**20  # logits made at a time: 4 MB, which a core's cache holds
FAR = -9e3  # what is added to a logit or put in its place, this low, is a mask and no bias

Modify = Callable[[Tensor, int, int], Tensor]  # logits of some sequences and queries, from the first of each


class Logits(ABC):
    """What goes into the softmax of one attention."""

    batch: int
    heads: int
    queries: int
    keys: int
    extra: int = 0  # columns after the keys that the softmax sees too: learned sinks

    @property
    @abstractmethod
    def scale(self) -> float:
        """How many times the product of a query and a key the logit is, at most; caps and biases aside."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where they are made."""

    @abstractmethod
    def part(self, sequences: slice, queries: slice) -> Tensor:
        """(B, H, I, columns) in float32, a tensor of its own; -inf where a query may not look.

        Columns are all keys and what is extra, or without the last keys if none of these queries may look there.
        """

    def rows(self, queries: slice) -> Tensor:
        """The same for all sequences and all columns."""
        start, stop, _ = queries.indices(self.queries)
        logit_BHIJ = self.part(slice(0, self.batch), slice(start, stop))
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
class Made(Logits):
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

    def __post_init__(self) -> None:
        sizes = {"batch": 0, "heads": 1, "queries": 2}
        for name, axis in sizes.items():
            object.__setattr__(self, name, self.q_BHID.shape[axis])
        object.__setattr__(self, "keys", self.k_BGJD.shape[2])
        object.__setattr__(self, "k_BGJD", self.k_BGJD.float())

    @property
    def scale(self) -> float:
        """As the kernel was told."""
        return self.factor

    @property
    def device(self) -> torch.device:
        """Where the queries are."""
        return self.q_BHID.device

    def part(self, sequences: slice, queries: slice) -> Tensor:
        """Made now."""
        seen = self.keys if self.offset is None else min(self.keys, max(1, queries.stop + self.offset))
        q_BHID = self.q_BHID[sequences, :, queries].float() * self.factor
        k_BGJD = self.k_BGJD[sequences, :, :seen]
        batch, groups = k_BGJD.shape[:2]
        q_BGID = q_BHID.reshape(batch, groups, -1, q_BHID.shape[-1])  # all queries that read the same key, in a row
        logit_BHIJ = (q_BGID @ k_BGJD.mT).view(batch, self.heads, -1, seen)
        if self.modify is not None:
            logit_BHIJ = self.modify(logit_BHIJ, sequences.start, queries.start)
        if self.mask_BHIJ is not None:
            logit_BHIJ = masked(logit_BHIJ, self.mask_BHIJ[sequences, :, queries, :seen])
        if self.offset is not None:
            hide_future(logit_BHIJ, queries.start + self.offset)
        return logit_BHIJ


@dataclass(frozen=True, eq=False)
class Written(Logits):
    """As the model wrote them.

    `hidden_BHIJ` is True where it masked one, unless with the least number there is, which shows. `taken_BHIJ` is what
    it took off before the softmax.
    """

    logit_BHIJ: Tensor
    hidden_BHIJ: Tensor | None = None
    taken_BHIJ: Tensor | None = None
    extra: int = 0
    factors: Sequence[float | Tensor] = ()

    def __post_init__(self) -> None:
        for name, size in zip(("batch", "heads", "queries"), self.logit_BHIJ.shape, strict=False):
            object.__setattr__(self, name, size)
        object.__setattr__(self, "keys", self.logit_BHIJ.shape[3] - self.extra)

    @property
    def scale(self) -> float:
        """The product of all that they were multiplied by."""
        return math.prod(float(each.abs().max()) if isinstance(each, Tensor) else abs(each) for each in self.factors)

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.logit_BHIJ.device

    def part(self, sequences: slice, queries: slice) -> Tensor:
        """A copy."""
        logit_BHIJ = self.logit_BHIJ[sequences, :, queries]
        hidden_BHIJ = logit_BHIJ <= torch.finfo(logit_BHIJ.dtype).min / 2
        if self.hidden_BHIJ is not None:
            hidden_BHIJ |= self.hidden_BHIJ[sequences, :, queries]
        logit_BHIJ = logit_BHIJ.float()
        if self.taken_BHIJ is not None:
            logit_BHIJ = logit_BHIJ + self.taken_BHIJ[sequences, :, queries]
        return logit_BHIJ.masked_fill(hidden_BHIJ, -torch.inf)


def masked(logit_BHIJ: Tensor, mask: Tensor) -> Tensor:
    """Logits with a kernel's mask: True where a query may look, or numbers to add."""
    if mask.dtype == torch.bool:
        return logit_BHIJ.masked_fill_(~mask, -torch.inf)
    return logit_BHIJ.add_(mask).masked_fill_(mask <= FAR, -torch.inf)


def hide_future(logit_BHIJ: Tensor, last: int) -> None:
    """Mask what is ahead: the first of these queries may look at keys up to `last`, each next one at one more."""
    first = max(0, last + 1)
    corner_BHIJ = logit_BHIJ[..., first:]
    if corner_BHIJ.numel():
        ones = torch.ones(corner_BHIJ.shape[-2:], dtype=torch.bool, device=logit_BHIJ.device)
        corner_BHIJ.masked_fill_(ones.triu(last + 1 - first), -torch.inf)


def arranged(tensor: Tensor, heads: int | None) -> Tensor:
    """(..., I, X) as (B, H, I, X), wherever heads are: (B, H, I, X), (B * H, I, X), (B, G, R, I, X) with G * R heads.

    If their number is not known, or does not fit, the axis before the queries counts as heads.
    """
    lead = tensor.shape[:-2]
    for start in range(len(lead)):
        if heads == math.prod(lead[start:]):
            return tensor.flatten(start, -3).flatten(0, start - 1) if start else tensor.flatten(0, -3)[None]
    if heads and len(lead) == 1 and lead[0] % heads == 0:
        return tensor.unflatten(0, (-1, heads))
    return tensor.flatten(0, -4) if len(lead) > 1 else tensor.reshape(1, *tensor.shape[-3:])
