"""Run an attention module again with parts of its input set to NaN, to see which logits depend on them.

NaN is put in what every head reads: what goes into a projection. A mask or a position bias does not, and may have an
axis of heads itself. Or it is put in a single output of a projection, which one head alone may read. NaN passes
through weights that are zero, and no rounding can hide it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product as every
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quacklr.logits.interceptor import AttentionInterceptor, Reading
from quacklr.util.module_stack import ModuleCall
from quacklr.util.modules import own_attributes, own_buffers, undisturbed
from quacklr.util.torch_functions import ADDED_MATMUL, CONVOLUTION, MATMUL, bound, copied, tensors_in

INPUTS = 4  # that are tried
OUTPUTS = 8  # projections of which some outputs are tried
PLAIN = (Tensor, nn.Module, str, int, float, type(None), torch.dtype, torch.device)


@dataclass(frozen=True, slots=True, eq=False)
class Reruns:
    """Runs of a module up to the attention that it has come to. They leave no trace.

    Objects among its arguments, such as caches of keys and values, are left out, or else are copied. In the first run
    all arguments were NaN, or else none.
    """

    call: ModuleCall
    with_objects: bool
    all_nan: bool
    first: Traced

    @classmethod
    def of(cls, call: ModuleCall, lead: tuple[int, ...]) -> Self | None:
        """None if the module does not run again, or its attention has other leading axes then."""
        for all_nan, with_objects in every((True, False), (False, True)):
            runs = cls(call, with_objects, all_nan, Traced(call.attentions))
            if runs.run(runs.first, range(len(call.tensors) * all_nan)) and runs.first.lead == lead:
                return runs
        return None

    def inputs(self) -> list[Input]:
        """What all heads read: arguments of the module, and inputs of projections that are not made of arguments."""
        given = [
            Input(self, tuple(tensor.shape), argument=i)
            for i, tensor in enumerate(self.call.tensors)
            if tensor.is_floating_point()
        ]
        own = [
            Input(self, tuple(x.shape), projection=i) for i, x in enumerate(self.first.inputs) if not x.isnan().any()
        ]
        return [*given, *own][:INPUTS]

    def by_outputs(self) -> Iterator[Tensor]:
        """The entries of the logits that become NaN with one output of a projection, for some of its outputs."""
        for number, size in enumerate(self.first.outputs):
            for output in dict.fromkeys((0, size // 3, 2 * size // 3, size - 1)):
                run = Traced(self.call.attentions, output=(number, output))
                if self.run(run, ()) and run.answer is not None:
                    yield run.answer

    def run(self, mode: Traced, arguments: Iterable[int], where: Tensor | None = None) -> bool:
        """Set parts of some arguments to NaN; whether the attention was reached."""
        module, (device, enabled, dtype) = self.call.module, self.call.autocast
        given = self.call.args, self.call.kwargs
        given = copied(given if self.with_objects else without_objects(given), deep=True)
        try:
            with undisturbed(module), own_buffers(module), own_attributes(module):
                tensors = tensors_in([*given[0], *given[1].values()])
                for tensor in [tensors[i] for i in arguments if tensors[i].is_floating_point()]:
                    given = swapped(given, tensor, with_nan(tensor, where))
                with torch.autocast(device, dtype, enabled, cache_enabled=False), mode:
                    self.call.forward(*given[0], **given[1])
        except ReachedError:
            return True
        except Exception:  # whatever it is, it did not happen in the forward that is being watched
            return False
        return mode.lead is not None


@dataclass(frozen=True, slots=True, eq=False)
class Input:
    """An argument of a module, or what one of its projections is given, parts of which are set to NaN."""

    runs: Reruns
    shape: tuple[int, ...]
    argument: int = -1
    projection: int = -1

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
            for value in (0, 1):
                where = ((index >> bit & 1) == value).view(-1, *[1] * (len(self.shape) - 1 - axis))
                run = Traced(self.runs.call.attentions, self.projection, where)
                ran = self.runs.run(run, [self.argument] if self.argument >= 0 else [], where)
                if not ran or run.answer is None or not run.projected:
                    return []
                answers.append(run.answer)
            if not (answers[0] | answers[1]).any():
                return []
        return answers


class ReachedError(Exception):
    """Ends a run whose attention has been seen."""


class Traced(AttentionInterceptor):
    """While entered, sets a part of an input or output of a projection to NaN, and notes what of the logits is NaN.

    `attention`: how many others come before it. `projection`: the number of its input, each counted once. `output`:
    the number of a projection whose outputs are its last axis, and of one of these.
    """

    def __init__(
        self, attention: int, projection: int = -1, where: Tensor | None = None, output: tuple[int, int] = (-1, 0)
    ) -> None:
        super().__init__(lambda _: None)
        self.attention, self.projection, self.where, self.output = attention, projection, where, output
        self.inputs: list[Tensor] = []
        self.outputs: list[int] = []  # how many each has
        self.projected = False  # whether what is NaN went into a projection
        self.lead: tuple[int, ...] | None = None
        self.answer: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the function; with another input, or output, if it is that projection."""
        kwargs = kwargs or {}
        x, outputs_last = self._input(func, args, kwargs)
        if x is not None:
            if len(self.inputs) < INPUTS and not any(x is each for each in self.inputs):
                self.inputs.append(x)
            if self.projection >= 0 and any(x is each for each in self.inputs[self.projection :][:1]):
                args, kwargs = swapped((args, kwargs), x, with_nan(x, self.where))
                self.projected = True
            self.projected = self.projected or bool(x.isnan().any())
        output = super().__torch_function__(func, types, args, kwargs)
        if outputs_last and len(self.outputs) < OUTPUTS:
            self.outputs.append(output.shape[-1])
            if len(self.outputs) - 1 == self.output[0]:
                output = with_nan(output, torch.arange(output.shape[-1]) == self.output[1])
        return output

    def _input(self, func: Any, args: Any, kwargs: Any) -> tuple[Tensor | None, bool]:
        """What is multiplied by a weight, if anything is; and whether the last axis then counts the weight's rows."""
        if func is F.linear or func in CONVOLUTION:
            return bound(args, kwargs, "input")[0], func is F.linear
        if func in MATMUL or func in ADDED_MATMUL or func is torch.einsum:
            factors = tensors_in([*args, *kwargs.values()])[1 if func in ADDED_MATMUL else 0 :]
            others = [factor for factor in factors if not self.trail.is_weight(factor)]
            if len(others) == 1 < len(factors):
                return others[0], func is not torch.einsum and others[0] is factors[0]
        return None, False

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


def with_nan(tensor: Tensor, where: Tensor | None) -> Tensor:
    """A tensor with NaN in some places, or in all."""
    if where is None:
        return torch.full_like(tensor, torch.nan)
    return tensor.masked_fill(where.to(tensor.device), torch.nan)


def without_objects(value: Any) -> Any:
    """Nested tuples, lists and dicts with None for objects that may remember the call."""
    if type(value) in (tuple, list):
        return type(value)(without_objects(each) for each in value)
    if type(value) is dict:
        return {name: without_objects(each) for name, each in value.items()}
    return value if isinstance(value, PLAIN) or callable(value) else None


def swapped(value: Any, old: Tensor, new: Tensor) -> Any:
    """Nested tuples, lists and dicts with one tensor in place of another."""
    if type(value) in (tuple, list):
        return type(value)(swapped(each, old, new) for each in value)
    if isinstance(value, dict):
        return {name: swapped(each, old, new) for name, each in value.items()}
    return new if value is old else value
