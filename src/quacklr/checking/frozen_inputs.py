"""The logits of a batch, with the inputs of every attention held at what they were when it was first heard.

What a layer's weights do to its own logits is then seen alone: its inputs do not change with the layers before it.

Shapes: B batch, H head, I query, J key.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from quacklr.checking.expected_rows import ExpectedLayer
from quacklr.checking.inputs import Inputs
from quacklr.logits.capture import capture_logits
from quacklr.logits.head_order import HeadOrders
from quacklr.logits.logits import Logits
from quacklr.util.modules import named_modules, own_buffers, run, undisturbed
from quacklr.util.torch_functions import copied

STILL = 1e-5  # of a head's largest logit: a change that is rounding
KEPT = 2**20  # logits of an attention that are kept: of a long context, those of the last queries


class FrozenInputs:
    """A forward of the batch, now; and how far logits are from it whenever it is asked again.

    Of each layer, `scales` has the largest factor between q.k and the logit, `sizes` (H,) the largest |logit|,
    `rounding` (H,) the changes that are none, `strange` the numbers of heads that were heard in its module and are
    not its own, and `unread` why its logits cannot be read, if they cannot; `lengths` has those of the inputs.
    """

    def __init__(self, model: nn.Module, layers: Sequence[ExpectedLayer], batch: Any, orders: HeadOrders) -> None:
        self.model, self.layers, self.batch, self.orders = model, layers, batch, orders
        alone = Counter(layer.module for layer in layers)
        self._heads = {layer.module: layer.heads for layer in layers if alone[layer.module] == 1}
        self.scales = [0.0] * len(self.layers)
        self.strange: list[set[int]] = [set() for _ in self.layers]
        self.unread = [""] * len(self.layers)
        self._inputs: dict[str, list[Any]] = {layer.module: [] for layer in self.layers}
        with Inputs([weight for layer in self.layers for term in layer.terms for weight in term.ends]) as self.lengths:
            self.first = self._heard(self._record)
        self.unread = [of or unreadable(calls) for of, calls in zip(self.unread, self.first, strict=True)]
        zeros = [[torch.zeros_like(call_BHIJ) for call_BHIJ in calls] for calls in self.first]
        self.sizes = self._between(self.first, zeros)
        self.rounding = [max(STILL, 4 * precision(layer)) * of for layer, of in zip(layers, self.sizes, strict=True)]

    def change(self) -> list[Tensor]:
        """For each layer (H,): the largest |change| of a logit that a query may look at, since the first time.

        NaN where logits cannot be compared: there are others, or some are not finite.
        """
        return self._between(self.first, self._heard(self._replay))

    def _between(self, one: list[list[Tensor]], other: list[list[Tensor]]) -> list[Tensor]:
        return [largest_logits(*each) for each in zip(self.layers, one, other, strict=True)]

    def _heard(self, hook: Callable[[str, int, Any], Any]) -> list[list[Tensor]]:
        heard: list[list[Tensor]] = [[] for _ in self.layers]

        def listen(name: str, logits: Logits) -> None:
            for number in self._within(name):
                if name in self.orders.unknown:
                    self.unread[number] = self.orders.unknown[name]
                    continue
                if logits.heads != self.layers[number].heads:
                    self.strange[number].add(logits.heads)
                    continue
                rows_BHIJ = logits.rows(_some(logits))
                if not heard[number] or len(rows_BHIJ) == len(heard[number][0]):  # else B is not the batch: big_bird
                    heard[number].append(rows_BHIJ)
                    self.scales[number] = max(self.scales[number], abs(logits.scale))

        torch.clear_autocast_cache()  # it keeps casts of weights that have changed since
        with self._prepared(hook), capture_logits(self.model, listen, self._heads, self.orders):
            run(self.model, self.batch)
        return heard

    @contextmanager
    def _prepared(self, hook: Callable[[str, int, Any], Any]) -> Iterator[None]:
        with undisturbed(self.model), own_buffers(self.model), _hooked(self.model, self._inputs, hook):
            yield

    def _within(self, name: str) -> list[int]:
        """The layers of the innermost claimed module that an attention was heard in."""
        outer = [
            layer.module for layer in self.layers if f"{name}.".startswith(f"{layer.module}." * bool(layer.module))
        ]
        inner = max(outer, key=len, default=None)
        return [number for number, layer in enumerate(self.layers) if layer.module == inner]

    def _record(self, module: str, call: int, given: Any) -> Any:
        assert call == len(self._inputs[module])
        self._inputs[module].append(copied(given))
        return given

    def _replay(self, module: str, call: int, given: Any) -> Any:
        recorded = self._inputs[module]
        return copied(given, recorded[call]) if call < len(recorded) else given


def largest_logits(layer: ExpectedLayer, calls: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
    """(H,): the largest |difference|, over all calls, of logits that may be looked at."""
    if [call_BHIJ.shape for call_BHIJ in calls] != [call_BHIJ.shape for call_BHIJ in others]:
        return torch.full((layer.heads,), torch.nan)
    found_H = torch.zeros(layer.heads)
    for one_BHIJ, other_BHIJ in zip(calls, others, strict=True):
        hidden_BHIJ = (one_BHIJ == -torch.inf) | (other_BHIJ == -torch.inf)
        found_H = found_H.maximum((one_BHIJ - other_BHIJ).masked_fill(hidden_BHIJ, 0).abs().amax((0, 2, 3)).cpu())
    return found_H


def unreadable(calls: Sequence[Tensor]) -> str:
    """Why some heads' logits show nothing, if that is so."""
    if any(bool((call_BHIJ.isnan() | (call_BHIJ == torch.inf)).any()) for call_BHIJ in calls):
        return "its logits are not finite"
    seen_H = [(call_BHIJ > -torch.inf).any(0).flatten(1).any(1) for call_BHIJ in calls]
    return "some heads look at nothing" if calls and not torch.stack(seen_H).any(0).all() else ""


def precision(layer: ExpectedLayer) -> float:
    """The relative precision that the layer's weights are stored in."""
    return max(torch.finfo(weight.param.dtype).eps for weight in layer.weights)


def _some(logits: Logits) -> slice:
    """All queries, or the last ones, that may look at most, so that no more are kept."""
    return slice(max(0, logits.queries - max(1, KEPT // logits.rows(slice(0, 1)).numel())), None)


@contextmanager
def _hooked(model: nn.Module, names: Mapping[str, Any], hook: Callable[[str, int, Any], Any]) -> Iterator[None]:
    """While entered, what goes into each call of some modules is what the hook makes of it."""
    calls = dict.fromkeys(names, -1)

    def before(name: str, args: Any, kwargs: Any) -> Any:
        calls[name] += 1
        return hook(name, calls[name], (args, kwargs))

    hooks = [
        module.register_forward_pre_hook(lambda _, a, k, name=name: before(name, a, k), with_kwargs=True)
        for name, module in named_modules(model)
        if name in names
    ]
    try:
        yield
    finally:
        for each in hooks:
            each.remove()
