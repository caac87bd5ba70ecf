"""What this process has of a parameter: all of it, or the shard that FSDP2, HSDP or tensor parallelism left here.

A shard is the local tensor of a DTensor. Which entries of the parameter it holds is told by one index vector a
dimension, so it may end in the middle of a head, hold no row at all, or be cut along the columns. Other files of the
core ask the functions here; only ranks.py reads a DTensor's mesh itself, for its process groups.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor. There can be none before its module is imported, which takes a while."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_tensor(tensor: Tensor) -> Tensor:
    """What this process has of it, without gradients. To write there is to write to the tensor."""
    if not is_sharded(tensor):
        return tensor.detach()
    with torch.no_grad():
        sharded: Any = tensor
        local: Tensor = sharded.to_local()
        return local.detach()


def local_indices(tensor: Tensor, dim: int) -> Tensor:
    """Which entries along a dimension are here, in the order in which they are here. Asks no other process."""
    whole = torch.arange(tensor.shape[dim], device="cpu")
    if not is_sharded(tensor):
        return whole
    from torch.distributed.tensor import distribute_tensor

    sharded: Any = tensor
    along = [_along(placement, dim) for placement in sharded.placements]
    return local_tensor(distribute_tensor(whole, sharded.device_mesh, along, src_data_rank=None)).cpu()


def _along(placement: Any, dim: int) -> Any:
    """The placement of a vector that is cut as a tensor is cut along a dimension."""
    from torch.distributed.tensor import Replicate

    if not is_shard(placement) or placement.dim != dim:
        return Replicate()
    strided = {"split_factor": placement.split_factor} if hasattr(placement, "split_factor") else {}
    return type(placement)(0, **strided)  # under TP and FSDP2 together it is torch's own _StridedShard


def is_shard(placement: Any) -> bool:
    """Whether each process along a dimension of the mesh has a part of its own."""
    return not placement.is_replicate() and not placement.is_partial()


class ShardSpec(NamedTuple):
    """A process group, each of which has a part of a tensor along a dimension."""

    group: Any
    dim: int
    factor: int  # torch's, of a shard that is strided


def shard_specs(tensor: Tensor) -> tuple[ShardSpec, ...]:
    """How a tensor is cut, in the order of the mesh's dimensions. What each group has must be added up over it."""
    if not is_sharded(tensor):
        return ()
    sharded: Any = tensor
    mesh = sharded.device_mesh
    return tuple(
        ShardSpec(mesh.get_group(i), placement.dim, getattr(placement, "split_factor", 1))
        for i, placement in enumerate(sharded.placements)
        if is_shard(placement) and mesh.size(i) > 1
    )


def shard_counts(tensor: Tensor) -> list[int]:
    """Between how many processes a tensor is cut, each time it is: 1 for a mesh dimension of one."""
    sharded: Any = tensor
    if not is_sharded(tensor):
        return []
    return [sharded.device_mesh.size(i) for i, placement in enumerate(sharded.placements) if is_shard(placement)]


def is_partial(tensor: Tensor) -> bool:
    """Whether its value is a sum over processes that nobody has added up yet."""
    sharded: Any = tensor
    return is_sharded(tensor) and any(placement.is_partial() for placement in sharded.placements)
