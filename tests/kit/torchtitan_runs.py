"""torchtitan's real models, parallelisms, optimizers and checkpointer on the CPU, with gloo; not its Trainer.

torchtitan imports triton for kernels that are not used here, and flex attention needs a GPU: triton is a stand-in, and
the product of attention is torchtitan's own class for scaled_dot_product_attention.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

PARTS = ("tools.utils", "distributed.parallel_dims")


def part(name: str) -> Any:
    """A module of torchtitan."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("torch._inductor.select_algorithm")  # before the stand-in: it asks for triton too
        importlib.import_module("torch.nn.attention.flex_attention")
        for missing in ("triton", "triton.language"):
            sys.modules.setdefault(missing, MagicMock())
        for each in PARTS:
            vars(importlib.import_module(f"torchtitan.{each}"))["device_type"] = "cpu"
        found = importlib.import_module(f"torchtitan.{name}")
    warnings.filterwarnings("ignore", "DTensor random operators")  # weights are copied afterwards
    warnings.filterwarnings("ignore", "In CPU autocast")
    return found


def spec_of(name: str) -> Any:
    """The debug model of "llama3" or "deepseek_v3", with two layers, and the shardings that its config declares."""
    spec = part(f"models.{name}").model_registry("debugmodel", attn_backend="flex")
    product = part("models.common.attention").ScaledDotProductAttention
    layers = spec.model.layers[:2]
    for layer in layers:
        layer.attention.inner_attention = product.Config()
    spec = replace(spec, model=replace(spec.model, layers=layers))
    no_experts = {"enable_ep": False} if name == "deepseek_v3" else {}
    declare = getattr(part(f"models.{name}.sharding"), f"set_{name}_sharding_config")
    declare(spec.model, enable_sp=True, **no_experts)
    return spec


def whole_model(spec: Any) -> Any:
    """In one process, with large weights of q and k, so that rates change in a few steps."""
    torch.manual_seed(0)
    model = spec.model.build()
    with torch.no_grad():
        model.init_weights(buffer_device=None)
        for param in model.parameters():
            if param.ndim > 1:
                param.mul_(2)
    return model.train()


def parallel_model(spec: Any, tensor_parallel: int = 1) -> tuple[Any, Any]:
    """The model as torchtitan makes it, with the weights of `whole_model`; and its ParallelDims.

    It is under FSDP2, and under tensor and sequence parallelism if `tensor_parallel` is above 1.
    """
    config, size = part("config"), dist.get_world_size()
    degrees = {"dp_replicate": 1, "dp_shard": size // tensor_parallel, "cp": 1, "tp": tensor_parallel, "pp": 1, "ep": 1}
    backend: Any = {"spmd_backend": "partial_dtensor"}  # the default, spmd_types, needs a later torch than 2.13
    dims = part("distributed").ParallelDims(**degrees, world_size=size, **backend)
    with torch.device("meta"):
        model = spec.model.build()
    model = spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=config.TrainingConfig(mixed_precision_param="float32"),
        parallelism=config.ParallelismConfig(tensor_parallel_degree=tensor_parallel, **backend),
        compile_config=config.CompileConfig(enable=False),
        ac_config=None,
        dump_folder="",
    )
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    copy_weights(whole_model(spec), model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
    return model.train(), dims


@torch.no_grad()
def copy_weights(source: nn.Module, target: nn.Module) -> None:
    for (name, whole), (other, param) in zip(source.named_parameters(), target.named_parameters(), strict=True):
        assert name == other
        sharded: Any = param
        is_sharded = isinstance(sharded, DTensor)
        param.copy_(distribute_tensor(whole, sharded.device_mesh, sharded.placements) if is_sharded else whole)


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights in every process, without shards."""
    params: list[tuple[str, Any]] = [(name, param.detach()) for name, param in model.named_parameters()]
    return {name: (p.full_tensor() if isinstance(p, DTensor) else p).clone() for name, p in params}


def optimizers_of(model: nn.Module) -> Any:
    """torchtitan's OptimizersContainer with AdamW. A small eps would make steps of rounding errors."""
    adamw = part("components.optimizer").default_adamw(lr=0.01, eps=1e-4, implementation="for-loop")
    return adamw.build(model_parts=[model])


def backward(model: nn.Module, number: int) -> None:
    """The same batch in every process. torchtitan adds the gradients of all data ranks, and divides the loss."""
    param: Any = next(model.parameters())
    data_ranks = param.device_mesh.size(0) if isinstance(param, DTensor) else 1
    tokens = torch.randint(0, 2048, (2, 16), generator=torch.Generator().manual_seed(number))
    output: Tensor = model(tokens)
    output = output.full_tensor() if isinstance(output, DTensor) else output
    loss = nn.functional.cross_entropy(output.float().flatten(0, 1), tokens.flatten())
    (loss / data_ranks).backward()


def train_step(model: nn.Module, optimizers: Any, number: int) -> None:
    backward(model, number)
    optimizers.step()
    optimizers.zero_grad()


def checkpointer_of(model: nn.Module, optimizers: Any, folder: Path, **options: Any) -> Any:
    """torchtitan's CheckpointManager, as its Trainer builds it: it saves at every second step to `folder`/saved."""
    parts = part("components.optimizer"), part("components.checkpointer")
    schedulers = parts[0].LRSchedulersContainer.Config(warmup_steps=1).build(optimizers=optimizers, training_steps=9)
    config = parts[1].CheckpointManager.Config(enable=True, folder="saved", interval=2, **options)
    return config.build(
        dataloader=None,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={},
        sd_adapter=None,
        base_folder=str(folder),
    )
