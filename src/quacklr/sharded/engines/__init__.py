"""Engines that step flat ranges of parameters. Finds the one that trains a model, from what QuacK is given."""

from __future__ import annotations

from typing import Any

from torch import nn

from quacklr.sharded.engines.deepspeed import deepspeed_optimizer, read_deepspeed
from quacklr.sharded.engines.engine import Engine, unwrapped_optimizer
from quacklr.sharded.engines.fsdp1 import read_fsdp1
from quacklr.sharded.engines.megatron import megatron_optimizers, read_megatron


def as_module(model: Any) -> nn.Module | None:
    """The model as one module; None if it is none. Megatron has its model chunks in a list."""
    if isinstance(model, list | tuple) and model and all(isinstance(each, nn.Module) for each in model):
        if len(model) > 1:
            raise ValueError(
                f"the model is a list of {len(model)} modules, as with Megatron's virtual pipeline, which QuacK does "
                "not support; use one model chunk in each rank"
            )
        return model[0]
    return model if isinstance(model, nn.Module) else None


def engine_of(model: nn.Module | None, optimizer: Any) -> Engine:
    """The engine whose objects are given. ValueError, by name, for one whose ranges cannot be read."""
    optimizer = unwrapped_optimizer(optimizer)
    if (zero := deepspeed_optimizer(optimizer)) is not None:
        return read_deepspeed(zero)
    if found := megatron_optimizers(optimizer):
        return read_megatron(found)
    return Engine() if model is None else read_fsdp1(model)
