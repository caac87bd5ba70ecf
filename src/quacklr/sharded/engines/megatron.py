"""Megatron-core: its DistributedOptimizer, and its optimizers with fp32 copies of 16-bit weights.

The DistributedOptimizer flattens all parameters into buffers and gives each data-parallel rank an equal part of every
bucket. The torch optimizer inside it has the fp32 range of each parameter as a tensor of its own, where there is one: a
rank has none of most parameters. A step of the torch optimizer steps all param groups at once. Its post-step hooks run
before the ranges are copied to the weights.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from quacklr.core.flat_tensor import FlatTensor
from quacklr.core.stepped import Group, Stepped
from quacklr.core.weight import Weight
from quacklr.sharded.engines.engine import Engine, class_names, unwrapped_optimizer

CHAIN, DISTRIBUTED = "megatron.ChainedOptimizer", "megatron.DistributedOptimizer"
WITH_COPIES, PLAIN = "megatron.Float16OptimizerWithFloat16Params", "megatron.FP32Optimizer"
NOT_READ = "Megatron's {} keeps its weights in a way that QuacK cannot read, so their steps would not be scaled; {}"
OF_ALL_HEADS = ("dq", "dkv", "kr")
SHARED_HEADS = (
    "{}: all heads read it, and tensor parallelism divides the heads among ranks, so its rate needs the heads of other "
    "ranks, which QuacK cannot read; use tensor parallel size 1, or the paths without it"
)


def megatron_optimizers(given: Any) -> list[Any]:
    """Megatron's optimizers, if the given object is one, or a chain of them; else none."""
    found = unwrapped_optimizer(given)
    if CHAIN in class_names(found):
        if type(found).__name__ != CHAIN.split(".")[1]:
            raise ValueError(NOT_READ.format(type(found).__name__, "use its DistributedOptimizer"))
        return [each for one in found.chained_optimizers for each in megatron_optimizers(one)]
    return [found] if type(found).__module__.startswith("megatron.core.optimizer") else []


def read_megatron(optimizers: Sequence[Any]) -> Engine:
    """The ranges that Megatron's optimizers step. ValueError, by name, for those that cannot be read."""
    shards: dict[int, FlatTensor] = {}
    in_groups: dict[int, list[set[int]]] = {}
    of_tensor: dict[int, tuple[int]] = {}
    data_groups: list[Any] = []
    for optimizer in optimizers:
        _validate(optimizer)
        names = class_names(optimizer)
        if DISTRIBUTED in names:
            found, groups = _distributed(optimizer)
            data_groups += [buffer.data_parallel_group for buffer in optimizer.buffers]
        else:
            found, groups = _copies(optimizer) if WITH_COPIES in names else ([], [])
        shards |= {id(shard.param): shard for shard, _ in found}
        of_tensor |= {id(tensor): (id(shard),) for shard, tensor in found if tensor is not None}
        if groups:
            in_groups[id(optimizer.optimizer)] = groups
    return Engine(
        optimizers=[optimizer.optimizer for optimizer in optimizers],
        shards=shards,
        stepped=GroupsByIndex(in_groups, of_tensor),
        validate_weight=_validate_heads,
        tensor_parallel=_is_tensor_parallel(),
        data_groups=list(dict.fromkeys(data_groups)) or None,
    )


class GroupsByIndex(Stepped):
    """Param groups of optimizers, by id and index, with the parameters of all ranks, also those without a range."""

    def __init__(self, of_optimizer: Mapping[int, Sequence[set[int]]], of_tensor: Mapping[int, tuple[int]]) -> None:
        super().__init__(of_tensor)
        self._of_optimizer = dict(of_optimizer)

    def groups(self, optimizer: Optimizer) -> list[tuple[Group, set[int]]]:
        """The param groups of the optimizer, each with the ids of its parameters."""
        known = self._of_optimizer.get(id(optimizer))
        if known is None:
            return super().groups(optimizer)
        return list(zip(optimizer.param_groups, known, strict=True))


def _validate(optimizer: Any) -> None:
    names, config = class_names(optimizer), optimizer.config
    if not names & {DISTRIBUTED, WITH_COPIES, PLAIN}:
        raise ValueError(NOT_READ.format(type(optimizer).__name__, "use its DistributedOptimizer"))
    if getattr(config, "use_precision_aware_optimizer", False):
        raise ValueError(NOT_READ.format("precision-aware optimizer", "set use_precision_aware_optimizer=False"))
    if getattr(config, "optimizer_cpu_offload", False):
        raise ValueError(NOT_READ.format("offload of the optimizer to the CPU", "set optimizer_cpu_offload=False"))
    if not isinstance(optimizer.optimizer, Optimizer):
        raise ValueError(NOT_READ.format(f"{type(optimizer).__name__} without a torch optimizer", "use Adam or SGD"))
    if any(getattr(each, "use_megatron_fsdp", False) for each in (getattr(optimizer, "ddp_config", None), config)):
        raise ValueError(NOT_READ.format("FSDP", "use its DistributedOptimizer without it"))


def _validate_heads(weight: Weight) -> None:
    """A weight that all heads read cannot be rated where heads are divided among ranks."""
    divided = getattr(weight.param, "tensor_model_parallel", False) and weight.name.split(".")[-1] not in OF_ALL_HEADS
    if not divided and _is_tensor_parallel():
        raise ValueError(SHARED_HEADS.format(weight.name))


def _is_tensor_parallel() -> bool:
    state: Any = sys.modules.get("megatron.core.parallel_state")
    return state is not None and state.get_tensor_model_parallel_world_size() > 1


Ranges = list[tuple[FlatTensor, Tensor | None]]  # with the tensor in a param group; None if this rank has none


def _distributed(optimizer: Any) -> tuple[Ranges, list[set[int]]]:
    """The range of each parameter, and for each param group the ids of the ranges. A collective call."""
    shards: Ranges = []
    in_groups: list[set[int]] = [set() for _ in optimizer.optimizer.param_groups]
    for buffer in optimizer.buffers:
        params = list(buffer.param_index_map)
        group = buffer.data_parallel_group
        indices = _group_indices(optimizer, params, group)
        for param, index in zip(params, indices, strict=True):
            if index >= 0:  # else it belongs to another optimizer of the chain
                shards.append(_range(optimizer, param, group))
                in_groups[index].add(id(shards[-1][0]))
    return shards, in_groups


def _group_indices(optimizer: Any, params: Sequence[Tensor], group: Any) -> list[int]:
    """The index of the param group of each parameter, which only the ranks with a range of it know."""
    known = optimizer.model_param_group_index_map
    device = params[0].device
    indices = torch.tensor([known[param][0] if param in known else -1 for param in params], device=device)
    if group.size() > 1:
        dist.all_reduce(indices, dist.ReduceOp.MAX, group=group)
    return indices.tolist()


def _range(optimizer: Any, param: Tensor, group: Any) -> tuple[FlatTensor, Tensor | None]:
    """The range of a parameter that this rank steps, which may be empty."""
    if param not in optimizer.model_param_group_index_map:
        empty = torch.empty(0, device=param.device, dtype=torch.float32)
        return FlatTensor(param, param.shape, lambda: empty, 0, group), None
    index, order = optimizer.model_param_group_index_map[param]
    groups = partial(getattr, optimizer.optimizer, "param_groups")

    def stepped() -> Tensor:
        return groups()[index]["params"][order]

    start = optimizer._get_model_param_range_map(param)["param"].start
    entries, gradient = lambda: stepped().detach().view(-1), lambda: stepped().grad
    return FlatTensor(param, param.shape, entries, start, group, gradient), stepped()


def _copies(optimizer: Any) -> tuple[Ranges, list[set[int]]]:
    """The fp32 copy of each 16-bit parameter, whole in every process; and the param groups by index."""
    shards: Ranges = []
    of_copy: dict[int, int] = {}
    for param, copy in _pairs(optimizer):
        entries = partial(lambda each: each.detach().view(-1), copy)
        shard = FlatTensor(param, param.shape, entries, 0, None, partial(getattr, copy, "grad"))
        shards.append((shard, copy))
        of_copy[id(copy)] = id(shard)
    groups = optimizer.optimizer.param_groups
    return shards, [{of_copy.get(id(tensor), id(tensor)) for tensor in group["params"]} for group in groups]


def _pairs(optimizer: Any) -> Iterator[tuple[Tensor, Tensor]]:
    for params, copies in zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True):
        yield from zip(params, copies, strict=True)
