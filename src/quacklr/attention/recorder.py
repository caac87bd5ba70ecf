"""Record the largest logit of each head of some attention modules while a model trains.

The forwards of these modules are wrapped; the rest of the model does not change. Compiled code inside of them runs
uncompiled, because a compiled graph does not expose its logits. The exception is flex attention on CUDA, whose kernel
can return the maxima.
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

from quacklr.attention.axes import HeadOrder
from quacklr.attention.flex import find_references, report_maxima
from quacklr.attention.head_order import HeadOrders
from quacklr.attention.interceptor import AttentionInterceptor, leading_shape
from quacklr.attention.logits import Logits
from quacklr.util.module_stack import ModuleCall
from quacklr.util.modules import named_modules, run_uncompiled


class MaxLogitRecorder:
    """Calls `on_max(name, max_H)` for attention modules, in every forward in training mode with gradients.

    `heads`: the number of heads of each module. An attention in it that has another number of heads is ignored.
    """

    def __init__(self, model: nn.Module, heads: Mapping[str, int], on_max: Callable[[str, Tensor], None]) -> None:
        self.heads, self.on_max = heads, on_max
        self._running: list[ModuleCall] = []
        self._orders = HeadOrders()
        self._flex = find_references(model)
        self._forwards = [RecordedForward(self, name, module) for name, module in named_modules(model) if name in heads]

    @contextmanager
    def recording(self, call: ModuleCall) -> Iterator[None]:
        """While entered, logits belong to the module of this call."""
        self._running.append(call)
        try:
            with self._intercepting() if len(self._running) == 1 else nullcontext():
                yield
        finally:
            self._running.pop()

    @contextmanager
    def _intercepting(self) -> Iterator[None]:
        interceptor: Any = AttentionInterceptor(self._on_logits, self._order_of)

        @contextmanager
        def pause() -> Iterator[None]:
            interceptor.__exit__(None, None, None)
            try:
                with torch.compiler.set_stance("default"):
                    yield
            finally:
                interceptor.__enter__()

        with run_uncompiled(), report_maxima(self._flex, self._on_max, pause), interceptor:
            yield

    def _order_of(self, tensors: Sequence[Tensor], given: int | None) -> HeadOrder:
        heads = self.heads[self._running[-1].name]
        if given is None and math.prod(leading_shape(tensors)) % heads:
            given = 0  # not the attention of this module, so its order of heads is not needed
        return self._orders.find(self._running, tensors, given, heads)

    def _on_logits(self, logits: Logits) -> None:
        if logits.heads == self.heads[self._running[-1].name]:
            self._on_max(logits.max_per_head())

    def _on_max(self, max_H: Tensor) -> None:
        self.on_max(self._running[-1].name, max_H)

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
        self._run: Any = torch.compiler.disable(_run_recorded)
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward, recorded in training."""
        return self._run(self, args, kwargs)

    def remove(self) -> None:
        """Restore the module's own forward."""
        if vars(self.module).get("forward") is not self:
            self.recorder = None  # another wrapper calls this forward, so it stays, without recording
        elif self.before is None:
            del self.module.forward
        else:
            self.module.forward = self.before

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return plain_forward(memo[id(self.module)], copy.deepcopy(self.before, memo))

    def __reduce__(self) -> Any:
        return plain_forward, (self.module, self.before)


def plain_forward(module: nn.Module, before: Any) -> Any:
    """The forward of a module that is not recorded: `before` if the instance had one, else that of its class."""
    return MethodType(type(module).forward, module) if before is None else before


def _run_recorded(forward: RecordedForward, args: Any, kwargs: Any) -> Any:
    if forward.recorder is None or not (forward.module.training and torch.is_grad_enabled()):
        return forward.__wrapped__(*args, **kwargs)
    with forward.recorder.recording(ModuleCall(forward.name, forward.module, forward.__wrapped__, args, kwargs)):
        return forward.__wrapped__(*args, **kwargs)
