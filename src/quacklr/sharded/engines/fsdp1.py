"""FSDP1: torch's FullyShardedDataParallel with use_orig_params=True.

Each wrapper flattens the parameters of its module into one vector and divides it among processes. The optimizer has the
original parameters, and the memory of each is this process's range of it, as a vector: empty where it has none.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

from quacklr.core.local import FlatTensor
from quacklr.core.rule import Stepped
from quacklr.sharded.engines.engine import Engine


def read_fsdp1(model: nn.Module) -> Engine:
    """The ranges that FSDP1 steps; no engine without FSDP1. ValueError if they are not of single parameters."""
    wrappers = _wrappers(model)
    if not wrappers:
        return Engine()
    handles = [module._handle for module in wrappers if module._handle is not None]
    if not all(handle._use_orig_params for handle in handles):
        raise ValueError(
            "the model is wrapped in FullyShardedDataParallel (FSDP1) with use_orig_params=False, so its optimizer "
            "steps one vector of many parameters; wrap it with use_orig_params=True, or use fully_shard (FSDP2) from "
            "torch.distributed.fsdp"
        )
    sharded = [handle for handle in handles if handle.uses_sharded_strategy]
    shards = {id(shard.param): shard for handle in sharded for shard in _shards(handle)}
    groups = wrappers[0].process_group, getattr(wrappers[0], "_inter_node_pg", None)  # the second of HYBRID_SHARD
    return Engine(
        shards=shards,
        stepped=Stepped({key: (id(shard),) for key, shard in shards.items()}),
        data_groups=[group for group in groups if group is not None],
        gathers=bool(shards),
    )


def _wrappers(model: nn.Module) -> list[Any]:
    """The wrappers around the model, and those in it. A model does not refer to what is around it."""
    if not any(hasattr(param, "_fsdp_flattened") for param in model.parameters()):
        return []
    from torch.distributed.fsdp import FullyShardedDataParallel

    wrappers = [each for each in gc.get_objects() if issubclass(type(each), FullyShardedDataParallel)]
    return [each for each in wrappers if model in each.modules() or each in model.modules()]


def _shards(handle: Any) -> Iterator[FlatTensor]:
    """The range of each parameter of a wrapper."""
    flat = handle.flat_param
    for param, shape, info in zip(flat._params, flat._shapes, flat._shard_param_infos, strict=True):
        size = info.numel_in_shard if info.in_shard else 0
        start = info.intra_param_start_idx if info.in_shard else 0
        entries = partial(_entries, param, size)
        yield FlatTensor(param, shape, entries, start, handle.process_group, partial(getattr, param, "grad"))


def _entries(param: Tensor, size: int) -> Tensor:
    if param.numel() != size:
        raise RuntimeError(
            f"a parameter has {param.numel()} entries, and its range in this process {size}: FSDP1 has gathered it; "
            "call QuacK outside of summon_full_params, and not between forward and backward"
        )
    return param.detach().view(-1)
