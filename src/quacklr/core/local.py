"""The part of a parameter that is in this process. No other module of the core uses DTensor.

A box is a part of a parameter whose entries are identified by global indices, one vector for each dimension. Under
FSDP2, HSDP or tensor parallelism a parameter is a DTensor, and its local shard is one box. DeepSpeed's ZeRO, Megatron's
DistributedOptimizer and FSDP1 divide a flat vector of parameters among processes. A flat range of a matrix is at most
three boxes:

    . . . a a     a   the end of a row
    b b b b b     b   whole rows
    b b b b b
    c c . . .     c   the beginning of a row

A box may therefore end in the middle of a head, hold no row at all, or have some of the columns only.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn, Self

import torch
from torch import Tensor

Ranges = tuple[tuple[int, int], ...]  # (start, end) for each dimension


class FlatTensor(Tensor):
    """A tensor with the shape of the whole parameter, of which this process holds some consecutive entries.

    It only describes the parameter, as the global shape of a DTensor does; there are no operations on it. It has the
    dtype and the device of what the optimizer steps, which may be an fp32 copy of a bf16 parameter.
    """

    param: Tensor  # of the model
    start: int  # the index of the first local entry in the flattened parameter
    count: int  # the number of local entries; 0 if this process has none
    group: Any  # the process group that the entries are divided among; None if this process has all of them
    entries: Callable[[], Tensor]  # returns the local entries, in the memory that the optimizer writes to
    gradient: Callable[[], Tensor | None]  # returns their gradient

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


class Box(NamedTuple):
    """A part of a parameter that is in one process."""

    indices: tuple[Tensor, ...]  # the global indices of its entries, one vector for each dimension
    tensor: Callable[[], Tensor]  # returns the entries, in the memory of the parameter


def local_boxes(tensor: Tensor) -> list[Box]:
    """The boxes of the local part of a tensor: one, except for a FlatTensor, which has any number, also none."""
    if not isinstance(tensor, FlatTensor):
        indices = tuple(_local_indices(tensor, dim) for dim in range(tensor.ndim))
        return [Box(indices, partial(local_tensor, tensor))]
    boxes, at = [], 0
    for ranges in flat_boxes(tensor.start, tensor.start + tensor.count, tensor.shape):
        indices = tuple(torch.arange(*each, device="cpu") for each in ranges)
        shape = [len(index) for index in indices]
        boxes.append(Box(indices, partial(_entries, tensor, at, shape)))
        at += math.prod(shape)
    return boxes


def _entries(tensor: FlatTensor, at: int, shape: list[int]) -> Tensor:
    return tensor.entries()[at : at + math.prod(shape)].view(shape)


def is_sharded(tensor: Tensor) -> bool:
    """Whether a process may have only a part of a tensor: it is a DTensor or a FlatTensor."""
    return isinstance(tensor, FlatTensor) or is_dtensor(tensor)


def is_dtensor(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor. Does not import torch's module for DTensor, because that is slow."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_tensor(tensor: Any) -> Tensor:
    """The local shard of a DTensor, the range of a FlatTensor, or the tensor itself; detached, in the same memory."""
    if isinstance(tensor, FlatTensor):
        return tensor.entries()
    if not is_dtensor(tensor):
        return tensor.detach()
    with torch.no_grad():
        return tensor.to_local().detach()


def _local_indices(tensor: Any, dim: int) -> Tensor:
    """Global indices along a dimension of the entries in the local shard, in its order. Does not communicate."""
    indices = torch.arange(tensor.shape[dim], device="cpu")
    if not is_dtensor(tensor):
        return indices
    from torch.distributed.tensor import Replicate, distribute_tensor

    of_vector: list[Any] = [Replicate()] * tensor.device_mesh.ndim
    for i, placement in sharded_dims(tensor):
        if placement.dim == dim:  # under TP and FSDP2 together it is torch's own _StridedShard
            strided = {"split_factor": placement.split_factor} if hasattr(placement, "split_factor") else {}
            of_vector[i] = type(placement)(0, **strided)
    return local_tensor(distribute_tensor(indices, tensor.device_mesh, of_vector, src_data_rank=None)).cpu()


def shard_groups(tensor: Any) -> list[Any]:
    """The process groups over which a tensor is sharded; without groups of a single process."""
    if isinstance(tensor, FlatTensor):
        return [] if tensor.group is None or tensor.group.size() == 1 else [tensor.group]
    return [tensor.device_mesh.get_group(i) for i, _ in sharded_dims(tensor) if tensor.device_mesh.size(i) > 1]


def sharded_dims(tensor: Any) -> list[tuple[int, Any]]:
    """The mesh dimensions over which a DTensor is sharded, with the placements; none for another tensor."""
    placements = enumerate(tensor.placements if is_dtensor(tensor) else ())
    return [(i, each) for i, each in placements if not each.is_replicate() and not each.is_partial()]


def is_partial(tensor: Any) -> bool:
    """Whether a tensor is a pending sum over processes (a Partial DTensor)."""
    return is_dtensor(tensor) and any(placement.is_partial() for placement in tensor.placements)
