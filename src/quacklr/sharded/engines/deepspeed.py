"""DeepSpeed: ZeRO stages 0 to 3, and its optimizers with fp32 copies of 16-bit weights.

    stage 1, 2     the parameters of a param group are flattened, each at an offset; a process steps an equal part
    stage 3        each parameter is divided equally; a process steps its parts of a sub-group of parameters
    stage 0        fp32: the parameters themselves; 16 bits: fp32 copies, flattened or not, whole in every process

DeepSpeed's own optimizer has the torch optimizer that moves these ranges as an attribute, and steps it once for each
param group or sub-group. Its post-step hooks run before the ranges are copied to the 16-bit weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any

from torch import Tensor

from quacklr.core.flat_tensor import FlatTensor
from quacklr.sharded.engines.engine import CompleteGroups, Engine, class_names, shaped, unwrapped_optimizer

ENGINES = {"deepspeed.DeepSpeedEngine", "deepspeed.PipelineEngine"}
NOT_READ = "DeepSpeed's {} keeps its weights in a way that QuacK cannot read, so their steps would not be scaled; {}"
PLAIN_STAGE_3 = "use ZeRO stage 3 without it, or stage 1 or 2"


def deepspeed_optimizer(given: Any) -> Any:
    """DeepSpeed's optimizer, if the given object is one, or an engine that has one; else None."""
    found = unwrapped_optimizer(given)
    if class_names(found) & ENGINES:
        if found.optimizer is None:
            raise ValueError("the DeepSpeed engine has no optimizer; pass one to deepspeed.initialize")
        return unwrapped_optimizer(found.optimizer) if _is_deepspeed(found.optimizer) else found
    return found if _is_deepspeed(found) and not hasattr(found, "register_step_pre_hook") else None


def _is_deepspeed(given: object) -> bool:
    return type(given).__module__.startswith("deepspeed.runtime.")


def read_deepspeed(zero: Any) -> Engine:
    """The ranges that DeepSpeed steps. `zero` is its optimizer, or for stage 0 its engine."""
    name = type(zero).__name__
    if class_names(zero) & ENGINES:
        return Engine(optimizers=[zero.optimizer], data_groups=[zero.data_parallel_group])
    if name not in READERS:
        raise ValueError(NOT_READ.format(name, "use ZeRO stage 0, 1, 2 or 3"))
    return READERS[name](zero)


def _stage_1_and_2(zero: Any) -> Engine:
    if zero.zenflow:
        raise ValueError(NOT_READ.format("ZenFlow", "use ZeRO stage 1 or 2 without it"))
    offsets, flats = zero.round_robin_bit16_offsets, zero.single_partition_of_fp32_groups
    return _flattened(zero, zero.round_robin_bit16_groups, offsets, flats, zero.real_dp_process_group)


def _bf16(zero: Any) -> Engine:
    """BF16_Optimizer, of stage 1 with gradients accumulated in fp32."""
    groups, flats = zero.bf16_groups, zero.fp32_groups_flat_partition
    return _flattened(zero, groups, map(_offsets, groups), flats, zero.real_dp_process_group)


def _fp16_fused(zero: Any) -> Engine:
    """FP16_Optimizer, of stage 0: every process has a flat fp32 copy of all parameters."""
    groups, flats = zero.fp16_groups, zero.fp32_groups_flat
    return _flattened(zero, groups, map(_offsets, groups), flats, [None] * len(flats))


def _flattened(
    zero: Any, groups: Sequence[Any], offsets: Iterable[Sequence[int]], flats: Sequence[Tensor], ranks: Sequence[Any]
) -> Engine:
    """Param groups that are flattened, each divided among the ranks of a process group; None: not divided."""
    shards = [
        list(_partition(params, at, partial(flats.__getitem__, i), ranks[i]))
        for i, (params, at) in enumerate(zip(groups, offsets, strict=True))
    ]
    return _engine(zero, shards, flats)


def _fp16_unfused(zero: Any) -> Engine:
    """FP16_UnfusedOptimizer, of stage 0: every process has an fp32 copy of each parameter."""
    pairs = list(zip(zero.fp16_groups, zero.fp32_groups, strict=True))
    shards = [
        [shard]
        for params, copies in pairs
        for param, copy in zip(params, copies, strict=True)
        for shard in _partition([param], [0], partial(lambda each: each, copy), None)
    ]
    return _engine(zero, shards, [copy for _, copies in pairs for copy in copies])


def _stage_3(zero: Any) -> Engine:
    _validate_stage_3(zero)
    flats, groups = zero.fp32_partitioned_groups_flat, zero.sub_group_process_groups
    shards: list[list[FlatTensor]] = []
    for i, params in enumerate(zero.fp16_groups):
        flat, offsets = partial(flats.__getitem__, i), [zero.grad_position[zero.get_param_id(p)][1] for p in params]
        shards.append([_part_of_3(p, flat, at, groups[i]) for p, at in zip(params, offsets, strict=True)])
    trained = {id(shard.param) for each in shards for shard in each}
    others = [p for p in zero.parameter_offload.module.parameters() if id(p) not in trained and hasattr(p, "ds_tensor")]
    frozen = [_part_of_3(p, partial(getattr, p, "ds_tensor"), 0, p.ds_process_group) for p in others]
    shapes = [(shard.param, shard.shape) for each in (frozen, *shards) for shard in each]
    whole_shapes, filled_groups = partial(shaped, shapes), partial(_filled, zero)
    return _engine(zero, shards, flats, frozen, gathers=True, whole_shapes=whole_shapes, filled_groups=filled_groups)


def _validate_stage_3(zero: Any) -> None:
    if zero.swap_optimizer:
        raise ValueError(NOT_READ.format("offload of the optimizer to NVMe", "offload it to the CPU"))
    if hasattr(zero, "backup_optimizer"):
        raise ValueError(NOT_READ.format("partial offload (a ratio below 1)", "offload all or nothing"))
    if zero.zero_hpz_partition_size > 1:
        raise ValueError(NOT_READ.format("ZeRO++ (zero_hpz_partition_size)", PLAIN_STAGE_3))
    if zero.zenflow:
        raise ValueError(NOT_READ.format("ZenFlow", PLAIN_STAGE_3))


def _part_of_3(param: Any, flat: Callable[[], Tensor], at: int, group: Any) -> FlatTensor:
    """The part of a parameter that ZeRO-3 gives to this process. The last parts may end in padding."""
    length = param.partition_numel()
    start = min(group.rank() * length, param.ds_numel)
    size = min(length, param.ds_numel - start)
    return _flat_tensor(param, param.ds_shape, flat, at, start, size, group)


def _offsets(params: Sequence[Tensor]) -> list[int]:
    return list(accumulate((param.numel() for param in params), initial=0))[:-1]


def _partition(
    params: Iterable[Tensor], offsets: Iterable[int], flat: Callable[[], Tensor], group: Any
) -> Iterator[FlatTensor]:
    """The ranges of parameters that are flattened at these offsets, in the part of this process."""
    length = flat().numel()
    first = length * (0 if group is None else group.rank())
    for param, offset in zip(params, offsets, strict=True):
        low, high = max(offset, first), min(offset + param.numel(), first + length)
        size, inside = max(high - low, 0), high > low
        yield _flat_tensor(
            param, param.shape, flat, low - first if inside else 0, low - offset if inside else 0, size, group
        )


def _flat_tensor(
    param: Tensor, shape: Sequence[int], flat: Callable[[], Tensor], at: int, start: int, size: int, group: Any
) -> FlatTensor:
    """The entries from `start` of a parameter, which are at `at` in a flat tensor."""
    return FlatTensor(param, shape, lambda: flat().detach().view(-1)[at : at + size], start, group, lambda: flat().grad)


def _engine(
    zero: Any,
    shards: Sequence[Sequence[FlatTensor]],
    flats: Sequence[Tensor],
    frozen: Sequence[FlatTensor] = (),
    **more: Any,
) -> Engine:
    """The engine of flat tensors, each with the ranges, also empty ones, of the parameters in it."""
    every = [*frozen, *(shard for each in shards for shard in each)]
    in_flat = {id(flat): [id(shard) for shard in each] for flat, each in zip(flats, shards, strict=True)}
    return Engine(
        optimizers=[zero.optimizer],
        shards={id(shard.param): shard for shard in every},
        stepped=CompleteGroups(in_flat, "DeepSpeed"),
        data_groups=_data_groups(zero),
        **more,
    )


def _data_groups(zero: Any) -> list[Any] | None:
    """The process group whose ranks see different data."""
    if (group := getattr(zero, "dp_process_group", None)) is not None:
        return [group]
    if groups := getattr(zero, "real_dp_process_group", None):
        return [groups[0]]
    group = getattr(getattr(zero, "deepspeed", None), "data_parallel_group", None)
    return None if group is None else [group]


@contextmanager
def _filled(zero: Any) -> Iterator[None]:
    """While entered, the param groups have their flat tensors, which ZeRO-3 only puts there during a step."""
    groups = zero.optimizer.param_groups
    kept = [group["params"] for group in groups]
    try:
        for i, flat in enumerate(zero.fp32_partitioned_groups_flat):
            at = zero.sub_group_to_group_id[i]
            groups[at]["params"] = [*groups[at]["params"], flat]
        yield
    finally:
        for group, params in zip(groups, kept, strict=True):
            group["params"] = params


READERS: dict[str, Callable[[Any], Engine]] = {
    "DeepSpeedZeroOptimizer": _stage_1_and_2,
    "DeepSpeedZeroOptimizer_Stage3": _stage_3,
    "BF16_Optimizer": _bf16,
    "FP16_Optimizer": _fp16_fused,
    "FP16_UnfusedOptimizer": _fp16_unfused,
}
