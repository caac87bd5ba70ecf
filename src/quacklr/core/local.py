"""The local shard of a DTensor parameter. No other module of the core uses DTensor.

Under FSDP2, HSDP or tensor parallelism a parameter is a DTensor, and each process holds a shard of it. Global indices,
one vector for each dimension, identify the entries of the shard. It may therefore end in the middle of a head, hold no
row at all, or be sharded along the columns.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor. Does not import torch's module for DTensor, because that is slow."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_tensor(tensor: Any) -> Tensor:
    """The local shard of a DTensor, or the tensor itself; detached, and in the memory of the parameter."""
    if not is_sharded(tensor):
        return tensor.detach()
    with torch.no_grad():
        return tensor.to_local().detach()


def local_indices(tensor: Any, dim: int) -> Tensor:
    """Global indices along a dimension of the entries in the local shard, in its order. Does not communicate."""
    indices = torch.arange(tensor.shape[dim], device="cpu")
    if not is_sharded(tensor):
        return indices
    from torch.distributed.tensor import Replicate, distribute_tensor

    placements = [_of_vector(each) if _is_shard(each, dim) else Replicate() for each in tensor.placements]
    return local_tensor(distribute_tensor(indices, tensor.device_mesh, placements, src_data_rank=None)).cpu()


def _is_shard(placement: Any, dim: int | None = None) -> bool:
    if placement.is_replicate() or placement.is_partial():
        return False
    return dim is None or placement.dim == dim


def _of_vector(placement: Any) -> Any:
    """The placement of a vector that is sharded like a dimension of a tensor."""
    strided = {"split_factor": placement.split_factor} if hasattr(placement, "split_factor") else {}
    return type(placement)(0, **strided)  # under TP and FSDP2 together it is torch's own _StridedShard


class ShardSpec(NamedTuple):
    """One sharding of a tensor: the process group over which a dimension is sharded."""

    group: Any
    dim: int
    factor: int  # torch's split_factor, of a strided shard


def shard_specs(tensor: Any) -> tuple[ShardSpec, ...]:
    """How a tensor is sharded, in the order of the mesh's dimensions; without groups of a single process."""
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
    return [(i, each) for i, each in enumerate(tensor.placements) if _is_shard(each)] if is_sharded(tensor) else []


def is_partial(tensor: Any) -> bool:
    """Whether a tensor is a pending sum over processes (a Partial DTensor)."""
    return is_sharded(tensor) and any(placement.is_partial() for placement in tensor.placements)
