"""Record the largest logit of each head of an attention module while a model trains.

The forward of the module is wrapped; the rest of the model does not change. Compiled code inside of it runs uncompiled,
because a compiled graph does not expose its logits.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from quacklr.attention.interceptor import AttentionInterceptor
from quacklr.attention.logits import HeadAxes, Logits, head_axes, last_axis
from quacklr.util.modules import run_uncompiled

MERGED = (
    "{}: its logits have heads and batch in one axis, so QK clip cannot see which entry belongs to which head; give "
    "the heads an axis of their own, (batch, heads, queries, keys), or train with batches of one sequence"
)


class RecordedForward:
    """The wrapped forward of a module: calls `on_max(name, max_H)` in training mode with gradients.

    `heads`: the number of heads of the module. An attention in it that has another number of heads is ignored.
    `running`: the names of the recorded modules whose forward is running, innermost last; one list for all of them.
    A deep copy or a pickle of the module has its plain forward.
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
            with run_uncompiled(), AttentionInterceptor(self._on_logits, self._axes_of):
                return self.__wrapped__(*args, **kwargs)
        finally:
            self.running.pop()

    def _axes_of(self, lead: tuple[int, ...]) -> HeadAxes:
        """Two leading axes are (B, H) by convention, also if B is H: a batch of training may have any size."""
        return last_axis(lead) if len(lead) == 2 else head_axes(lead, self.heads)

    def _on_logits(self, logits: Logits) -> None:
        heads = logits.shape[1]
        if self.running[-1] != self.name:  # the logits of a recorded module inside of this one
            return
        if not logits.heads_known and heads % self.heads == 0:
            raise ValueError(MERGED.format(self.name or "the model"))
        if heads == self.heads:
            self.on_max(self.name, logits.max_per_head())

    def remove(self) -> None:
        """Restore the module's own forward. If another wrapper calls this one, it stays, without recording."""
        self.records = False
        if vars(self.module).get("forward") is self:
            del self.module.forward
            if self.before is not None:
                self.module.forward = self.before

    def __reduce__(self) -> Any:
        return plain_forward, (self.module, self.before)


def plain_forward(module: nn.Module, before: Any) -> Any:
    """The forward of a module that is not recorded: `before` if the instance had one, else that of its class."""
    return MethodType(type(module).forward, module) if before is None else before
