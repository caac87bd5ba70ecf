"""Collectives over the processes that train one model together, and the parameters that FSDP2 shards and gathers."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from quacklr.core.local import is_sharded, sharded_dims
from quacklr.util.caller import warn
from quacklr.util.modules import wrappers

Groups = Sequence[Any]


def is_distributed() -> bool:
    """Whether torch.distributed is initialised with more than one process."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def groups_of(model: nn.Module) -> Groups:
    """The process groups over which a model is replicated or sharded: DistributedDataParallel's, or FSDP2's mesh."""
    if not is_distributed():
        return []
    for wrapper in wrappers(model):
        if isinstance(wrapper, DistributedDataParallel):
            return [wrapper.process_group]
    sharded: Any = next((param for param in model.parameters() if is_sharded(param)), None)
    return [] if sharded is None else list(sharded.device_mesh.get_all_groups())


def all_reduce(tensors: Sequence[Tensor], groups: Groups, operation: Literal["MAX", "SUM"]) -> list[Tensor]:
    """The elementwise maximum or sum over all ranks: a single collective for each group, of one flat vector."""
    if not groups:
        return list(tensors)
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    for group in groups:
        dist.all_reduce(flat, getattr(dist.ReduceOp, operation), group=group)
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]


def all_ranks_agree(values: Sequence[object], groups: Groups, device: torch.device) -> bool:
    """Whether all ranks have the same values. Call it before a reduction of tensors that may differ in size."""
    checksum = zlib.crc32(repr(values).encode())
    most, least = all_reduce([torch.tensor([checksum, -checksum], device=device)], groups, "MAX")[0].tolist()
    return bool(most == checksum == -least)


_merged: dict[Any, Any] = {}  # by the default group, which a program may replace, and the ranks


def merged_group(groups: Groups) -> Any:
    """One process group of all ranks that are connected by these groups. A collective call if there are several."""
    if len(groups) == 1:
        return groups[0]
    ranks = {dist.get_rank()}
    for group in groups:
        of_members: list[set[int]] = [set() for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(of_members, ranks, group=group)
        ranks = set().union(*of_members)
    key = dist.group.WORLD, *sorted(ranks)
    if key not in _merged:
        _merged[key] = dist.new_group(sorted(ranks), use_local_synchronization=True)
    return _merged[key]


def fully_sharded(model: nn.Module) -> list[Any]:
    """The modules to which FSDP2's `fully_shard` was applied."""
    if not is_distributed():
        return []
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reshard(model: nn.Module | None) -> None:
    """Free the unsharded parameters of FSDP2, so that the model has the sharded ones that its optimizer has."""
    for module in [] if model is None else fully_sharded(model):
        module.reshard()


@contextmanager
def resharded(model: nn.Module) -> Iterator[None]:
    """Reshard on exit: without a backward pass FSDP2 would keep unsharded parameters, stale after a step."""
    try:
        yield
    finally:
        reshard(model)


def validate_no_tensor_parallel(model: nn.Module, who: str, by_engine: bool = False) -> None:
    """Under tensor parallelism each process computes only some heads; under FSDP2 every process computes all heads."""
    by_data = {id(param) for module in fully_sharded(model) for param in module.parameters()}
    for name, param in model.named_parameters():
        mesh: Any = getattr(param, "device_mesh", None)
        cuts = sharded_dims(param)[id(param) in by_data :]  # the first shard may be FSDP2's
        if by_engine or any(mesh.size(i) > 1 for i, _ in cuts):
            raise ValueError(
                f"{name}: its parameter is cut by tensor parallelism, so no process has all heads, and {who} needs "
                "them; use DistributedDataParallel or FSDP2"
            )


def warn_if_alone(groups: Groups, who: str) -> None:
    """Warn if there are several processes, but none with which this one combines its logits."""
    if not groups and is_distributed():
        warn(
            f"{who} was given a model that is neither DistributedDataParallel nor sharded, but there are several "
            "ranks: each rank uses the logits of its own data and of its own heads only, so a clip would make replicas "
            "different; wrap the model first, then pass it"
        )
