"""Finds the engine that trains a model, from the model and the optimizer that QuacK is given."""

from __future__ import annotations

from typing import Any

from torch import nn

from quacklr.distributed.engines.deepspeed import deepspeed_optimizer, read_deepspeed
from quacklr.distributed.engines.engine import Engine
from quacklr.distributed.engines.fsdp1 import is_fsdp1, read_fsdp1


def engine_of(model: object, optimizer: Any) -> Engine:
    """The engine whose objects are given. ValueError, by name, for one whose ranges cannot be read."""
    if (zero := deepspeed_optimizer(optimizer)) is not None:
        return read_deepspeed(zero)
    if isinstance(model, nn.Module) and is_fsdp1(model):
        return read_fsdp1(model)
    return Engine()
