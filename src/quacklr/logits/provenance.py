"""Follow products of two activations through a forward, to tell of a softmax's input whether it is made of logits.

A softmax over experts or words looks like one over keys. What tells them apart is that an attention's comes from a
product of queries with keys, by way of scaling, capping, biases, masks and changes of shape. On the way is noted what
the numbers alone do not tell in the end: which were masked, how they were scaled, what was taken off or put beside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from quacklr.logits.logits import FAR
from quacklr.util.torch_functions import (
    ADD,
    ADDED_MATMUL,
    CONVOLUTION,
    DIVIDE,
    MATMUL,
    MULTIPLY,
    SDPA,
    SOFTMAX,
    SUBTRACT,
    bound,
    tensors_in,
)

STOP: set[Any] = {SDPA, F.linear, F.layer_norm, F.rms_norm, *SOFTMAX, *CONVOLUTION}
SET: Any = Tensor.__setitem__
BESIDE: set[Any] = {torch.cat, torch.concat}
FILL: set[Any] = {torch.masked_fill, Tensor.masked_fill, Tensor.masked_fill_}
MATRIX_T: Any = vars(torch._C.TensorBase)["mT"].__get__
LAYOUT: set[Any] = {
    *(Tensor.view, Tensor.reshape, Tensor.transpose, Tensor.permute, Tensor.flatten, Tensor.unflatten, Tensor.movedim),
    *(Tensor.unsqueeze, Tensor.squeeze, Tensor.swapaxes, Tensor.__getitem__, MATRIX_T),
    *(torch.reshape, torch.transpose, torch.permute, torch.flatten, torch.unflatten, torch.movedim, torch.unsqueeze),
    *(torch.squeeze, torch.swapaxes),
}


@dataclass(frozen=True, slots=True, eq=False)
class Mark:
    """What is known of a tensor that is made of products.

    `keys`: how many of its columns are, after the first `front`. `hidden`: which entries were masked, in a shape that
    broadcasts to it. `factors`: what the products were multiplied by. `taken`: numbers that were taken off since, one
    for each row.
    """

    keys: int
    front: int = 0
    hidden: Tensor | None = None
    factors: tuple[float | Tensor, ...] = ()
    taken: Tensor | None = None

    def hiding(self, more: Tensor) -> Mark:
        """With these masked too."""
        if self.hidden is not None and alike(self.hidden, more):
            more = self.hidden | more
        return replace(self, hidden=more)


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A call of a function that was given a marked tensor."""

    func: Any
    args: Sequence[Any]
    kwargs: dict[str, Any]
    marked: Tensor
    others: list[Tensor]  # marked as well
    marks: list[Mark]  # of the others

    def bound(self, *names: str) -> list[Any]:
        """Arguments by name."""
        return bound(self.args, self.kwargs, *names)

    def other(self) -> Any:
        """The second of two operands."""
        left, right = self.bound("input", "other")
        return right if left is self.marked else left

    def has(self, tensor: Any) -> bool:
        """Whether something is a marked tensor too."""
        return any(tensor is each for each in self.others)


class Provenance:
    """The marks of the tensors of a forward, as long as they live."""

    def __init__(self) -> None:
        self.marks: Any = WeakTensorKeyDictionary()
        self.learned: Any = WeakTensorKeyDictionary()  # casts and the like of weights, but not their products
        self.sizes: set[tuple[int, ...]] = set()  # of all products

    def mark_of(self, tensor: Tensor) -> Mark | None:
        """The mark of what goes into a softmax; None if it is not made of products.

        Of the size of a product is enough: some mix the logits of their heads with a weight.
        """
        mark: Mark | None = self.marks.get(tensor)
        if mark is None and tuple(sorted(tensor.shape)) in self.sizes:
            return Mark(tensor.shape[-1])
        return mark

    def follow(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], output: Any) -> None:
        """Mark what a function put out, if it is a product or made of something marked."""
        if func in STOP or not tensors_in([output] if func is not SET else args[:1]):
            return
        tensors = tensors_in([*args, *kwargs.values()])
        if func in MATMUL or func in ADDED_MATMUL or func is torch.einsum:
            self._multiplied(func, tensors, kwargs, output)
        elif tensors and all(map(self.is_weight, tensors)):
            self.learned.update(dict.fromkeys(tensors_in([output])))
        elif self.marks:
            given = [tensor for tensor in tensors if tensor in self.marks]
            if given:
                marks = [self.marks[tensor] for tensor in given[1:]]
                self._passed(Call(func, args, kwargs, given[0], given[1:], marks), output)

    def _multiplied(self, func: Any, tensors: list[Tensor], kwargs: dict[str, Any], output: Tensor) -> None:
        factors = tensors[1:] if func in ADDED_MATMUL else tensors
        if output.ndim < 3 or len(factors) < 2 or any(map(self.is_weight, factors)):
            return
        hidden = kwargs.get("beta", 1) * tensors[0] <= FAR if func in ADDED_MATMUL else None
        self.marks[output] = Mark(output.shape[-1], hidden=hidden, factors=(float(kwargs.get("alpha", 1.0)),))
        self.sizes.add(tuple(sorted(output.shape)))

    def is_weight(self, tensor: Tensor) -> bool:
        """Whether it is a parameter, a view of one, or a cast and the like."""
        if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
            return True
        return bool(self.learned) and tensor in self.learned

    def _passed(self, call: Call, output: Any) -> None:
        before: Mark = self.marks[call.marked]
        change = next((change for functions, change in CHANGES if call.func in functions), None)
        after = change(before, call) if change else before
        for tensor in tensors_in([call.args[0] if call.func is SET else output]):
            if not tensor.is_floating_point():
                continue
            self.marks[tensor] = reshaped(after, call, tensor)
            base = tensor._base
            if tensor is call.marked and after.hidden is not None and base is not None and base in self.marks:
                self.marks[base] = self.marks[base].hiding(behind(tensor, base, after.hidden))


def behind(view: Tensor, base: Tensor, hidden: Tensor) -> Tensor:
    """What is hidden of the tensor that a view shows a part of."""
    of_base = torch.zeros_like(base, dtype=torch.bool)
    of_base.as_strided(view.shape, view.stride(), view.storage_offset()).copy_(hidden)
    return of_base


def is_far(value: Any, like: Tensor) -> Tensor:
    """Whether what is put in a logit's place masks it."""
    return torch.as_tensor(value, device=like.device) <= FAR


def scaled(mark: Mark, call: Call) -> Mark:
    """Times a number or a tensor."""
    other = call.other()
    return mark if call.has(other) else replace(mark, factors=(*mark.factors, other))


def divided(mark: Mark, call: Call) -> Mark:
    """Over a number or a tensor."""
    other = call.other()
    return mark if call.has(other) else replace(mark, factors=(*mark.factors, 1 / other))


def added(mark: Mark, call: Call) -> Mark:
    """Plus a bias or a mask."""
    other = call.other()
    if not isinstance(other, Tensor) or call.has(other):
        return mark
    return mark.hiding(other * call.kwargs.get("alpha", 1) <= FAR)


def subtracted(mark: Mark, call: Call) -> Mark:
    """Less a mask; or less the largest of the row, which no softmax sees, but we would."""
    other = call.other()
    if not isinstance(other, Tensor):
        return mark
    if call.has(other) and other.shape[-1] == 1 < call.marked.shape[-1]:
        return replace(mark, taken=other if mark.taken is None else mark.taken + other)
    return mark if call.has(other) else mark.hiding(other * call.kwargs.get("alpha", 1) >= -FAR)


def filled(mark: Mark, call: Call) -> Mark:
    """With a number in some places."""
    filled, mask, value = call.bound("input", "mask", "value")
    return mark.hiding(mask & is_far(value, mask)) if filled is call.marked else mark


def chosen(mark: Mark, call: Call) -> Mark:
    """Where a condition holds, or where it does not; something else in the other places."""
    condition, first, second = call.bound("condition", "input", "other")
    if call.func is Tensor.where:  # x.where(condition, other)
        condition, first = first, condition
    if first is call.marked and not call.has(second):
        return mark.hiding(~condition & is_far(second, condition))
    return mark.hiding(condition & is_far(first, condition)) if second is call.marked else mark


def overwritten(mark: Mark, call: Call) -> Mark:
    """logits[index] = value"""
    written, index, value = call.bound("input", "index", "value")
    if written is not call.marked:  # products, written into something else
        return Mark(written.shape[-1])
    if call.has(value):
        return mark
    hidden = torch.zeros_like(call.marked, dtype=torch.bool)
    hidden[index] = is_far(value, hidden)
    return mark.hiding(hidden)


def beside(mark: Mark, call: Call) -> Mark:
    """With other columns before or after it, products too or not."""
    tensors, dim = call.bound("tensors", "dim")
    if dim not in (-1, call.marked.ndim - 1):
        return replace(mark, hidden=None, taken=None)
    marks = {id(tensor): of for tensor, of in zip((call.marked, *call.others), (mark, *call.marks), strict=True)}
    widths = [each.shape[-1] for each in tensors]
    of_products = [id(each) in marks for each in tensors]
    first, last = of_products.index(True), len(tensors) - of_products[::-1].index(True)
    if any(each.hidden is not None for each in marks.values()):
        hidden = torch.cat([_hidden(each, marks.get(id(each))) for each in tensors], dim=-1)
        mark = replace(mark, hidden=hidden)
    return replace(mark, front=sum(widths[:first]), keys=sum(widths[first:last]), taken=None)


def _hidden(tensor: Tensor, mark: Mark | None) -> Tensor:
    if mark is None or mark.hidden is None:
        return torch.zeros_like(tensor, dtype=torch.bool)
    return mark.hidden.expand(tensor.shape)


def reshaped(mark: Mark, call: Call, output: Tensor) -> Mark:
    """The mark of what a function put out, whose shape may be another one."""
    if output.shape[-1:] != call.marked.shape[-1:] and call.func not in BESIDE and call.func is not SET:
        mark = replace(mark, keys=output.shape[-1] if output.ndim else 1, front=0)
    if call.func in LAYOUT:
        mark = replace(mark, hidden=along(mark.hidden, call), taken=along(mark.taken, call))
    hidden, taken = (t if t is not None and fits(t, output) else None for t in (mark.hidden, mark.taken))
    return replace(mark, hidden=hidden, taken=taken)


def along(beside: Tensor | None, call: Call) -> Tensor | None:
    """What belongs to a tensor, entry by entry, after the same change of shape."""
    if beside is None or not fits(beside, call.marked) or not call.args or call.args[0] is not call.marked:
        return None
    changed: Tensor = call.func(beside.expand_as(call.marked).contiguous(), *call.args[1:], **call.kwargs)
    return changed


def alike(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors can be broadcast to the same shape."""
    return all(1 in sizes or len(set(sizes)) == 1 for sizes in zip(one.shape[::-1], other.shape[::-1], strict=False))


def fits(tensor: Tensor, other: Tensor) -> bool:
    """Whether it can be broadcast to the other's shape."""
    sizes = zip(reversed(tensor.shape), reversed(other.shape), strict=False)
    return tensor.ndim <= other.ndim and all(size in (1, wanted) for size, wanted in sizes)


CHANGES: tuple[tuple[set[Any], Callable[[Mark, Call], Mark]], ...] = (
    *((MULTIPLY, scaled), (DIVIDE, divided), (ADD, added), (SUBTRACT, subtracted)),
    *((FILL, filled), ({torch.where, Tensor.where}, chosen), ({SET}, overwritten), (BESIDE, beside)),
)
