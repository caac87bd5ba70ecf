"""Errors for models that are sharded in ways which QuacK, the monitor or the clip do not support."""

from __future__ import annotations

from torch import nn

from quacklr.core.local import is_sharded, shard_counts
from quacklr.sharded.collectives import Groups, fully_sharded, is_distributed
from quacklr.util.caller import warn

ALONE = (
    "{} was given a model that is neither DistributedDataParallel nor sharded, but there are several ranks: each rank "
    "uses the logits of its own data and of its own heads only, so a clip would make replicas different; wrap the "
    "model first, then pass it"
)


def warn_if_alone(groups: Groups, who: str) -> None:
    """Warn if there are several processes, but none with which this one combines its logits."""
    if not groups and is_distributed():
        warn(ALONE.format(who))


def validate_no_tensor_parallel(model: nn.Module, who: str, by_engine: bool = False) -> None:
    """Under tensor parallelism each process computes only some heads; under FSDP2 every process computes all heads."""
    by_data = {id(param) for module in fully_sharded(model) for param in module.parameters()}
    for name, param in model.named_parameters():
        sizes = shard_counts(param)[id(param) in by_data :]  # the first count may be FSDP2's
        if by_engine or any(size > 1 for size in sizes):
            raise ValueError(
                f"{name}: its parameter is cut by tensor parallelism, so no process has all heads, and {who} needs "
                "them; use DistributedDataParallel or FSDP2"
            )


def validate_not_sharded(model: nn.Module, who: str, instead: str) -> None:
    """Raise ValueError if a parameter is sharded: `who` needs the whole model in one process."""
    for name, param in model.named_parameters():
        if is_sharded(param):
            raise ValueError(f"{name}: its parameter is sharded, and {who} needs the whole model; {instead}")
