"""A parameter of which this process steps a flat range: DeepSpeed's ZeRO, Megatron's DistributedOptimizer, FSDP1.

These engines flatten the parameters and divide the flat vector among processes. A flat range of a parameter is a few
boxes: index ranges, one for each dimension. A range of a matrix is at most three boxes:

    . . . a a     a   the end of a row
    b b b b b     b   whole rows
    b b b b b
    c c . . .     c   the beginning of a row

A DTensor's shard is one box, so all that works on boxes works on both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Self

import torch
from torch import Tensor

Ranges = tuple[tuple[int, int], ...]  # (start, end) for each dimension


class FlatTensor(Tensor):
    """A tensor with the shape of the whole parameter, of which this process holds some consecutive entries.

    It only describes the parameter, as the global shape of a DTensor does; there are no operations on it. It has the
    dtype and the device of what the optimizer steps, which may be an fp32 copy of a bf16 parameter.

    Attributes:
        param: the model's parameter.
        start: the index of the first local entry in the flattened parameter.
        count: the number of local entries; 0 if this process has none.
        group: the process group that the entries are divided among; None if this process has all of them.
        entries: a function that returns the local entries, in the memory that the optimizer writes to.
        gradient: a function that returns their gradient, or None.
    """

    param: Tensor
    start: int
    count: int
    group: Any
    entries: Callable[[], Tensor]
    gradient: Callable[[], Tensor | None]

    @staticmethod
    def __new__(
        cls,
        param: Tensor,
        shape: Sequence[int],
        entries: Callable[[], Tensor],
        start: int,
        group: Any,
        gradient: Callable[[], Tensor | None] = lambda: None,
    ) -> Self:
        """Describe the entries from `start` of a parameter that has this shape as a whole."""
        local = entries()
        made: Self = Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=local.dtype, device=local.device)
        made.param, made.start, made.count, made.group = param, start, local.numel(), group
        made.entries, made.gradient = entries, gradient
        return made

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """That of the model's parameter."""
        return self.param.requires_grad

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"FlatTensor({self.start}:{self.start + self.count} of {tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> NoReturn:
        raise TypeError(f"{func}: a FlatTensor only describes which entries of a parameter a process has")


def flat_boxes(start: int, end: int, shape: Sequence[int]) -> list[Ranges]:
    """The boxes that the entries from `start` to `end` of a flattened tensor are, at most 2 n - 1 for n dimensions."""
    if start >= end:
        return []
    if len(shape) <= 1:
        return [((start, end),) * len(shape)]
    size = math.prod(shape[1:])
    row = start // size
    if end <= (row + 1) * size and end - start < size:  # within one row
        return [((row, row + 1), *box) for box in flat_boxes(start - row * size, end - row * size, shape[1:])]
    first, last = -(-start // size), end // size
    whole = [((first, last), *((0, n) for n in shape[1:]))] if first < last else []
    return [*flat_boxes(start, first * size, shape), *whole, *flat_boxes(last * size, end, shape)]


def original(tensor: Tensor) -> Tensor:
    """The model's parameter, if the tensor is a FlatTensor; otherwise the tensor itself."""
    return tensor.param if isinstance(tensor, FlatTensor) else tensor


def gradient_of(tensor: Tensor) -> Tensor | None:
    """The gradient that the optimizer steps a parameter with."""
    return tensor.gradient() if isinstance(tensor, FlatTensor) else tensor.grad
