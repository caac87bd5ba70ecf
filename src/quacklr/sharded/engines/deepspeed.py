"""DeepSpeed: ZeRO stages 0 to 3, and its optimizers with fp32 copies of 16-bit weights.

    stage 1, 2     the parameters of a param group are flattened, each at an offset; a process steps an equal part
    stage 3        each parameter is divided equally; a process steps its parts of a sub-group of parameters
    stage 0        fp32: the parameters themselves; 16 bits: fp32 copies, flattened or not, whole in every process

DeepSpeed's own optimizer has the torch optimizer that moves these ranges as an attribute, and steps it once for each
param group or sub-group. Its post-step hooks run before the ranges are copied to the 16-bit weights.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import accumulate
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from quacklr.core.local import FlatTensor
from quacklr.core.rule import Group, Stepped
from quacklr.sharded.engines.engine import NOT_READ, Engine, class_names, flat_range, validate_settings

ENGINES = {"deepspeed.DeepSpeedEngine", "deepspeed.PipelineEngine"}
REFUSED = {
    "swap_optimizer": ("offload of the optimizer to NVMe", "offload it to the CPU"),
    "backup_optimizer": ("partial offload (a ratio below 1)", "offload all or nothing"),
    "zenflow": ("ZenFlow", "use the same ZeRO stage without it"),
}
STAGE_3, UNFUSED = "DeepSpeedZeroOptimizer_Stage3", "FP16_UnfusedOptimizer"
FLATTENED = {
    "DeepSpeedZeroOptimizer": (
        *("round_robin_bit16_groups", "single_partition_of_fp32_groups", "real_dp_process_group"),
        "round_robin_bit16_offsets",
    ),
    "BF16_Optimizer": ("bf16_groups", "fp32_groups_flat_partition", "real_dp_process_group"),
    "FP16_Optimizer": ("fp16_groups", "fp32_groups_flat"),
}
"""The attributes with the arguments of `_flattened` for each param group. BF16_Optimizer is stage 1 with gradients
accumulated in fp32; FP16_Optimizer is stage 0, where every process has flat copies of all parameters."""

Flat = tuple[Tensor, list[FlatTensor]]
"""A tensor that is in a param group, with the ranges, also empty ones, of the parameters in it."""


def deepspeed_optimizer(given: Any) -> Any:
    """DeepSpeed's optimizer, if the given object is one, or an engine that has one; else None."""
    if class_names(given) & ENGINES:
        if given.optimizer is None:
            raise ValueError("the DeepSpeed engine has no optimizer; pass one to deepspeed.initialize")
        return given.optimizer if _is_deepspeed(given.optimizer) else given
    return given if _is_deepspeed(given) and not hasattr(given, "register_step_pre_hook") else None


def _is_deepspeed(given: object) -> bool:
    return type(given).__module__.startswith("deepspeed.runtime.")


def read_deepspeed(zero: Any) -> Engine:
    """The ranges that DeepSpeed steps. `zero` is its optimizer, or for stage 0 its engine."""
    groups: Any = sys.modules["deepspeed.utils.groups"]  # a module of the package that made the optimizer
    flats = [] if class_names(zero) & ENGINES else _flats(zero)
    of_tensor = {id(flat): [id(shard) for shard in shards] for flat, shards in flats}
    is_stage_3 = type(zero).__name__ == STAGE_3
    return Engine(
        optimizers=[zero.optimizer],
        data_groups=[groups._get_sequence_data_parallel_group()],
        shards={id(shard.param): shard for _, shards in flats for shard in shards},
        stepped=OnlyFlat(of_tensor) if flats else Stepped(),
        gathers=is_stage_3,
        filled_groups=partial(_filled, zero) if is_stage_3 else nullcontext,
    )


def _flats(zero: Any) -> list[Flat]:
    name = type(zero).__name__
    validate_settings("DeepSpeed", [zero], REFUSED)
    if getattr(zero, "zero_hpz_partition_size", 1) > 1:
        raise ValueError(NOT_READ.format("DeepSpeed", "ZeRO++ (zero_hpz_partition_size)", "use stage 3 without it"))
    if name == STAGE_3:
        return _stage_3(zero)
    if name in FLATTENED:
        return [_flattened(*each) for each in zip(*(getattr(zero, key) for key in FLATTENED[name]), strict=True)]
    if name != UNFUSED:
        raise ValueError(NOT_READ.format("DeepSpeed", name, "use ZeRO stage 0, 1, 2 or 3"))
    pairs = zip(zero.fp16_groups, zero.fp32_groups, strict=True)
    return [_flattened([param], copy) for each in pairs for param, copy in zip(*each, strict=True)]


def _flattened(params: Sequence[Tensor], flat: Tensor, group: Any = None, offsets: Sequence[int] | None = None) -> Flat:
    """The ranges of parameters that are flattened at these offsets, in the part of this process.

    The default is one after another. Without a process group the flat tensor is whole in every process.
    """
    first = 0 if group is None else flat.numel() * group.rank()
    offsets = offsets or list(accumulate((param.numel() for param in params), initial=0))
    shards = []
    for param, offset in zip(params, offsets, strict=False):
        low, high = max(offset, first), min(offset + param.numel(), first + flat.numel())
        shards.append(flat_range(param, param.shape, low - offset, group, flat, low - first, high - low))
    return flat, shards


def _stage_3(zero: Any) -> list[Flat]:
    found: list[Flat] = []
    groups = zip(zero.fp16_groups, zero.fp32_partitioned_groups_flat, zero.sub_group_process_groups, strict=True)
    for params, flat, group in groups:
        offsets = [zero.grad_position[zero.get_param_id(param)][1] for param in params]
        found.append((flat, [_part_of_3(*each, flat, group) for each in zip(params, offsets, strict=True)]))
    trained = {id(shard.param) for _, shards in found for shard in shards}
    frozen = [p for p in zero.parameter_offload.module.parameters() if id(p) not in trained and hasattr(p, "ds_tensor")]
    return [*found, *((p.ds_tensor, [_part_of_3(p, 0, p.ds_tensor, p.ds_process_group)]) for p in frozen)]


def _part_of_3(param: Any, at: int, flat: Tensor, group: Any) -> FlatTensor:
    """The part of a parameter that ZeRO-3 gives to this process. The last parts may end in padding."""
    length = param.partition_numel()
    start = group.rank() * length
    return flat_range(param, param.ds_shape, start, group, flat, at, min(length, param.ds_numel - start))


@contextmanager
def _filled(zero: Any) -> Iterator[None]:
    """While entered, the param groups have their flat tensors, which ZeRO-3 only puts there during a step."""
    zero._set_fp32_optimizer_param_groups()
    try:
        yield
    finally:
        zero._clear_fp32_optimizer_param_groups()


class OnlyFlat(Stepped):
    """Param groups that have only flat tensors in them. RuntimeError if they were replaced."""

    def groups(self, optimizer: Optimizer) -> list[tuple[Group, set[int]]]:
        """The param groups that the optimizer has now, each with the ids of its parameters."""
        if any(id(tensor) not in self._of_tensor for group in optimizer.param_groups for tensor in group["params"]):
            raise RuntimeError(
                "DeepSpeed has put other tensors into the param groups since QuacK was attached, so QuacK would not "
                "scale their steps; attach a new one"
            )
        return super().groups(optimizer)
