"""A stack of the modules of a model whose forward is running, kept by forward hooks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

from torch import nn

from quacklr.util.modules import named_modules


@dataclass(slots=True)
class ModuleStack:
    """The names and the numbers of the calls that are running, outermost first.

    The first ones, "" and 0, are those of the code around the model.
    """

    modules: tuple[str, ...] = ("",)
    calls: tuple[int, ...] = (0,)


@contextmanager
def module_stack(model: nn.Module) -> Iterator[ModuleStack]:
    """While entered, keeps a stack of the running modules of a model, without softmax modules."""
    stack = ModuleStack()
    numbers = count(1)
    hooks: list[Any] = []

    def begin(name: str, *_: Any) -> None:
        stack.modules += (name,)
        stack.calls += (next(numbers),)

    def end(*_: Any) -> None:
        stack.modules, stack.calls = stack.modules[:-1], stack.calls[:-1]

    for name, module in named_modules(model):
        if not isinstance(module, nn.Softmax):
            hooks.append(module.register_forward_pre_hook(partial(begin, name)))
            hooks.append(module.register_forward_hook(end, always_call=True))
    try:
        yield stack
    finally:
        for hook in hooks:
            hook.remove()
