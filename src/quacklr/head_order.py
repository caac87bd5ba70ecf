"""Where the heads are in the leading axes of attention logits, if their shape does not show it.

    (B, H, I, J)                      by convention: nothing to find
    (B x H, I, J), (H x B, I, J)      the same shape
    (H, B, I, J), (G, B, R, I, J)     the same shape as (B, H, I, J), (B, G, R, I, J), if B is H or G

The order is measured. The attention module runs again, up to its softmax, with the input of a projection set to NaN
for some examples (or tokens, where a module cuts sequences into windows). Every head reads all of that input, so all
heads of a sequence become NaN, or none of them. NaN also passes through weights that are zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor

from quacklr.calls import ADDED_MATMUL, CONVOLUTION, MATMUL, bound, copied, tensors_in
from quacklr.intercept import Catch, ModuleCall, Reading
from quacklr.logits import Order, arranged
from quacklr.modules import own_attributes, own_buffers, undisturbed

INPUTS = 8  # of projections, that are tried
UNTOLD = "its logits have heads and batch in one axis, and it cannot be measured which entry is which"
OTHERWISE = (
    "give the heads an axis of their own, (batch, heads, queries, keys), or the model a batch of one sequence"
)
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
        shapes = [tuple(tensor.shape) for tensor in tensors_in([*call.args, *call.kwargs.values()])]
        known = self._known.setdefault((call.name, call.attentions, heads), [])
        reading = next(filter(None, (each.reading_of(lead, shapes) for each in known)), None)
        if reading is None:
            found = next(filter(None, (measured(one, lead, heads) for one in reversed(calls))), None)
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
        batch = None if found.axis is None or found.shape not in shapes else (shapes.index(found.shape), found.axis)
        return cls(as_reading(found.index_BH, lead), lead, shapes, batch)

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

    Not if the last axes have as many entries as there are heads, and no others have; nor in (B, I, H, J). If their
    number is not known, (B, H) is taken for what it is.
    """
    count = math.prod(lead)
    if count == 1 or heads is None:
        return count > 1 and len(lead) != 2
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
    """The entry of each sequence and head; and the axis of an input that counts the sequences, if one does."""

    index_BH: Tensor
    shape: tuple[int, ...] = ()
    axis: int | None = None


def measured(call: ModuleCall, lead: Sequence[int], heads: int | None) -> Found | None:
    """Of the attention that a module has come to: where its heads are; None if that cannot be told.

    First an axis of an input is looked for that counts the sequences, if it is known how many there are; then all
    axes together. An input with more than three axes may have heads among them, so it must agree with their number.
    """
    first = Traced(call.attentions)
    if not ran(call, first) or first.lead != tuple(lead):
        return None
    inputs = [Answers(call, number, tuple(x.shape)) for number, x in enumerate(first.inputs[:INPUTS])]
    if heads and math.prod(lead) % heads == 0:
        for each in inputs:
            found = [axis for axis, size in enumerate(each.shape) if size * heads == math.prod(lead)]
            fits = [Found(index, each.shape, axis) for axis in found if has(index := grouped(each.along(axis)), heads)]
            if fits:
                same = all(torch.equal(one.index_BH, fits[0].index_BH) for one in fits)
                return fits[0] if same else None
    alike = grouped([answer for each in inputs if len(each.shape) <= 3 for answer in each.all()])
    if alike is not None:
        return Found(alike)
    alone = (grouped(each.all()) for each in inputs if len(each.shape) > 3)
    return next((Found(index) for index in alone if has(index, heads)), None)


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


class Answers:
    """Runs of a module with parts of one input of a projection set to NaN."""

    def __init__(self, call: ModuleCall, number: int, shape: tuple[int, ...]) -> None:
        self.call, self.number, self.shape = call, number, shape

    def all(self) -> list[Tensor]:
        """Along all axes but the last."""
        return [answer for axis in range(len(self.shape) - 1) for answer in self.along(axis)]

    def along(self, axis: int) -> list[Tensor]:
        """For each bit of an index along the axis, and each of its values, the entries of the logits that become NaN.

        Nothing if this input does not matter at all.
        """
        index = torch.arange(self.shape[axis])
        answers: list[Tensor] = []
        for bit in range((self.shape[axis] - 1).bit_length()):
            for value in (0, 1):
                picked = (index >> bit & 1) == value
                run = Traced(self.call.attentions, self.number, axis, picked)
                if not ran(self.call, run) or run.answer is None:
                    return []
                answers.append(run.answer)
            if not (answers[0] | answers[1]).any():
                return []
        return answers


class ReachedError(Exception):
    """Ends a run whose attention has been seen."""


class Traced(Catch):
    """While entered, sets a part of one input of a projection to NaN, and notes what of the logits becomes NaN.

    `attention`: how many others come before it. `number`: of the input, in the order in which projections are called.
    """

    def __init__(self, attention: int, number: int = -1, axis: int = 0, picked: Tensor | None = None) -> None:
        super().__init__(lambda _: None)
        self.attention, self.number, self.axis, self.picked = attention, number, axis, picked
        self.inputs: list[Tensor] = []
        self.lead: tuple[int, ...] | None = None
        self.answer: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the function, with another input if it is a projection of that one."""
        kwargs = kwargs or {}
        x = self._input(func, args, kwargs)
        if x is not None:
            if not any(x is each for each in self.inputs):
                self.inputs.append(x)
            if self.picked is not None and len(self.inputs) > self.number and x is self.inputs[self.number]:
                where = self.picked.to(x.device).view(-1, *[1] * (x.ndim - 1 - self.axis))
                args, kwargs = _swapped((args, kwargs), x, x.masked_fill(where, torch.nan))
        return super().__torch_function__(func, types, args, kwargs)

    def _input(self, func: Any, args: Any, kwargs: Any) -> Tensor | None:
        """What is multiplied by a weight, if anything is."""
        if func is F.linear or func in CONVOLUTION:
            x: Tensor = bound(args, kwargs, "input")[0]
            return x
        if func in MATMUL or func in ADDED_MATMUL or func is torch.einsum:
            factors = tensors_in([*args, *kwargs.values()])[1 if func in ADDED_MATMUL else 0 :]
            others = [factor for factor in factors if not self.trail.is_weight(factor)]
            return others[0] if len(others) == 1 < len(factors) else None
        return None

    def reading(self, *tensors: Tensor, heads: int | None = None) -> Reading:
        """Of the attention that is meant, note the answer and stop."""
        if self.attention > 0:
            self.attention -= 1
            return super().reading(*tensors, heads=heads)
        lead = torch.broadcast_shapes(*(tensor.shape[:-2] for tensor in tensors))
        self.lead = tuple(lead)
        parts = [tensor.isnan().flatten(tensor.ndim - 2).any(-1).expand(lead) for tensor in tensors]
        self.answer = torch.stack(parts).any(0).flatten().cpu()
        raise ReachedError


def ran(call: ModuleCall, mode: Traced) -> bool:
    """Run a module again under the mode, leaving no trace; whether its attention was reached."""
    device, enabled, dtype = call.autocast
    try:
        args, kwargs = copied((call.args, call.kwargs), deep=True)
        with undisturbed(call.module), own_buffers(call.module), own_attributes(call.module):
            with torch.autocast(device, dtype, enabled, cache_enabled=False), mode:
                call.forward(*args, **kwargs)
    except ReachedError:
        return True
    except Exception:  # whatever it is, it did not happen in the forward that is being watched
        return False
    return mode.lead is not None


def _swapped(value: Any, old: Tensor, new: Tensor) -> Any:
    """Nested tuples, lists and dicts with one tensor in place of another."""
    if type(value) in (tuple, list):
        return type(value)(_swapped(each, old, new) for each in value)
    if isinstance(value, dict):
        return {name: _swapped(each, old, new) for name, each in value.items()}
    return new if value is old else value
