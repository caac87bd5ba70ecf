"""Errors for models that are sharded in ways which QuacK, the monitor or the clip do not support."""

from __future__ import annotations

from torch import nn

from quacklr.core.local import is_sharded, shard_counts
from quacklr.distributed.collectives import fully_sharded


def validate_not_fsdp1(model: nn.Module) -> None:
    """Raise ValueError for FSDP1: it flattens parameters, so that the rows of a head cannot be identified."""
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise ValueError(
            "the model is wrapped in FullyShardedDataParallel (FSDP1), which flattens its parameters; use fully_shard "
            "(FSDP2) from torch.distributed.fsdp"
        )


def validate_no_tensor_parallel(model: nn.Module, who: str) -> None:
    """Under tensor parallelism each process computes only some heads; under FSDP2 every process computes all heads."""
    by_data = {id(param) for module in fully_sharded(model) for param in module.parameters()}
    for name, param in model.named_parameters():
        if any(size > 1 for size in shard_counts(param)[id(param) in by_data :]):  # the first count may be FSDP2's
            raise ValueError(
                f"{name}: its parameter is cut by tensor parallelism, so no process has all heads, and {who} needs "
                "them; use DistributedDataParallel or FSDP2"
            )


def validate_not_sharded(model: nn.Module, who: str, instead: str) -> None:
    """Raise ValueError if a parameter is sharded: `who` needs the whole model in one process."""
    for name, param in model.named_parameters():
        if is_sharded(param):
            raise ValueError(f"{name}: its parameter is sharded, and {who} needs the whole model; {instead}")
