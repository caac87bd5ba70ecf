"""Where the heads are in the leading axes of attention logits, if their shape does not show it.

    (B, H, I, J)                      by convention: nothing to find
    (B x H, I, J), (H x B, I, J)      the same shape
    (H, B, I, J), (G, B, R, I, J)     the same shape as (B, H, I, J), (B, G, R, I, J), if B is H or G

The order is measured (nan_runs.py): the attention module runs again, up to its softmax, with some examples set to NaN
(and some tokens, where a module cuts sequences into windows). All heads of a sequence then become NaN, or none of them.
Where that does not tell sequences apart, one output of a projection is set to NaN, which is one head's in all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor

from quacklr.logits.interceptor import Reading
from quacklr.logits.logits import Order, arranged
from quacklr.logits.nan_runs import Reruns
from quacklr.util.module_stack import ModuleCall

UNTOLD = "its logits have heads and batch in one axis, and it cannot be measured which entry is which"
OTHERWISE = "give the heads an axis of their own, (batch, heads, queries, keys), or the model a batch of one sequence"
Shapes = list[tuple[int, ...]]  # of the tensors that a module was called with


class HeadOrders:
    """The orders of a model's attentions. Each is measured once, and again when shapes change in a way that matters.

    One that cannot be measured is an error; or, with `strict=False`, in `unknown` under its module's name, and why.
    """

    def __init__(self, strict: bool = True) -> None:
        self.strict = strict
        self.unknown: dict[str, str] = {}
        self._known: dict[object, list[Known]] = {}

    def read(self, calls: Sequence[ModuleCall], shape: Sequence[int], heads: int | None) -> Reading:
        """How many heads logits of this shape (without their last axis) have, and where they are.

        `calls`: the modules that are running, outermost first. `heads`: how many there are, if that is known.
        ValueError if heads and batch are in one axis, and their order cannot be measured.
        """
        *lead, queries = shape
        if not calls or calls[-1].name in self.unknown or not is_ambiguous(lead, heads, queries):
            return heads, None
        call = calls[-1]
        shapes = [tuple(tensor.shape) for tensor in call.tensors]
        known = self._known.setdefault((call.name, call.attentions, heads), [])
        reading = next(filter(None, (each.reading_of(lead, shapes) for each in known)), None)
        if reading is None:
            found = measured(calls, lead, heads)
            if found is None and len(lead) == 1:
                return self._cannot_tell(call.name, heads)
            known.append(Known.of(found, lead, heads, shapes))
            reading = known[-1].reading
        return reading

    def _cannot_tell(self, name: str, heads: int | None) -> Reading:
        if self.strict:
            raise ValueError(f"{name or 'the model'}: {UNTOLD}; {OTHERWISE}")
        self.unknown[name] = UNTOLD
        return heads, None


@dataclass(frozen=True, slots=True)
class Known:
    """What was measured of one attention, and for which shapes it holds.

    `batch`: the argument of the module, and the axis of it, that counts the sequences. Where one does, no other axis
    matters; and (heads x sequences) in one axis is that for any number of sequences.
    """

    reading: Reading
    lead: list[int]
    shapes: Shapes | None
    batch: tuple[int, int] | None

    @classmethod
    def of(cls, found: Found | None, lead: list[int], heads: int | None, shapes: Shapes) -> Known:
        """By convention, whatever the shapes, if nothing was found."""
        if found is None:
            return cls((heads, None), lead, None, None)
        return cls(as_reading(found.index_BH, lead), lead, shapes if len(lead) == 1 else None, found.batch)

    def reading_of(self, lead: list[int], shapes: Shapes) -> Reading | None:
        """Of logits with these leading axes; None if they must be measured."""
        heads, order = self.reading
        if self.shapes is None or self.batch is None or heads is None:
            return self.reading if lead == self.lead and self.shapes in (None, shapes) else None
        argument, axis = self.batch
        size = shapes[argument][axis] if argument < len(shapes) and axis < len(shapes[argument]) else 0
        if lead == self.lead:
            return self.reading if size == self.shapes[argument][axis] else None
        in_order = order is None or order.index_BH is None
        if len(lead) != 1 or len(self.lead) != 1 or not in_order or lead[0] != size * heads:
            return None
        return heads, Order(size, heads) if order else None


def is_ambiguous(lead: Sequence[int], heads: int | None, queries: int) -> bool:
    """Whether heads can be in several places of these axes.

    Not if the last axes have as many entries as there are heads, and no others have; nor in (B, I, H, J).
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


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """The entry of each sequence and head; and the argument's axis that counts the sequences, if one does."""

    index_BH: Tensor
    batch: tuple[int, int] | None = None


def measured(calls: Sequence[ModuleCall], lead: Sequence[int], heads: int | None) -> Found | None:
    """Of the attention that some modules have come to: where its heads are; None if that cannot be told.

    The innermost module is asked first; queries may have been projected in a module around it.
    """
    for call in reversed(calls):
        runs = Reruns.of(call, tuple(lead))
        found = runs and (by_examples(runs, math.prod(lead), heads) or by_rows(runs, math.prod(lead), heads))
        if found:
            return found if call is calls[-1] else Found(found.index_BH)
    return None


def by_examples(runs: Reruns, count: int, heads: int | None) -> Found | None:
    """All heads of a sequence become NaN together.

    First an axis is looked for that counts the sequences, if it is known how many there are; then all axes together.
    An input with more than three axes may have heads among them, so it must agree with their number. Where the logits
    of an example depend on all of the batch, nothing can be told.
    """
    inputs = runs.inputs()
    for each in inputs if heads and count % heads == 0 else ():
        axes = [axis for axis, size in enumerate(each.shape) if size * (heads or 0) == count]
        fits = {axis: index for axis in axes if has(index := grouped(each.along(axis)), heads)}
        if fits:
            (axis, index_BH), *others = fits.items()
            same = all(torch.equal(other, index_BH) for _, other in others)
            batch = (each.argument, axis) if each.argument >= 0 else None
            return Found(index_BH, batch) if same else None
    small = [(each.shape, answers) for each in inputs if len(each.shape) <= 3 and (answers := each.all())]
    index = grouped([answer for _, answers in small for answer in answers])
    if index is not None and index.shape[1] <= (heads or count):
        interact = len(index) == 1 and any(len(shape) == 3 and 1 not in shape[:2] for shape, _ in small)
        return None if interact else Found(index)
    alone = (grouped(each.all()) for each in inputs if len(each.shape) > 3)
    return next((Found(index) for index in alone if has(index, heads)), None)


def by_rows(runs: Reruns, count: int, heads: int | None) -> Found | None:
    """All sequences of a head become NaN together, if the output of a projection is that head's alone.

    An output that several heads read, as those of a key may, is not asked.
    """
    if heads is None or count % heads:
        return None
    answers = [answer for answer in runs.by_outputs() if answer.any()]
    least = min((int(answer.sum()) for answer in answers), default=0)
    if least * heads != count:
        return None
    entries = torch.arange(count)
    for answer in [answer for answer in answers if int(answer.sum()) == least]:
        for size in [size for size in range(1, least + 1) if least % size == 0]:
            head = entries // size % heads
            if torch.equal(head == head[answer][0], answer):
                return Found(entries.view(-1, heads, size).movedim(1, -1).reshape(-1, heads))
    return None


def has(index_BH: Tensor | None, heads: int | None) -> TypeGuard[Tensor]:
    """Whether entries were told apart, into as many heads."""
    return index_BH is not None and index_BH.shape[1] == heads


def grouped(answers: Sequence[Tensor]) -> Tensor | None:
    """(sequences, heads): entries that were NaN in the same runs; None if there are not equally many of each kind."""
    if not answers or not torch.stack(list(answers)).any():
        return None
    _, kind, sizes = torch.stack(list(answers), dim=1).unique(dim=0, return_inverse=True, return_counts=True)
    if len(set(sizes.tolist())) > 1:
        return None
    index_BH = kind.argsort(stable=True).view(len(sizes), -1)
    return index_BH[index_BH[:, 0].argsort()]


def as_reading(index_BH: Tensor, lead: Sequence[int]) -> Reading:
    """Without an order where none is needed, and without an index where heads are first."""
    sequences, heads = index_BH.shape
    entries = torch.arange(index_BH.numel())
    if torch.equal(arranged(entries.view(*lead, 1, 1), heads)[..., 0, 0], index_BH):
        return heads, None
    heads_first = torch.equal(entries.view(heads, sequences).T, index_BH)
    return heads, Order(sequences, heads, None if heads_first else index_BH)
