"""Which modules of a model are running: a forward hook keeps a stack of them."""

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
    """A forward that has begun and not ended: what was called with what, under which autocast.

    `attentions`: how many of them have been seen since it began.
    """

    name: str
    module: nn.Module
    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    attentions: int = 0
    autocast: tuple[str, bool, torch.dtype] = field(init=False)

    @property
    def tensors(self) -> list[Tensor]:
        """Those that were given, by place and by name."""
        return tensors_in([*self.args, *self.kwargs.values()])

    def __post_init__(self) -> None:
        device = next((tensor.device.type for tensor in self.tensors), "cpu")
        self.autocast = device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


@dataclass(slots=True)
class ModuleStack:
    """The modules whose forward has begun and not ended, outermost first, and a number for each such call."""

    modules: tuple[str, ...] = ("",)
    calls: tuple[int, ...] = (0,)
    forwards: tuple[ModuleCall, ...] = ()
    _count: Iterator[int] = field(default_factory=lambda: count(1))

    def begin(self, name: str, forward: ModuleCall) -> None:
        """A module's forward begins."""
        self.modules, self.calls = (*self.modules, name), (*self.calls, next(self._count))
        self.forwards = (*self.forwards, forward)

    def end(self) -> None:
        """The innermost one's forward ends."""
        self.modules, self.calls, self.forwards = self.modules[:-1], self.calls[:-1], self.forwards[:-1]


@contextmanager
def module_stack(model: nn.Module) -> Iterator[ModuleStack]:
    """While entered, tells which of the model's modules are running, but for a softmax that is a module."""
    now = ModuleStack()
    hooks: list[Any] = []

    def begin(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        now.begin(name, ModuleCall(name, module, module.forward, args, kwargs))

    for name, module in named_modules(model):
        if not isinstance(module, nn.Softmax):
            hooks.append(module.register_forward_pre_hook(partial(begin, name), with_kwargs=True))
            hooks.append(module.register_forward_hook(lambda *_: now.end(), always_call=True))
    try:
        yield now
    finally:
        for hook in hooks:
            hook.remove()
