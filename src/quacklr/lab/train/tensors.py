"""The tensors of a run by name, for a checkpoint: those of the model, and what its optimizers remember.

    model.blocks.0.attention.q.weight                               a parameter or buffer
    optimizer.0.blocks.0.attention.q.weight.momentum_buffer         what optimizer 0 remembers of a parameter

Names are the same however a model is sharded, so a checkpoint of one world size fits any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from quacklr.lab.errors import UserError

MODEL = "model."
Kind: TypeAlias = tuple[torch.Size, torch.dtype]
"""What a checkpoint says about a tensor without its numbers; the shape is that of all shards together."""


def tensors_of(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """All tensors of a run. They share their memory with the model and the optimizers: to fill one is to load it.

    A parameter that several modules share is there once. An optimizer that has not stepped remembers nothing.
    The order is always the same.
    """
    own = model.state_dict(keep_vars=True)
    first = {tensor: name for name, tensor in reversed(own.items())}
    found = {f"{MODEL}{name}": tensor.detach() for name, tensor in own.items() if first[tensor] == name}
    for name, optimizer, _, param in _stepped(optimizers):
        found |= {f"{name}.{key}": value for key, value in sorted(optimizer.state.get(param, {}).items())}
    return found


def tensors_for(saved: Mapping[str, Kind], model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """The tensors of a run that a checkpoint with these can fill; what the optimizers lack is made.

    UserError for a tensor that either does not have, or that has another shape or type.
    """
    _make_room(saved, optimizers)
    found = tensors_of(model, optimizers)
    for name in [*found, *saved]:
        if name not in saved:
            raise UserError(f"the checkpoint has no {name}, which the run has; it is of another version: start anew")
        if name not in found:
            raise UserError(f"the checkpoint has {name}, which the run has not; it is of another version: start anew")
        if (here := (found[name].shape, found[name].dtype)) != saved[name]:
            there, own = (f"{list(shape)} of {str(dtype)[6:]}" for shape, dtype in (saved[name], here))
            raise UserError(f"{name} is {there} in the checkpoint, but {own} in the run; start anew")
    return found


def _make_room(saved: Mapping[str, Kind], optimizers: Sequence[Optimizer]) -> None:
    """Give the optimizers zeros for what a checkpoint remembers and they, before their first step, do not."""
    keys: dict[str, list[str]] = {}
    for name, _, key in (each.rpartition(".") for each in saved):
        keys.setdefault(name, []).append(key)
    for name, optimizer, group, param in _stepped(optimizers):
        for key in keys.get(name, []):
            if key not in optimizer.state[param]:
                optimizer.state[param][key] = _zeros(key, saved[f"{name}.{key}"], group, param)


def _zeros(key: str, kind: Kind, group: Mapping[str, Any], param: Tensor) -> Tensor:
    """As the optimizer would make it: sharded like its parameter, but for the number of steps, which is on the CPU."""
    shape, dtype = kind
    if key != "step" and shape == param.shape:
        return torch.zeros_like(param, dtype=dtype, requires_grad=False)
    # fused and capturable steps count where the parameter is: torch's own load_state_dict has the same exception
    counted_there = group.get("fused") or group.get("capturable")
    return torch.zeros(shape, dtype=dtype, device=param.device if counted_there else "cpu")


def _stepped(optimizers: Sequence[Optimizer]) -> Iterator[tuple[str, Optimizer, dict[str, Any], Tensor]]:
    """Every parameter that an optimizer steps, named by both."""
    for number, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            for name, param in zip(group["param_names"], group["params"], strict=True):
                yield f"optimizer.{number}.{name}", optimizer, group, param
