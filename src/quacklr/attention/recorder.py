"""Record the largest logit of each head of some attention modules while a model trains.

The forwards of these modules are wrapped; the rest of the model does not change. Compiled code inside of them runs
uncompiled, because a compiled graph does not expose its logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from quacklr.attention.axes import conventional_axes
from quacklr.attention.interceptor import AttentionInterceptor
from quacklr.attention.logits import Logits
from quacklr.util.modules import named_modules, run_uncompiled

MERGED = (
    "{}: its logits have heads and batch in one axis, so QK clip cannot see which entry belongs to which head; give "
    "the heads an axis of their own, (batch, heads, queries, keys), or train with batches of one sequence"
)


def record_max_logits(
    model: nn.Module, heads: Mapping[str, int], on_max: Callable[[str, Tensor], None]
) -> list[RecordedForward]:
    """Call `on_max(name, max_H)` for attention modules, in every forward in training mode with gradients.

    `heads`: the number of heads of each module. An attention in it that has another number of heads is ignored.
    """
    running: list[str] = []
    modules = [(name, module) for name, module in named_modules(model) if name in heads]
    return [RecordedForward(name, module, heads[name], on_max, running) for name, module in modules]


class RecordedForward:
    """The wrapped forward of a module. A deep copy or a pickle of the module has its plain forward.

    `running`: the names of the recorded modules whose forward is running, innermost last.
    """

    def __init__(
        self, name: str, module: nn.Module, heads: int, on_max: Callable[[str, Tensor], None], running: list[str]
    ) -> None:
        self.name, self.module, self.heads, self.on_max, self.running = name, module, heads, on_max, running
        self.records = True
        self.before = vars(module).get("forward")
        self.__wrapped__ = module.forward  # read by inspect.signature
        self._run: Any = torch.compiler.disable(self._recorded)
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward, recorded in training."""
        return self._run(args, kwargs)

    def _recorded(self, args: Any, kwargs: Any) -> Any:
        if not (self.records and self.module.training and torch.is_grad_enabled()):
            return self.__wrapped__(*args, **kwargs)
        self.running.append(self.name)
        try:
            with run_uncompiled(), AttentionInterceptor(self._on_logits, partial(conventional_axes, heads=self.heads)):
                return self.__wrapped__(*args, **kwargs)
        finally:
            self.running.pop()

    def _on_logits(self, logits: Logits) -> None:
        heads = logits.shape[1]
        if self.running[-1] != self.name:  # the logits of a recorded module inside of this one
            return
        if not logits.heads_known and heads % self.heads == 0:
            raise ValueError(MERGED.format(self.name or "the model"))
        if heads == self.heads:
            self.on_max(self.name, logits.max_per_head())

    def remove(self) -> None:
        """Restore the module's own forward."""
        if vars(self.module).get("forward") is not self:
            self.records = False  # another wrapper calls this forward, so it stays, without recording
        elif self.before is None:
            del self.module.forward
        else:
            self.module.forward = self.before

    def __reduce__(self) -> Any:
        return plain_forward, (self.module, self.before)


def plain_forward(module: nn.Module, before: Any) -> Any:
    """The forward of a module that is not recorded: `before` if the instance had one, else that of its class."""
    return MethodType(type(module).forward, module) if before is None else before
