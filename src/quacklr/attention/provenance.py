"""Track tensors that were computed from q . k through a forward pass.

A softmax over experts or over a vocabulary looks like one over keys. The difference is where its input comes from: the
input of an attention's softmax is a product of queries and keys that was scaled, capped, biased, masked or reshaped.
The tracker also records what the values alone do not show: which logits were masked, what was subtracted, and which
columns are not keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from quacklr.attention.logits import MASKING
from quacklr.util import torch_functions as ops
from quacklr.util.torch_functions import Product, bound, product_of, tensors_in

END: set[Any] = {ops.SDPA, F.linear, F.layer_norm, F.rms_norm, *ops.SOFTMAX, *ops.CONVOLUTION}  # outputs are not logits
NO_MASK, NO_SHIFT = torch.tensor(False, device="cpu"), torch.tensor(0.0, device="cpu")


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """The recorded origin of a tensor that was computed from q . k.

    Its columns from `first_key` on are `keys` keys; `queries` is the axis of the queries. `masked`: boolean.
    `subtracted`: what was subtracted since, one number for each row. Both broadcast to the tensor.
    """

    keys: int
    first_key: int = 0
    queries: int = -2
    masked: Tensor = NO_MASK
    subtracted: Tensor = NO_SHIFT


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
        known = Origin(tensor.shape[-1]) if tuple(sorted(tensor.shape)) in self._shapes else None
        return self._origins.get(tensor, known)

    def is_weight(self, tensor: Tensor) -> bool:
        """Whether a tensor is a parameter, a view of one, or a function of parameters alone."""
        return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter) or tensor in self._weights

    def track(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], output: Any) -> None:
        """Record the origin of a function's output, if it is a product or was computed from tracked tensors."""
        changed = [t for t in tensors_in(args[0] if func is ops.SET_ITEM else output) if t.is_floating_point()]
        if func in END or not changed:
            return
        tensors = tensors_in((args, kwargs))
        if product := product_of(func, args, kwargs):
            self._track_product(product, kwargs, output)
        elif tensors and all(map(self.is_weight, tensors)):
            self._weights.update(dict.fromkeys(changed))
        elif self._origins and (logits := next((t for t in tensors if t in self._origins), None)) is not None:
            origin = self._changed(func, args, kwargs, logits, changed[0])
            for tensor in changed:
                self._set(tensor, origin, in_place=tensor is logits)

    def _track_product(self, product: Product, kwargs: dict[str, Any], output: Tensor) -> None:
        if output.ndim < 3 or len(product.factors) < 2 or any(map(self.is_weight, product.factors)):
            return
        queries = product.labels.rows_axis() if product.labels else -2
        masked = NO_MASK if product.summand is None else self._masks(product.summand, kwargs.get("beta", 1))
        self._origins[output] = Origin(output.shape[-1], queries=queries, masked=masked)
        self._shapes.add(tuple(sorted(output.shape)))

    def _set(self, tensor: Tensor, origin: Origin, in_place: bool) -> None:
        masked = origin.masked if fits(origin.masked, tensor) else NO_MASK
        subtracted = origin.subtracted if fits(origin.subtracted, tensor) else NO_SHIFT
        self._origins[tensor] = replace(origin, masked=masked, subtracted=subtracted)
        base = tensor._base if in_place and masked.ndim else None
        if base is not None and base in self._origins:  # the base is masked too
            in_base = torch.zeros_like(base, dtype=torch.bool)
            in_base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).copy_(masked)
            self._origins[base] = replace(self._origins[base], masked=self._masks(base) | in_base)

    def _masks(self, value: Any, factor: float = 1) -> Tensor:
        """Where a value masks the logit that it is added to or written over. Of logits: where they are masked."""
        if isinstance(value, Tensor) and value in self._origins:
            return self._origins[value].masked
        return (value if isinstance(value, Tensor) else torch.tensor(value, device="cpu")) * factor <= MASKING

    def _changed(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], logits: Tensor, out: Tensor) -> Origin:
        """The origin of what a function has computed from logits."""
        origin: Origin = self._origins[logits]
        if func in ops.CAT:
            return self._concatenated(origin, *bound(args, kwargs, "tensors", "dim"))
        if func is ops.SET_ITEM:
            target, index, value = args
            masked = self._masks(target).expand_as(target).clone()
            masked[index] = self._masks(value)
            known = self._origins.get(target, Origin(target.shape[-1]))
            return replace(known, masked=masked, subtracted=origin.subtracted)
        if out.shape[-1:] != logits.shape[-1:]:
            origin = replace(origin, keys=out.shape[-1] if out.ndim else 1, first_key=0)
        if func in ops.LAYOUT:  # a model that changes the order of axes is taken to bring the queries before the keys
            of_rows = (origin.masked, origin.subtracted)
            masked, subtracted = (same_layout(each, func, args, kwargs, logits) for each in of_rows)
            return replace(origin, queries=-2, masked=masked, subtracted=subtracted)
        if func in ops.ADD or func in ops.SUBTRACT:
            one, two = bound(args, kwargs, "input", "other")
            sign = -1 if func in ops.SUBTRACT else 1
            is_row = isinstance(two, Tensor) and two in self._origins and two.shape[-1:] in ((), (1,))
            if sign < 0 and is_row and one is logits and logits.shape[-1] > 1:  # the softmax does not depend on it
                origin = replace(origin, subtracted=origin.subtracted + torch.atleast_1d(two))
            return replace(origin, masked=self._masks(one) | self._masks(two, sign * kwargs.get("alpha", 1)))
        if func in ops.FILL:
            one, condition, two = bound(args, kwargs, "input", "mask", "value")
        elif func in ops.WHERE:
            condition, two, one = bound(args, kwargs, "condition", "input", "other")
            if func is Tensor.where:  # x.where(condition, other)
                condition, two = two, condition
        else:
            return origin
        return replace(origin, masked=torch.where(condition, self._masks(two), self._masks(one)))

    def _concatenated(self, origin: Origin, tensors: Sequence[Tensor], dim: int | None) -> Origin:
        """The origin of logits that were concatenated with each other or with other columns."""
        masked = torch.cat([self._masks(each).expand_as(each) for each in tensors], dim or 0)
        if dim in (-1, tensors[0].ndim - 1):
            widths = [each.shape[-1] for each in tensors]
            tracked = [i for i, each in enumerate(tensors) if each in self._origins]
            start, stop = tracked[0], tracked[-1] + 1
            origin = replace(origin, first_key=sum(widths[:start]), keys=sum(widths[start:stop]))
        return replace(origin, masked=masked, subtracted=NO_SHIFT)


def same_layout(of: Tensor, func: Any, args: Sequence[Any], kwargs: dict[str, Any], logits: Tensor) -> Tensor:
    """A tensor that broadcasts to logits, after the same change of shape."""
    if not of.ndim:
        return of
    of = of.expand_as(logits).contiguous()
    args = [of if each is logits else each for each in args]
    return func(*args, **{name: of if each is logits else each for name, each in kwargs.items()})


def fits(tensor: Tensor, other: Tensor) -> bool:
    """Whether a tensor can be broadcast to the shape of another."""
    sizes = zip(reversed(tensor.shape), reversed(other.shape), strict=False)
    return tensor.ndim <= other.ndim and all(size in (1, wanted) for size, wanted in sizes)
