"""Data parallelism: each process has a replica of the model (DDP) or a shard of it (FSDP2), and its own rows.

Gradients are means over all rows, so a step equals that of one process up to the order of additions. They are reduced
once per step, after the last micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from quacklr.lab.config import Machine
from quacklr.lab.model import Decoder
from quacklr.lab.train.world import World
from quacklr.sharded.collectives import fully_sharded


def parallelize(model: Decoder, machine: Machine, world: World) -> nn.Module:
    """Wrap (DDP) or shard (FSDP2) the model if there are several processes; call it before creating the optimizers."""
    if world.size == 1:
        return model
    if machine.parallel == "ddp":
        device = next(model.parameters()).device
        devices = None if device.type == "cpu" else [device]
        known = signature(DistributedDataParallel).parameters
        sync_buffers = (
            "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        )  # torch < 2.13
        settings: dict[str, Any] = {sync_buffers: False}  # the buffers are position tables, equal on all ranks
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
    """Wraps a forward and backward pass: gradients are reduced after the last micro-batch only."""
    if isinstance(forward, DistributedDataParallel) and not last:
        with forward.no_sync():
            yield
        return
    sharded: list[Any] = fully_sharded(forward)[:1]
    for root in sharded:
        root.set_requires_gradient_sync(last)
    yield


def clip_gradients(model: nn.Module, max_norm: float) -> float:
    """Clip the global norm of the gradients over all processes, and return the norm before clipping."""
    norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
