"""A stack of the modules of a model whose forward is running, kept by forward hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from quacklr.util.modules import named_modules
from quacklr.util.torch_functions import tensors_in


@dataclass(slots=True, eq=False)
class ModuleCall:
    """A call of a module's forward that is running: its arguments, and the autocast state at its start.

    `attentions`: number of attentions that have run since it began. `number`: the call's number in a ModuleStack.
    """

    name: str
    module: nn.Module
    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    number: int = 0
    attentions: int = 0
    autocast: tuple[str, bool, torch.dtype] = field(init=False)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments, positional ones first."""
        return tensors_in((self.args, self.kwargs))

    def __post_init__(self) -> None:
        device = next((tensor.device.type for tensor in self.tensors), "cpu")
        self.autocast = device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


@dataclass(slots=True)
class ModuleStack:
    """The calls of modules that are running, outermost first."""

    forwards: tuple[ModuleCall, ...] = ()

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the running modules, after "" for code around the model."""
        return ("", *(call.name for call in self.forwards))

    @property
    def calls(self) -> tuple[int, ...]:
        """Numbers of the running calls, after 0 for code around the model."""
        return (0, *(call.number for call in self.forwards))


@contextmanager
def module_stack(model: nn.Module) -> Iterator[ModuleStack]:
    """While entered, keeps a stack of the running modules of a model, without softmax modules."""
    stack = ModuleStack()
    numbers = count(1)
    hooks: list[Any] = []

    def begin(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        stack.forwards += (ModuleCall(name, module, module.forward, args, kwargs, next(numbers)),)

    def end(*_: Any) -> None:
        stack.forwards = stack.forwards[:-1]

    for name, module in named_modules(model):
        if not isinstance(module, nn.Softmax):
            hooks.append(module.register_forward_pre_hook(partial(begin, name), with_kwargs=True))
            hooks.append(module.register_forward_hook(end, always_call=True))
    try:
        yield stack
    finally:
        for hook in hooks:
            hook.remove()
