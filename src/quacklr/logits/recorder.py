"""Listen to some attention modules while a model trains, for the largest logit of each head.

Their forwards are wrapped, so the rest of the model does not notice. What is compiled runs uncompiled inside of them,
since a compiled graph shows nobody its logits; all but flex attention on CUDA, whose kernel tells the maxima.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from quacklr.logits.flex import holders, telling
from quacklr.logits.head_order import HeadOrders
from quacklr.logits.interceptor import AttentionInterceptor, Reading
from quacklr.logits.logits import Logits
from quacklr.util.module_stack import ModuleCall
from quacklr.util.modules import named_modules, run_uncompiled

eager: Any = torch.compiler.disable


class MaxLogitRecorder:
    """Tells the (heads,) largest logits of attention modules in every forward in training mode with gradients.

    `heads`: how many each has; an attention inside of one with another number is not the one that is meant. `tell` is
    called with a module's name and its largest logits.
    """

    def __init__(self, model: nn.Module, heads: Mapping[str, int], tell: Callable[[str, Tensor], None]) -> None:
        self.heads, self.tell = heads, tell
        self._running: list[ModuleCall] = []
        self._orders = HeadOrders()
        self._flex = holders(model)
        self._heard = [RecordedForward(self, name, module) for name, module in named_modules(model) if name in heads]

    @contextmanager
    def listening(self, call: ModuleCall) -> Iterator[None]:
        """While entered, what is heard is this module's."""
        self._running.append(call)
        try:
            with self._catching() if len(self._running) == 1 else nullcontext():
                yield
        finally:
            self._running.pop()

    @contextmanager
    def _catching(self) -> Iterator[None]:
        catch: Any = AttentionInterceptor(self._hear, self._read)

        @contextmanager
        def pause() -> Iterator[None]:
            catch.__exit__(None, None, None)
            try:
                with torch.compiler.set_stance("default"):
                    yield
            finally:
                catch.__enter__()

        with run_uncompiled(), telling(self._flex, self._note, pause), catch:
            yield

    def _read(self, shape: Sequence[int], said: int | None) -> Reading:
        reading: Reading = said, None
        heads = self.heads[self._running[-1].name]
        if said is None and math.prod(shape[:-1]) % heads == 0:
            reading = self._orders.read(self._running, shape, heads)
        for call in self._running:
            call.attentions += 1
        return reading

    def _hear(self, logits: Logits) -> None:
        if logits.heads == self.heads[self._running[-1].name]:
            self._note(logits.largest())

    def _note(self, largest_H: Tensor) -> None:
        self.tell(self._running[-1].name, largest_H)

    def remove(self) -> None:
        """Unwrap the forwards."""
        for heard in self._heard:
            heard.remove()


class RecordedForward:
    """The forward of a module that is listened to. A copy of the module, or one that was saved, has its own again."""

    def __init__(self, listener: MaxLogitRecorder, name: str, module: nn.Module) -> None:
        self.listener: MaxLogitRecorder | None = listener
        self.name, self.module = name, module
        self.before = vars(module).get("forward")
        self.__wrapped__ = module.forward  # where inspect.signature looks
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, listened to in training."""
        return recorded(self, args, kwargs)

    def remove(self) -> None:
        """Give the module its own back."""
        if vars(self.module).get("forward") is not self:
            self.listener = None  # somebody has wrapped it again: from here on it only passes on
        elif self.before is None:
            del self.module.forward
        else:
            self.module.forward = self.before

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return forward_of(memo[id(self.module)], copy.deepcopy(self.before, memo))

    def __reduce__(self) -> Any:
        return forward_of, (self.module, self.before)


def forward_of(module: nn.Module, before: Any) -> Any:
    """A module's forward as if nobody had listened."""
    return MethodType(type(module).forward, module) if before is None else before


def _recorded(heard: RecordedForward, args: Any, kwargs: Any) -> Any:
    """A forward that is listened to in training."""
    if heard.listener is None or not (heard.module.training and torch.is_grad_enabled()):
        return heard.__wrapped__(*args, **kwargs)
    with heard.listener.listening(ModuleCall(heard.name, heard.module, heard.__wrapped__, args, kwargs)):
        return heard.__wrapped__(*args, **kwargs)


recorded = eager(_recorded)
