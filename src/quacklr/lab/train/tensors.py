"""The tensors of a checkpoint by name: model and optimizer state.

    model.blocks.0.attention.q.weight                               a parameter or buffer
    optimizer.0.blocks.0.attention.q.weight.momentum_buffer         state of a parameter in optimizer 0

Names do not depend on sharding, so a checkpoint can be loaded with any world size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from quacklr.lab.errors import UserError

MODEL = "model."
TensorSpec: TypeAlias = tuple[torch.Size, torch.dtype]
"""Shape and dtype of a tensor; the shape is the global one, over all shards."""


def named_tensors(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """All tensors of a run, in a fixed order. They share memory with the model and the optimizers.

    A parameter that several modules share appears once. An optimizer has no state before its first step.
    """
    own = model.state_dict(keep_vars=True)
    first = {tensor: name for name, tensor in reversed(own.items())}
    found = {f"{MODEL}{name}": tensor.detach() for name, tensor in own.items() if first[tensor] == name}
    for name, optimizer, _, param in _optimized_parameters(optimizers):
        found |= {f"{name}.{key}": value for key, value in sorted(optimizer.state.get(param, {}).items())}
    return found


def tensors_to_load(
    saved: Mapping[str, TensorSpec], model: nn.Module, optimizers: Sequence[Optimizer]
) -> dict[str, Tensor]:
    """The tensors of a run that a checkpoint is read into; missing optimizer state is created.

    UserError if a tensor is missing in the run or in the checkpoint, or has another shape or dtype.
    """
    _init_optimizer_state(saved, optimizers)
    found = named_tensors(model, optimizers)
    for name in [*found, *saved]:
        if name not in saved:
            raise UserError(f"the checkpoint has no {name}, which the run has; it is of another version: start anew")
        if name not in found:
            raise UserError(f"the checkpoint has {name}, which the run lacks; it is of another version: start anew")
        if (spec := (found[name].shape, found[name].dtype)) != saved[name]:
            old, new = (f"{list(shape)} of {str(dtype)[6:]}" for shape, dtype in (saved[name], spec))
            raise UserError(f"{name} is {old} in the checkpoint, but {new} in the run; start anew")
    return found


def _init_optimizer_state(saved: Mapping[str, TensorSpec], optimizers: Sequence[Optimizer]) -> None:
    """Create zeros for optimizer state that is in the checkpoint but not yet in the optimizers."""
    keys: dict[str, list[str]] = {}
    for name, _, key in (each.rpartition(".") for each in saved):
        keys.setdefault(name, []).append(key)
    for name, optimizer, group, param in _optimized_parameters(optimizers):
        for key in keys.get(name, []):
            if key not in optimizer.state[param]:
                optimizer.state[param][key] = _zeros(key, saved[f"{name}.{key}"], group, param)


def _zeros(key: str, kind: TensorSpec, group: Mapping[str, Any], param: Tensor) -> Tensor:
    """Zeros as the optimizer creates them: sharded like the parameter; the step count is on the CPU."""
    shape, dtype = kind
    if key != "step" and shape == param.shape:
        return torch.zeros_like(param, dtype=dtype, requires_grad=False)
    # fused and capturable optimizers keep it on the device of the parameter, as in torch's load_state_dict
    on_device = group.get("fused") or group.get("capturable")
    return torch.zeros(shape, dtype=dtype, device=param.device if on_device else "cpu")


def _optimized_parameters(optimizers: Sequence[Optimizer]) -> Iterator[tuple[str, Optimizer, dict[str, Any], Tensor]]:
    """Every parameter of the optimizers, with the name of its state in a checkpoint and its param group."""
    for number, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            for name, param in zip(group["param_names"], group["params"], strict=True):
                yield f"optimizer.{number}.{name}", optimizer, group, param
