"""One model in many processes: a copy in each (DDP), or a shard in each (FSDP2). Each trains on rows of its own.

Gradients are means over all rows, so the steps are those of one process, but for the order of additions. They are sent
once a step, after the last of its micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from quacklr.distributed.collectives import fully_sharded
from quacklr.lab.config import Machine
from quacklr.lab.model import Decoder
from quacklr.lab.train.world import World


def distributed(model: Decoder, machine: Machine, world: World) -> nn.Module:
    """What is called to train the model: itself, unless there are several processes. Optimizers are made after this."""
    if world.size == 1:
        return model
    if machine.parallel == "ddp":
        device = next(model.parameters()).device
        devices = None if device.type == "cpu" else [device]
        known = signature(DistributedDataParallel).parameters
        of_buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"  # torch < 2.13
        settings: dict[str, Any] = {of_buffers: False}  # tables of positions, the same everywhere
        return DistributedDataParallel(model, devices, gradient_as_bucket_view=True, **settings)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(next(model.parameters()).device.type, (world.size,))
    half = torch.bfloat16 if machine.precision == "bf16" else None
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


@contextmanager
def micro_batch(forward: nn.Module, last: bool) -> Iterator[None]:
    """Around a forward and its backward: gradients are sent after the last of a step only."""
    if isinstance(forward, DistributedDataParallel) and not last:
        with forward.no_sync():
            yield
        return
    sharded: list[Any] = fully_sharded(forward)[:1]
    for root in sharded:
        root.set_requires_gradient_sync(last)
    yield


def clip_gradients(model: nn.Module, largest: float) -> float:
    """Scale all gradients back if their norm, over all processes, is above the largest; and what it was."""
    norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), largest)
    whole: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return float(whole)
