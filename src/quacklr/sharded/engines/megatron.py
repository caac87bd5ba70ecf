"""Megatron-core: its DistributedOptimizer, and its optimizers with fp32 copies of 16-bit weights.

The DistributedOptimizer flattens all parameters into buffers and gives each data-parallel rank an equal part of every
bucket. The torch optimizer inside it has the fp32 range of each parameter as a tensor of its own, where there is one: a
rank has none of most parameters. A step of the torch optimizer steps all param groups at once. Its post-step hooks run
before the ranges are copied to the weights.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from quacklr.core.local import FlatTensor
from quacklr.core.rule import Group, Stepped
from quacklr.core.weight import Weight
from quacklr.sharded.engines.engine import NOT_READ, Engine, class_names, flat_range, validate_settings

DISTRIBUTED, PLAIN = "megatron.DistributedOptimizer", "megatron.FP32Optimizer"
WITH_COPIES = "megatron.Float16OptimizerWithFloat16Params"
USE_DISTRIBUTED = "use its DistributedOptimizer"
REFUSED = {
    "use_precision_aware_optimizer": ("precision-aware optimizer", "set use_precision_aware_optimizer=False"),
    "optimizer_cpu_offload": ("offload of the optimizer to the CPU", "set optimizer_cpu_offload=False"),
    "use_megatron_fsdp": ("FSDP", f"{USE_DISTRIBUTED} without it"),
}
Ranges = list[tuple[FlatTensor, Tensor]]  # each with its tensor in a param group; an empty one, if this rank has none


def megatron_optimizers(given: Any) -> list[Any]:
    """Megatron's optimizers, if the given object is one, or a chain of them; else none."""
    if not any(name.startswith("megatron.") for name in class_names(given)):
        return []
    chain = given.chained_optimizers if type(given).__name__ == "ChainedOptimizer" else None
    return [given] if chain is None else [each for one in chain for each in megatron_optimizers(one)]


def read_megatron(optimizers: Sequence[Any]) -> Engine:
    """The ranges that Megatron's optimizers step. ValueError, by name, for those that cannot be read."""
    shards: list[FlatTensor] = []
    in_groups: dict[int, list[set[int]]] = {}
    of_tensor: dict[int, tuple[int]] = {}
    data_groups: dict[Any, None] = {}
    for optimizer in optimizers:
        _validate(optimizer)
        names = class_names(optimizer)
        ranges: Ranges = []
        if DISTRIBUTED in names:
            ranges, in_groups[id(optimizer.optimizer)] = _distributed(optimizer)
            data_groups |= dict.fromkeys(buffer.data_parallel_group for buffer in optimizer.buffers)
        elif WITH_COPIES in names:
            pairs = zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True)
            copied = [pair for each in pairs for pair in zip(*each, strict=True)]
            ranges = [(flat_range(param, param.shape, 0, None, copy), copy) for param, copy in copied]
        shards += [shard for shard, _ in ranges]
        of_tensor |= {id(tensor): (id(shard),) for shard, tensor in ranges}
    tensor_parallel = sys.modules["megatron.core.parallel_state"].get_tensor_model_parallel_world_size() > 1
    return Engine(
        optimizers=[optimizer.optimizer for optimizer in optimizers],
        shards={id(shard.param): shard for shard in shards},
        stepped=GroupsByIndex(in_groups, of_tensor),
        validate_weight=_validate_heads if tensor_parallel else lambda _: None,
        tensor_parallel=tensor_parallel,
        data_groups=list(data_groups) or None,
    )


class GroupsByIndex(Stepped):
    """Param groups of optimizers, by id and index, with the parameters of all ranks, also those without a range."""

    def __init__(self, of_optimizer: Mapping[int, Sequence[set[int]]], of_tensor: Mapping[int, tuple[int]]) -> None:
        super().__init__(of_tensor)
        self._of_optimizer = dict(of_optimizer)

    def groups(self, optimizer: Optimizer) -> list[tuple[Group, set[int]]]:
        """The param groups of the optimizer, each with the ids of its parameters."""
        known = self._of_optimizer.get(id(optimizer))
        return super().groups(optimizer) if known is None else list(zip(optimizer.param_groups, known, strict=True))


def _validate(optimizer: Any) -> None:
    name = type(optimizer).__name__
    if not class_names(optimizer) & {DISTRIBUTED, WITH_COPIES, PLAIN}:
        raise ValueError(NOT_READ.format("Megatron", name, USE_DISTRIBUTED))
    validate_settings("Megatron", [optimizer.config, getattr(optimizer, "ddp_config", None)], REFUSED)
    if not isinstance(optimizer.optimizer, Optimizer):
        raise ValueError(NOT_READ.format("Megatron", f"{name} without a torch optimizer", "use Adam or SGD"))


def _validate_heads(weight: Weight) -> None:
    """A weight that all heads read cannot be rated where heads are divided among ranks."""
    if weight.name.split(".")[-1] in ("dq", "dkv", "kr") or not getattr(weight.param, "tensor_model_parallel", False):
        raise ValueError(
            f"{weight.name}: all heads read it, and tensor parallelism divides the heads among ranks, so its rate "
            "needs the heads of other ranks, which QuacK cannot read; use tensor parallel size 1, or the paths without "
            "it"
        )


def _distributed(optimizer: Any) -> tuple[Ranges, list[set[int]]]:
    """The range of each parameter, and for each param group the ids of the ranges. A collective call."""
    ranges: Ranges = []
    groups, place = optimizer.optimizer.param_groups, optimizer.model_param_group_index_map
    in_groups: list[set[int]] = [set() for _ in groups]
    for buffer in optimizer.buffers:
        params, ranks = list(buffer.param_index_map), buffer.data_parallel_group
        known = [place[param][0] if param in place else -1 for param in params]
        indices = torch.tensor(known, device=params[0].device)
        dist.all_reduce(indices, dist.ReduceOp.MAX, group=ranks)  # only ranks with a range of it know the group
        for param, index in zip(params, indices.tolist(), strict=True):
            if index < 0:  # it belongs to another optimizer of the chain
                continue
            start, stepped = 0, torch.empty(0, device=param.device, dtype=torch.float32)
            if param in place:
                start = optimizer._get_model_param_range_map(param)["param"].start
                stepped = groups[index]["params"][place[param][1]]
            ranges.append((flat_range(param, param.shape, start, ranks, stepped), stepped))
            in_groups[index].add(id(ranges[-1][0]))
    return ranges, in_groups
