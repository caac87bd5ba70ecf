"""Run an attention module again with parts of its input set to NaN, to see which logits depend on them.

NaN is put in what every head reads: what goes into a projection. A mask or a position bias does not, and may have an
axis of heads itself. NaN passes through weights that are zero, and no rounding can hide it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quacklr.calls import ADDED_MATMUL, CONVOLUTION, MATMUL, bound, copied, tensors_in
from quacklr.intercept import Catch, ModuleCall, Reading
from quacklr.modules import own_attributes, own_buffers, undisturbed

INPUTS = 8  # that are tried


def inputs_of(call: ModuleCall, lead: tuple[int, ...]) -> list[Input]:
    """What all heads read: arguments of the module, and inputs of projections that are not made of arguments."""
    shapes = [tuple(tensor.shape) for tensor in call.tensors]
    arguments = [Input(call, shape, i) for i, shape in enumerate(shapes) if call.tensors[i].is_floating_point()]
    every = Traced(call.attentions)
    if not ran(call, every, range(len(shapes))) or every.lead != lead:
        return []
    own = [Input(call, tuple(x.shape), projection=i) for i, x in enumerate(every.inputs) if not x.isnan().any()]
    return [*arguments, *own][:INPUTS]


@dataclass(frozen=True, slots=True, eq=False)
class Input:
    """An argument of a module, or what one of its projections is given, parts of which are set to NaN."""

    call: ModuleCall
    shape: tuple[int, ...]
    argument: int = -1
    projection: int = -1

    def batch(self, axis: int) -> tuple[int, int] | None:
        """The axis of an argument."""
        return (self.argument, axis) if self.argument >= 0 else None

    def all(self) -> list[Tensor]:
        """Along all axes but the last."""
        return [answer for axis in range(len(self.shape) - 1) for answer in self.along(axis)]

    def along(self, axis: int) -> list[Tensor]:
        """For each bit of an index along the axis, and each of its values, the entries of the logits that become NaN.

        Nothing if they do not depend on it, or not by a projection (masks, position biases).
        """
        index = torch.arange(self.shape[axis])
        answers: list[Tensor] = []
        for bit in range((self.shape[axis] - 1).bit_length()):
            runs = [self._run(axis, (index >> bit & 1) == value) for value in (0, 1)]
            if any(run is None or run.answer is None or not run.projected for run in runs):
                return []
            answers += [run.answer for run in runs if run is not None and run.answer is not None]
            if not (answers[0] | answers[1]).any():
                return []
        return answers

    def _run(self, axis: int, picked: Tensor) -> Traced | None:
        where = picked.view(-1, *[1] * (len(self.shape) - 1 - axis))
        run = Traced(self.call.attentions, self.projection, where)
        arguments = [self.argument] if self.argument >= 0 else []
        return run if ran(self.call, run, arguments, where) else None


class ReachedError(Exception):
    """Ends a run whose attention has been seen."""


class Traced(Catch):
    """While entered, sets a part of the input of a projection to NaN, and notes what of the logits is NaN.

    `attention`: how many others come before it. `projection`: the number of its input, in the order of calls.
    """

    def __init__(self, attention: int, projection: int = -1, where: Tensor | None = None) -> None:
        super().__init__(lambda _: None)
        self.attention, self.projection, self.where = attention, projection, where
        self.inputs: list[Tensor] = []
        self.projected = False  # whether what is NaN went into a projection
        self.lead: tuple[int, ...] | None = None
        self.answer: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the function, with another input if it is a projection of that one."""
        kwargs = kwargs or {}
        x = self._input(func, args, kwargs)
        if x is not None:
            if len(self.inputs) < INPUTS and not any(x is each for each in self.inputs):
                self.inputs.append(x)
            if any(x is each for each in self.inputs[self.projection :][:1]) and self.projection >= 0:
                args, kwargs = swapped((args, kwargs), x, with_nan(x, self.where))
                self.projected = True
            self.projected = self.projected or bool(x.isnan().any())
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


def ran(call: ModuleCall, mode: Traced, arguments: Iterable[int], where: Tensor | None = None) -> bool:
    """Run a module again, without a trace, with parts of some arguments set to NaN; whether it got to its attention."""
    device, enabled, dtype = call.autocast
    given = copied((call.args, call.kwargs), deep=True)
    try:
        with undisturbed(call.module), own_buffers(call.module), own_attributes(call.module):
            tensors = tensors_in([*given[0], *given[1].values()])
            for tensor in [tensors[i] for i in arguments if tensors[i].is_floating_point()]:
                given = swapped(given, tensor, with_nan(tensor, where))
            with torch.autocast(device, dtype, enabled, cache_enabled=False), mode:
                call.forward(*given[0], **given[1])
    except ReachedError:
        return True
    except Exception:  # whatever it is, it did not happen in the forward that is being watched
        return False
    return mode.lead is not None


def with_nan(tensor: Tensor, where: Tensor | None) -> Tensor:
    """A tensor with NaN in some places, or in all."""
    return (
        torch.full_like(tensor, torch.nan) if where is None else tensor.masked_fill(where.to(tensor.device), torch.nan)
    )


def swapped(value: Any, old: Tensor, new: Tensor) -> Any:
    """Nested tuples, lists and dicts with one tensor in place of another."""
    if type(value) in (tuple, list):
        return type(value)(swapped(each, old, new) for each in value)
    if isinstance(value, dict):
        return {name: swapped(each, old, new) for name, each in value.items()}
    return new if value is old else value
