"""Run an attention module again with parts of a tensor set to NaN, to see which logits depend on them.

NaN is written into arguments of the module, or into inputs of its projections, which every head reads; or into a single
output of a projection, which only one head may read. NaN propagates through weights that are zero, and rounding cannot
hide it. An argument that reaches the logits without a projection, such as a mask or a position bias, may have an axis
of heads itself, so it is not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quacklr.attention.axes import HeadOrder
from quacklr.attention.interceptor import AttentionInterceptor, leading_shape
from quacklr.util.module_stack import ModuleCall
from quacklr.util.modules import Arguments, undisturbed
from quacklr.util.torch_functions import CONVOLUTION, bound, copied, factors_of

INPUTS = 4  # arguments, or inputs of projections, that are tried
OUTPUTS = 8  # projections whose outputs are tried


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """An argument of a module's call, or the input of a projection in it, by number."""

    call: ModuleCall
    shape: tuple[int, ...]
    argument: int = -1
    projection: int = -1

    def along_all(self) -> list[Tensor]:
        """`along` for all axes but the last."""
        return [is_nan for axis in range(len(self.shape) - 1) for is_nan in self.along(axis)]

    def along(self, axis: int) -> list[Tensor]:
        """Which entries of the logits' leading axes become NaN, for every bit of an index along an axis.

        For each bit the module runs twice: with NaN where the bit is 0, and where it is 1. Empty if the logits do not
        depend on this tensor, or not through a projection.
        """
        index = torch.arange(self.shape[axis])
        found: list[Tensor] = []
        for bit in range((self.shape[axis] - 1).bit_length()):
            for value in (0, 1):
                where = ((index >> bit & 1) == value).view(-1, *[1] * (len(self.shape) - 1 - axis))
                run = rerun(self.call, self.argument, self.projection, where)
                if run is None or run.is_nan is None or not run.projected:
                    return []
                found.append(run.is_nan)
            if not (found[0] | found[1]).any():
                return []
        return found


def along_outputs(call: ModuleCall, outputs: Sequence[int]) -> list[Tensor]:
    """Which entries of the logits' leading axes become NaN with one output of a projection, for some outputs.

    `outputs`: the number of outputs of each projection.
    """
    tried = [(i, j) for i, n in enumerate(outputs) for j in dict.fromkeys((0, n // 3, 2 * n // 3, n - 1))]
    runs = [rerun(call, output=each) for each in tried]
    return [run.is_nan for run in runs if run is not None and run.is_nan is not None and run.is_nan.any()]


def sources_of(call: ModuleCall, run: Rerun) -> tuple[list[Source], list[Source]]:
    """The floating point arguments of a call, and the inputs of its projections in a run of it."""
    given = [(i, tensor) for i, tensor in enumerate(call.tensors) if tensor.is_floating_point()]
    arguments = [Source(call, tuple(tensor.shape), argument=i) for i, tensor in given[:INPUTS]]
    return arguments, [Source(call, tuple(x.shape), projection=i) for i, x in enumerate(run.inputs)]


def rerun(
    call: ModuleCall,
    argument: int = -1,
    projection: int = -1,
    where: Tensor | None = None,
    output: tuple[int, int] = (-1, 0),
) -> Rerun | None:
    """Run a module again up to its attention, without side effects; None if that is not reached.

    NaN is written into one argument, or into the input of one projection, where `where` is True; or into one output of
    one projection.
    """
    device, enabled, dtype = call.autocast
    given = Arguments(*copied((call.args, call.kwargs), deep=True))
    if argument >= 0:
        source = given.tensors()[argument]
        given = given.map(lambda tensor: with_nan(tensor, where) if tensor is source else tensor)
    run = Rerun(call.attentions, projection, where, output)
    with (
        suppress(Exception),  # the model's own forward pass did not raise this error
        undisturbed(call.module),
        torch.autocast(device, dtype, enabled, cache_enabled=False),
        run,
    ):
        call.forward(*given.args, **given.kwargs)
    return None if run.lead is None else run


class ReachedError(Exception):
    """Ends a run at the attention that is measured."""


class Rerun(AttentionInterceptor):
    """While entered, writes NaN into an input or output of a projection, and raises ReachedError at an attention.

    `attention`: number of attentions before the one to stop at. `inputs`: the first inputs of projections, each once.
    `outputs`: the number of outputs of each projection. `projected`: whether a projection's input had a NaN. `lead`
    and `is_nan`: the leading axes of the logits, and which entries of them, flattened, have a NaN.
    """

    def __init__(self, attention: int, projection: int, where: Tensor | None, output: tuple[int, int]) -> None:
        super().__init__(lambda _: None, self._reach)
        self.attention, self.projection, self.where, self.output = attention, projection, where, output
        self.inputs: list[Tensor] = []
        self.outputs: list[int] = []
        self.projected = False
        self.lead: tuple[int, ...] | None = None
        self.is_nan: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch, with NaN in its input or output if it is the projection in question."""
        kwargs = kwargs or {}
        x, outputs_last = self._projected(func, args, kwargs)
        if x is not None:
            if len(self.inputs) < INPUTS and not any(x is each for each in self.inputs):
                self.inputs.append(x)
            if self.projection >= 0 and any(x is each for each in self.inputs[self.projection :][:1]):
                plain, x = x, with_nan(x, self.where)
                args, kwargs = Arguments(args, kwargs).map(lambda tensor: x if tensor is plain else tensor)
            self.projected = self.projected or bool(x.isnan().any())
        output = super().__torch_function__(func, types, args, kwargs)
        if outputs_last and len(self.outputs) < OUTPUTS:
            self.outputs.append(output.shape[-1])
            if len(self.outputs) - 1 == self.output[0]:
                return with_nan(output, torch.arange(output.shape[-1]) == self.output[1])
        return output

    def _projected(self, func: Any, args: Any, kwargs: Any) -> tuple[Tensor | None, bool]:
        """The activation that a function multiplies by a weight, if it does; and whether outputs are the last axis."""
        if func is F.linear or func in CONVOLUTION:
            return bound(args, kwargs, "input")[0], func is F.linear
        factors = factors_of(func, args, kwargs)
        activations = [factor for factor in factors if not self.provenance.is_weight(factor)]
        if len(activations) == 1 < len(factors):
            return activations[0], func is not torch.einsum and activations[0] is factors[0]
        return None, False

    def _reach(self, tensors: Sequence[Tensor], heads: int | None) -> HeadOrder:
        if self.attention > 0:
            self.attention -= 1
            return HeadOrder(heads)
        self.lead = leading_shape(tensors)
        parts = [tensor.isnan().flatten(tensor.ndim - 2).any(-1).expand(self.lead) for tensor in tensors]
        self.is_nan = torch.stack(parts).any(0).flatten().cpu()
        raise ReachedError


def with_nan(tensor: Tensor, where: Tensor | None) -> Tensor:
    """A copy of a tensor with NaN where a mask is True."""
    return tensor if where is None else tensor.masked_fill(where.to(tensor.device), torch.nan)
