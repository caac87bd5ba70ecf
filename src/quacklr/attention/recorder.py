"""Record the largest logit of each head of some attention modules while a model trains.

The forwards of these modules are wrapped; the rest of the model does not change. Compiled code inside of them runs
uncompiled, because a compiled graph does not expose its logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from quacklr.attention.axes import HeadAxes, conventional_axes
from quacklr.attention.interceptor import AttentionInterceptor
from quacklr.attention.logits import Logits
from quacklr.util.modules import named_modules, run_uncompiled

MERGED = (
    "{}: its logits have heads and batch in one axis, so QK clip cannot see which entry belongs to which head; give "
    "the heads an axis of their own, (batch, heads, queries, keys), or train with batches of one sequence"
)


class MaxLogitRecorder:
    """Calls `on_max(name, max_H)` for attention modules, in every forward in training mode with gradients.

    `heads`: the number of heads of each module. An attention in it that has another number of heads is ignored.
    """

    def __init__(self, model: nn.Module, heads: Mapping[str, int], on_max: Callable[[str, Tensor], None]) -> None:
        self.heads, self.on_max = heads, on_max
        self._running: list[str] = []
        self._forwards = [RecordedForward(self, name, module) for name, module in named_modules(model) if name in heads]

    @contextmanager
    def recording(self, name: str) -> Iterator[None]:
        """While entered, logits belong to the module of this name."""
        self._running.append(name)
        try:
            if len(self._running) > 1:  # in the forward of another recorded module
                yield
                return
            with run_uncompiled(), AttentionInterceptor(self._on_logits, self._axes_of):
                yield
        finally:
            self._running.pop()

    def _axes_of(self, lead: tuple[int, ...]) -> HeadAxes:
        return conventional_axes(lead, self.heads[self._running[-1]])

    def _on_logits(self, logits: Logits) -> None:
        name = self._running[-1]
        if not logits.heads_known and logits.shape[1] % self.heads[name] == 0:
            raise ValueError(MERGED.format(name or "the model"))
        if logits.shape[1] == self.heads[name]:
            self.on_max(name, logits.max_per_head())

    def remove(self) -> None:
        """Unwrap the forwards."""
        for forward in self._forwards:
            forward.remove()


class RecordedForward:
    """The wrapped forward of a module. A deep copy or a pickle of the module has its plain forward."""

    def __init__(self, recorder: MaxLogitRecorder, name: str, module: nn.Module) -> None:
        self.recorder: MaxLogitRecorder | None = recorder
        self.name, self.module = name, module
        self.before = vars(module).get("forward")
        self.__wrapped__ = module.forward  # read by inspect.signature
        self._run: Any = torch.compiler.disable(self._recorded)
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward, recorded in training."""
        return self._run(args, kwargs)

    def _recorded(self, args: Any, kwargs: Any) -> Any:
        if self.recorder is None or not (self.module.training and torch.is_grad_enabled()):
            return self.__wrapped__(*args, **kwargs)
        with self.recorder.recording(self.name):
            return self.__wrapped__(*args, **kwargs)

    def remove(self) -> None:
        """Restore the module's own forward."""
        if vars(self.module).get("forward") is not self:
            self.recorder = None  # another wrapper calls this forward, so it stays, without recording
        elif self.before is None:
            del self.module.forward
        else:
            self.module.forward = self.before

    def __reduce__(self) -> Any:
        return plain_forward, (self.module, self.before)


def plain_forward(module: nn.Module, before: Any) -> Any:
    """The forward of a module that is not recorded: `before` if the instance had one, else that of its class."""
    return MethodType(type(module).forward, module) if before is None else before
