"""The processes that train one model together, each on data of its own: what they measure is put together."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from quacklr.core.local import is_sharded
from quacklr.util.modules import wrappers

Groups = Sequence[Any]


def is_distributed() -> bool:
    """Whether this process is one of several."""
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


def all_reduce_max(tensors: Sequence[Tensor], groups: Groups) -> list[Tensor]:
    """The largest over all ranks, entry by entry."""
    return _reduced(tensors, groups, dist.ReduceOp.MAX) if groups else list(tensors)


def all_reduce_sum(tensors: Sequence[Tensor], groups: Groups) -> list[Tensor]:
    """The sum over all ranks, entry by entry."""
    return _reduced(tensors, groups, dist.ReduceOp.SUM) if groups else list(tensors)


def all_reduce_sums(tensors: Sequence[Tensor], groups: Sequence[Groups]) -> list[Tensor]:
    """Each added up over its groups: one collective for each group, however many tensors there are."""
    found = list(tensors)
    for group in union(groups):
        which = [i for i, each in enumerate(groups) if group in each]
        for i, tensor in zip(which, all_reduce_sum([found[i] for i in which], [group]), strict=True):
            found[i] = tensor
    return found


def union(groups: Iterable[Groups]) -> Groups:
    """All of them, each once, in the order in which they first come, which is the same in every process."""
    return list(dict.fromkeys(group for each in groups for group in each))


def all_ranks_agree(words: Sequence[object], groups: Groups, device: torch.device) -> bool:
    """Whether all ranks say the same. Ask before reducing what may differ in size."""
    said = zlib.crc32(repr(words).encode())
    most, least = all_reduce_max([torch.tensor([said, -said], device=device)], groups)[0].tolist()
    return bool(most == said == -least)


def _reduced(tensors: Sequence[Tensor], groups: Groups, how: Any) -> list[Tensor]:
    """All in one piece: a single collective for each group, however many layers there are."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    for group in groups:
        dist.all_reduce(flat, how, group=group)
    pieces = flat.split([tensor.numel() for tensor in tensors])
    return [piece.view_as(tensor) for piece, tensor in zip(pieces, tensors, strict=True)]


def fully_sharded(model: nn.Module) -> list[Any]:
    """The modules that FSDP2 shards by themselves."""
    if not is_distributed():
        return []
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reshard(model: nn.Module) -> None:
    """Let FSDP2 keep shards of its parameters only, as an optimizer sees them."""
    for module in fully_sharded(model):
        module.reshard()


@contextmanager
def resharded(model: nn.Module) -> Iterator[None]:
    """Afterwards FSDP2 has only shards of its parameters: without a backward it would keep what a step makes stale."""
    try:
        yield
    finally:
        reshard(model)


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Every parameter that FSDP2 shards whole in every process, to be read."""
    with resharded(model):
        for module in fully_sharded(model):
            module.unshard()
        yield
