"""The local part of a parameter, as boxes. No other module of the core uses DTensor.

A box is a part of a parameter whose entries are identified by global indices, one vector for each dimension. Under
FSDP2, HSDP or tensor parallelism a parameter is a DTensor, and its local shard is one box. Under ZeRO, Megatron or
FSDP1 a process has a flat range of it, which is a few boxes (flat_tensor.py). A box may therefore end in the middle of
a head, hold no row at all, or have some of the columns only.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quacklr.core.flat_tensor import FlatTensor, flat_boxes


class Box(NamedTuple):
    """A part of a parameter that is in one process.

    `indices` are the global indices of its entries, one vector for each dimension. `tensor` returns the entries, in the
    memory of the parameter.
    """

    indices: tuple[Tensor, ...]
    tensor: Callable[[], Tensor]


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
    """The local shard of a DTensor, the flat range of a FlatTensor, or the tensor itself.

    The result is detached, and in the memory of the parameter.
    """
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
    for i, placement in _shards(tensor):
        if placement.dim == dim:  # under TP and FSDP2 together it is torch's own _StridedShard
            strided = {"split_factor": placement.split_factor} if hasattr(placement, "split_factor") else {}
            of_vector[i] = type(placement)(0, **strided)
    return local_tensor(distribute_tensor(indices, tensor.device_mesh, of_vector, src_data_rank=None)).cpu()


class ShardSpec(NamedTuple):
    """One sharding of a tensor.

    Attributes:
        group: the process group that the tensor is sharded over.
        dim: the dimension that is sharded; -1 for a flat range (a FlatTensor), which is of no dimension.
        factor: torch's split_factor, of a strided shard; else 1.
    """

    group: Any
    dim: int
    factor: int


def shard_specs(tensor: Any) -> tuple[ShardSpec, ...]:
    """How a tensor is sharded, in the order of the mesh's dimensions; without groups of a single process."""
    if isinstance(tensor, FlatTensor):
        return () if tensor.group is None or tensor.group.size() == 1 else (ShardSpec(tensor.group, -1, 1),)
    return tuple(
        ShardSpec(tensor.device_mesh.get_group(i), placement.dim, getattr(placement, "split_factor", 1))
        for i, placement in _shards(tensor)
        if tensor.device_mesh.size(i) > 1
    )


def shard_counts(tensor: Any) -> list[int]:
    """The numbers of shards along the mesh dimensions over which a tensor is sharded."""
    return [tensor.device_mesh.size(i) for i, _ in _shards(tensor)]


def _shards(tensor: Any) -> list[tuple[int, Any]]:
    """The mesh dimensions over which a tensor is sharded, with the placements."""
    placements = enumerate(tensor.placements if is_dtensor(tensor) else ())
    return [(i, each) for i, each in placements if not each.is_replicate() and not each.is_partial()]


def is_partial(tensor: Any) -> bool:
    """Whether a tensor is a pending sum over processes (a Partial DTensor)."""
    return is_dtensor(tensor) and any(placement.is_partial() for placement in tensor.placements)
