"""Measure the order of sequences and heads in attention logits whose shape does not show it.

The attention module runs again, up to its softmax, with some examples set to NaN (and some tokens, for a module that
cuts sequences into windows): see nan_propagation.py. Then either all heads of a sequence become NaN or none of them.
If that does not separate the sequences, one output of a projection is set to NaN: it belongs to one head, in all
sequences.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor

from quacklr.attention.axes import HeadOrder, is_ambiguous
from quacklr.attention.interceptor import leading_shape
from quacklr.attention.nan_propagation import Source, along_outputs, rerun, sources_of
from quacklr.util.module_stack import ModuleCall

UNKNOWN = "its logits have heads and batch in one axis, and it cannot be measured which entry is which"
ADVICE = "give the heads an axis of their own, (batch, heads, queries, keys), or the model a batch of one sequence"
Axis = tuple[int, int]  # (number of a tensor argument of a module, axis of it)
Found = tuple[Tensor, Axis | None]  # (sequences, heads) indices into the flattened axes; the axis of the sequences


class HeadOrders:
    """The head orders of a model's attentions. Each is measured once, and again if shapes change in a way that matters.

    If an order cannot be measured, `find` raises an error; or, with `strict=False`, `unknown` has the reason under the
    name of the module.
    """

    def __init__(self, strict: bool = True) -> None:
        self.strict = strict
        self.unknown: dict[str, str] = {}
        self._measured: dict[object, list[MeasuredOrder]] = {}

    def find(
        self, calls: Sequence[ModuleCall], tensors: Sequence[Tensor], given: int | None, heads: int | None
    ) -> HeadOrder:
        """The order of heads in the logits of an attention. Also adds 1 to `attentions` of each running call.

        `calls`: the modules that are running, outermost first. `tensors`: the queries and keys, or the logits. `given`:
        the number of heads that the attention function has as an argument. `heads`: that of the module, if known.
        ValueError if heads and batch are in one axis, and their order cannot be measured.
        """
        order = HeadOrder(given)
        if given is None:
            order = self._known_or_measured(calls, leading_shape(tensors), tensors[0].shape[-2], heads)
        for call in calls:
            call.attentions += 1
        return order

    def _known_or_measured(
        self, calls: Sequence[ModuleCall], lead: tuple[int, ...], queries: int, heads: int | None
    ) -> HeadOrder:
        if not calls or calls[-1].name in self.unknown or not is_ambiguous(lead, heads, queries):
            return HeadOrder(heads)
        call = calls[-1]
        sizes = {(i, axis): n for i, tensor in enumerate(call.tensors) for axis, n in enumerate(tensor.shape)}
        measured = self._measured.setdefault((call.name, call.attentions, heads), [])
        known = next((each for each in measured if each.applies_to(lead, sizes)), None)
        if known is None:
            known = measure(calls, lead, heads, sizes)
            if known is None and len(lead) == 1:
                return self._fail(call.name, heads)
            known = known or MeasuredOrder(HeadOrder(heads), lead)
            measured.append(known)
        return known.order

    def _fail(self, name: str, heads: int | None) -> HeadOrder:
        if self.strict:
            raise ValueError(f"{name or 'the model'}: {UNKNOWN}; {ADVICE}")
        self.unknown[name] = UNKNOWN
        return HeadOrder(heads)


@dataclass(frozen=True, slots=True)
class MeasuredOrder:
    """An order that was measured, and the shapes for which it holds.

    `sizes`: of the axes of all tensor arguments; None if they do not matter. `batch`: the axis that counts the
    sequences, if there is one. No other axis matters then, and an order without an index holds for any batch size.
    """

    order: HeadOrder
    lead: tuple[int, ...]
    sizes: dict[Axis, int] | None = None
    batch: Axis | None = None

    def applies_to(self, lead: tuple[int, ...], sizes: dict[Axis, int]) -> bool:
        """Whether the order holds for these leading axes and sizes of arguments."""
        if self.batch is None:
            return lead == self.lead and self.sizes in (None, sizes)
        any_batch = self.order.index_BH is None and len(lead) == 1
        return (any_batch or lead == self.lead) and lead[0] == sizes.get(self.batch, 0) * (self.order.heads or 0)


def measure(
    calls: Sequence[ModuleCall], lead: tuple[int, ...], heads: int | None, sizes: dict[Axis, int]
) -> MeasuredOrder | None:
    """Measure the order of heads in the attention that the innermost of these modules is about to compute.

    The innermost module is tried first; queries may have been projected in a module around it. None if all fail.
    """
    count = math.prod(lead)
    for call in reversed(calls):
        run = rerun(call)
        if run is None or run.lead != lead:
            continue
        arguments, inputs = sources_of(call, run)
        found = (
            by_examples(arguments or inputs, count, heads)
            or by_outputs(call, run.outputs, count, heads)
            or by_examples(inputs, count, heads)
        )
        if found:
            index_BH, batch = found
            order = HeadOrder.from_index(index_BH, lead)
            merged = len(lead) == 1
            return MeasuredOrder(
                order, lead, sizes if merged else None, batch if merged and call is calls[-1] else None
            )
    return None


def by_examples(sources: Sequence[Source], count: int, heads: int | None) -> Found | None:
    """The order found by setting examples to NaN: all heads of a sequence become NaN together.

    If the number of sequences is known, an axis of that size is looked for first; otherwise all axes are used
    together. A tensor with more than three axes may have heads among them, so its result must agree with `heads`.
    None if the logits of every example depend on the whole batch.
    """
    for source in sources if heads and count % heads == 0 else ():
        axes = [axis for axis, size in enumerate(source.shape) if size * (heads or 0) == count]
        fitting = {axis: index for axis in axes if has(index := grouped(source.along(axis)), heads)}
        if fitting:
            (axis, index_BH), *others = fitting.items()
            same = all(torch.equal(other, index_BH) for _, other in others)
            return (index_BH, (source.argument, axis) if source.argument >= 0 else None) if same else None
    small = [(source.shape, runs) for source in sources if len(source.shape) <= 3 and (runs := source.along_all())]
    index = grouped([is_nan for _, runs in small for is_nan in runs])
    if index is not None and index.shape[1] <= (heads or count):
        interact = len(index) == 1 and any(len(shape) == 3 and 1 not in shape[:2] for shape, _ in small)
        return None if interact else (index, None)
    large = (grouped(source.along_all()) for source in sources if len(source.shape) > 3)
    return next(((index, None) for index in large if has(index, heads)), None)


def by_outputs(call: ModuleCall, outputs: Sequence[int], count: int, heads: int | None) -> Found | None:
    """The order found by setting single outputs of projections to NaN: all sequences of a head become NaN together.

    Outputs that several heads read, as those of a shared key, are ignored.
    """
    runs = along_outputs(call, outputs) if heads and count % heads == 0 else []
    entries, least = torch.arange(count), min((int(is_nan.sum()) for is_nan in runs), default=0)
    for is_nan in runs if least * (heads or 0) == count else ():
        for size in [size for size in range(1, least + 1) if least % size == 0]:
            head = entries // size % (heads or 1)
            if torch.equal(head == head[is_nan][0], is_nan):
                return entries.view(-1, heads or 1, size).movedim(1, -1).reshape(-1, heads or 1), None
    return None


def has(index_BH: Tensor | None, heads: int | None) -> TypeGuard[Tensor]:
    """Whether an index was found, with this number of heads."""
    return index_BH is not None and index_BH.shape[1] == heads


def grouped(runs: Sequence[Tensor]) -> Tensor | None:
    """(sequences, heads): entries that were NaN in the same runs; None if the groups are not equally large."""
    if not runs or not torch.stack(list(runs)).any():
        return None
    _, group, sizes = torch.stack(list(runs), dim=1).unique(dim=0, return_inverse=True, return_counts=True)
    if len(set(sizes.tolist())) > 1:
        return None
    index_BH = group.argsort(stable=True).view(len(sizes), -1)
    return index_BH[index_BH[:, 0].argsort()]
