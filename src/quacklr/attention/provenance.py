"""Track tensors that were computed from q . k through a forward pass.

A softmax over experts or over a vocabulary looks like one over keys. The difference is where its input comes from: the
input of an attention's softmax is a product of queries and keys that was scaled, capped, biased, masked or reshaped.
The tracker also records what the values alone do not show: which logits were masked, by what they were scaled, what
was subtracted, and which columns are not keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from quacklr.attention.logits import MASKING
from quacklr.util import torch_functions as ops
from quacklr.util.products import Product, product_of
from quacklr.util.torch_functions import bound, tensors_in

END: set[Any] = {ops.SDPA, F.linear, F.layer_norm, F.rms_norm, *ops.SOFTMAX, *ops.CONVOLUTION}  # outputs are not logits


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """The recorded origin of a tensor that was computed from q . k.

    Its columns from `first_key` on are `keys` keys; `queries` is the axis of the queries. `masked`: boolean, broadcasts
    to the tensor. `factors`: what q . k was multiplied by. `subtracted`: numbers that were subtracted since, one for
    each row.
    """

    keys: int
    first_key: int = 0
    queries: int = -2
    masked: Tensor | None = None
    factors: tuple[float | Tensor, ...] = ()
    subtracted: Tensor | None = None

    def masking(self, more: Tensor) -> Origin:
        """The same origin with more logits masked."""
        if self.masked is not None and is_broadcastable(self.masked, more):
            more = self.masked | more
        return replace(self, masked=more)


@dataclass(frozen=True, slots=True, eq=False)
class TrackedCall:
    """A call of a torch function with at least one tracked tensor; `origins` has all of them, by id."""

    func: Any
    args: Sequence[Any]
    kwargs: dict[str, Any]
    tensor: Tensor  # the first tracked one
    origins: dict[int, Origin]

    def bound(self, *names: str) -> list[Any]:
        """Arguments by name."""
        return bound(self.args, self.kwargs, *names)

    def is_tracked(self, value: Any) -> bool:
        """Whether a value is one of the tracked tensors."""
        return id(value) in self.origins

    def operand(self) -> Any:
        """The other one of two operands; None if it is tracked as well."""
        left, right = self.bound("input", "other")
        other = right if left is self.tensor else left
        return None if self.is_tracked(other) else other


class ProvenanceTracker:
    """The origins of the tensors of a forward pass, as long as the tensors live."""

    def __init__(self) -> None:
        self._origins: Any = WeakTensorKeyDictionary()
        self._weights: Any = WeakTensorKeyDictionary()  # functions of parameters alone, such as casts
        self._shapes: set[tuple[int, ...]] = set()  # shapes of all products, with sorted sizes

    def origin_of(self, tensor: Tensor) -> Origin | None:
        """The origin of a softmax's input; None if it was not computed from q . k.

        A tensor of the shape of a product counts too: some models mix the logits of their heads with a weight.
        """
        origin: Origin | None = self._origins.get(tensor)
        if origin is None and tuple(sorted(tensor.shape)) in self._shapes:
            return Origin(tensor.shape[-1])
        return origin

    def is_weight(self, tensor: Tensor) -> bool:
        """Whether a tensor is a parameter, a view of one, or a function of parameters alone."""
        if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
            return True
        return bool(self._weights) and tensor in self._weights

    def track(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], output: Any) -> None:
        """Record the origin of a function's output, if it is a product or was computed from tracked tensors."""
        changed = tensors_in(args[0] if func is ops.SET_ITEM else output)
        if func in END or not changed:
            return
        tensors = tensors_in((args, kwargs))
        if product := product_of(func, args, kwargs):
            self._track_product(product, kwargs, output)
        elif tensors and all(map(self.is_weight, tensors)):
            self._weights.update(dict.fromkeys(changed))
        elif self._origins and (tracked := [tensor for tensor in tensors if tensor in self._origins]):
            origins = {id(tensor): self._origins[tensor] for tensor in tracked}
            self._track_change(TrackedCall(func, args, kwargs, tracked[0], origins), changed)

    def _track_product(self, product: Product, kwargs: dict[str, Any], output: Tensor) -> None:
        if output.ndim < 3 or len(product.factors) < 2 or any(map(self.is_weight, product.factors)):
            return
        added, queries = product.summand, product.labels.rows_axis() if product.labels else -2
        masked = None if added is None else kwargs.get("beta", 1) * added <= MASKING
        factors = (float(kwargs.get("alpha", 1.0)),)
        self._origins[output] = Origin(output.shape[-1], queries=queries, masked=masked, factors=factors)
        self._shapes.add(tuple(sorted(output.shape)))

    def _track_change(self, call: TrackedCall, changed: Sequence[Tensor]) -> None:
        origin = call.origins[id(call.tensor)]
        change = next((change for functions, change in CHANGES if call.func in functions), None)
        origin = change(origin, call) if change else origin
        for tensor in changed:
            if not tensor.is_floating_point():
                continue
            self._origins[tensor] = reshaped(origin, call, tensor)
            base = tensor._base
            if tensor is call.tensor and origin.masked is not None and base is not None and base in self._origins:
                self._origins[base] = self._origins[base].masking(mask_of_base(tensor, base, origin.masked))


def mask_of_base(view: Tensor, base: Tensor, masked: Tensor) -> Tensor:
    """The mask of a tensor, given the mask of a view of it."""
    base_mask = torch.zeros_like(base, dtype=torch.bool)
    base_mask.as_strided(view.shape, view.stride(), view.storage_offset()).copy_(masked)
    return base_mask


def is_masking(value: Any, like: Tensor) -> Tensor:
    """Whether a value masks the logit that it replaces."""
    return torch.as_tensor(value, device=like.device) <= MASKING


def scaled(origin: Origin, call: TrackedCall) -> Origin:
    """logits * number or tensor, logits / number or tensor."""
    other = call.operand()
    if other is None:
        return origin
    return replace(origin, factors=(*origin.factors, 1 / other if call.func in ops.DIVIDE else other))


def added(origin: Origin, call: TrackedCall) -> Origin:
    """logits + bias or mask."""
    other = call.operand()
    return origin.masking(other * call.kwargs.get("alpha", 1) <= MASKING) if isinstance(other, Tensor) else origin


def subtracted(origin: Origin, call: TrackedCall) -> Origin:
    """logits - mask, or logits - their largest in the row, which does not change the softmax."""
    other = call.operand()
    if isinstance(other, Tensor):
        return origin.masking(other * call.kwargs.get("alpha", 1) >= -MASKING)
    left, right = call.bound("input", "other")
    of_row = right if left is call.tensor else left
    if isinstance(of_row, Tensor) and of_row.shape[-1] == 1 < call.tensor.shape[-1]:
        return replace(origin, subtracted=of_row if origin.subtracted is None else origin.subtracted + of_row)
    return origin


def filled(origin: Origin, call: TrackedCall) -> Origin:
    """logits.masked_fill(mask, value)."""
    target, mask, value = call.bound("input", "mask", "value")
    return origin.masking(mask & is_masking(value, mask)) if target is call.tensor else origin


def selected(origin: Origin, call: TrackedCall) -> Origin:
    """torch.where(condition, logits, value), or with the value first."""
    condition, first, second = call.bound("condition", "input", "other")
    if call.func is Tensor.where:  # x.where(condition, other)
        condition, first = first, condition
    if first is call.tensor and not call.is_tracked(second):
        return origin.masking(~condition & is_masking(second, condition))
    return origin.masking(condition & is_masking(first, condition)) if second is call.tensor else origin


def assigned(origin: Origin, call: TrackedCall) -> Origin:
    """logits[index] = value, or tensor[index] = logits."""
    target, index, value = call.bound("input", "index", "value")
    if target is not call.tensor:
        return Origin(target.shape[-1])
    if call.is_tracked(value):
        return origin
    masked = torch.zeros_like(target, dtype=torch.bool)
    masked[index] = is_masking(value, masked)
    return origin.masking(masked)


def concatenated(origin: Origin, call: TrackedCall) -> Origin:
    """torch.cat of logits with each other or with other columns."""
    tensors, dim = call.bound("tensors", "dim")
    if dim not in (-1, call.tensor.ndim - 1):
        return replace(origin, masked=None, subtracted=None)
    origins = [call.origins.get(id(each)) for each in tensors]
    if any(each.masked is not None for each in call.origins.values()):
        masks = [mask_of(each, of) for each, of in zip(tensors, origins, strict=True)]
        origin = replace(origin, masked=torch.cat(masks, dim=-1))
    widths = [each.shape[-1] for each in tensors]
    tracked = [i for i, of in enumerate(origins) if of is not None]
    start, stop = tracked[0], tracked[-1] + 1
    return replace(origin, first_key=sum(widths[:start]), keys=sum(widths[start:stop]), subtracted=None)


def mask_of(tensor: Tensor, origin: Origin | None) -> Tensor:
    """The mask of a tensor, in its shape."""
    if origin is None or origin.masked is None:
        return torch.zeros_like(tensor, dtype=torch.bool)
    return origin.masked.expand(tensor.shape)


def reshaped(origin: Origin, call: TrackedCall, output: Tensor) -> Origin:
    """The origin of a function's output, whose shape may differ from that of its input.

    A model that changes the order of axes after q . k is taken to bring the queries before the keys.
    """
    if output.shape[-1:] != call.tensor.shape[-1:] and call.func not in ops.CAT and call.func is not ops.SET_ITEM:
        origin = replace(origin, keys=output.shape[-1] if output.ndim else 1, first_key=0)
    masked, row_shift = origin.masked, origin.subtracted
    if call.func in ops.LAYOUT:
        origin = replace(origin, queries=-2)
        masked, row_shift = same_layout(masked, call), same_layout(row_shift, call)
    masked, row_shift = (t if t is not None and fits(t, output) else None for t in (masked, row_shift))
    return replace(origin, masked=masked, subtracted=row_shift)


def same_layout(mask: Tensor | None, call: TrackedCall) -> Tensor | None:
    """A mask of the tracked tensor after the same change of shape."""
    if mask is None or not fits(mask, call.tensor) or not call.args or call.args[0] is not call.tensor:
        return None
    changed: Tensor = call.func(mask.expand_as(call.tensor).contiguous(), *call.args[1:], **call.kwargs)
    return changed


def is_broadcastable(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors can be broadcast to one shape."""
    return all(1 in sizes or len(set(sizes)) == 1 for sizes in zip(one.shape[::-1], other.shape[::-1], strict=False))


def fits(tensor: Tensor, other: Tensor) -> bool:
    """Whether a tensor can be broadcast to the shape of another."""
    sizes = zip(reversed(tensor.shape), reversed(other.shape), strict=False)
    return tensor.ndim <= other.ndim and all(size in (1, wanted) for size, wanted in sizes)


CHANGES: tuple[tuple[set[Any], Callable[[Origin, TrackedCall], Origin]], ...] = (
    *((ops.MULTIPLY | ops.DIVIDE, scaled), (ops.ADD, added), (ops.SUBTRACT, subtracted), (ops.FILL, filled)),
    *((ops.WHERE, selected), ({ops.SET_ITEM}, assigned), (ops.CAT, concatenated)),
)
