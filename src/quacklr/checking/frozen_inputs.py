"""The logits of a batch while the inputs of every attention module are frozen at those of a first forward pass.

The change of a layer's logits then comes from the layer's own weights alone, not from the layers before it.

Shapes: B batch, H head, I query, J key.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from quacklr.checking.expected_rows import ExpectedLayer
from quacklr.checking.inputs import Inputs
from quacklr.checking.sandbox import Sandbox
from quacklr.logits.capture import capture_logits
from quacklr.logits.logits import Logits
from quacklr.util.modules import named_modules, own_buffers, run, undisturbed
from quacklr.util.torch_functions import copied

ROUNDING = 1e-5  # of a head's largest logit: a change that is only rounding
KEPT = 2**20  # logits kept for each attention; of a long context, those of the last queries


class FrozenInputs:
    """Runs a first forward pass of the batch; `change` runs it again and compares the logits.

    For each layer: `logits` has those of the first pass, (B, H, I, J) for each call; `scales` the largest factor
    between q.k and the logit; `sizes` (H,) the largest |logit|; `rounding` (H,) the largest change that counts as
    none; `other_head_counts` the numbers of heads with which its module attends and which are not the layer's;
    `unreadable` why its logits cannot be compared, or "". `lengths` has the norms of the inputs of the weights.
    """

    def __init__(self, sandbox: Sandbox, layers: Sequence[ExpectedLayer]) -> None:
        self.sandbox, self.layers = sandbox, layers
        count = Counter(layer.module for layer in layers)
        self._heads = {layer.module: layer.heads for layer in layers if count[layer.module] == 1}
        self.scales = [0.0] * len(layers)
        self.other_head_counts: list[set[int]] = [set() for _ in layers]
        self.unreadable = [""] * len(layers)
        self._inputs: dict[str, list[Any]] = {layer.module: [] for layer in layers}
        with Inputs([weight for layer in layers for path in layer.paths for weight in path.ends]) as self.lengths:
            self.logits = self._forward(record=True)
        self.unreadable = [why or _unreadable(of) for why, of in zip(self.unreadable, self.logits, strict=True)]
        self.sizes = self._largest([[torch.zeros_like(call_BHIJ) for call_BHIJ in of] for of in self.logits])
        self.rounding = [max(ROUNDING, 4 * _eps(layer)) * size for layer, size in zip(layers, self.sizes, strict=True)]

    def change(self) -> list[Tensor]:
        """For each layer (H,): the largest |change| of an unmasked logit since the first forward pass.

        NaN if the logits cannot be compared, because their number or shape differs or some are not finite.
        """
        return self._largest(self._forward(record=False))

    def _largest(self, others: list[list[Tensor]]) -> list[Tensor]:
        return [largest_difference(*each) for each in zip(self.layers, self.logits, others, strict=True)]

    def _forward(self, record: bool) -> list[list[Tensor]]:
        logits: list[list[Tensor]] = [[] for _ in self.layers]

        def keep(name: str, of: Logits) -> None:
            for number in self._layers_of(name):
                self._keep(number, self.sandbox.orders.unknown.get(name, ""), of, logits[number])

        model = self.sandbox.model
        torch.clear_autocast_cache()  # it holds casts of weights that have changed since
        attention = capture_logits(model, keep, self._heads, self.sandbox.orders)
        with undisturbed(model), own_buffers(model), self._hooked(record), attention:
            run(model, self.sandbox.batch)
        return logits

    def _keep(self, number: int, why_unknown: str, of: Logits, logits: list[Tensor]) -> None:
        if why_unknown:
            self.unreadable[number] = why_unknown
        elif of.heads != self.layers[number].heads:
            self.other_head_counts[number].add(of.heads)
        else:
            rows = max(1, KEPT // of.rows(slice(0, 1)).numel())
            rows_BHIJ = of.rows(slice(max(0, of.queries - rows), None))
            if not logits or len(rows_BHIJ) == len(logits[0]):  # otherwise B is not the batch: big_bird
                logits.append(rows_BHIJ)
                self.scales[number] = max(self.scales[number], abs(of.scale))

    def _layers_of(self, name: str) -> list[int]:
        """The layers of the innermost module with paths that an attention ran in."""
        modules = [of.module for of in self.layers if f"{name}.".startswith(f"{of.module}." * bool(of.module))]
        inner = max(modules, key=len, default=None)
        return [number for number, layer in enumerate(self.layers) if layer.module == inner]

    @contextmanager
    def _hooked(self, record: bool) -> Iterator[None]:
        """While entered, record the inputs of every call of the layers' modules, or replace them by those recorded."""
        calls: Counter[str] = Counter()

        def before(name: str, args: Any, kwargs: Any) -> Any:
            recorded, call, given = self._inputs[name], calls[name], (args, kwargs)
            calls[name] += 1
            if record:
                recorded.append(copied(given))
            return copied(given, recorded[call]) if not record and call < len(recorded) else given

        hooks = [
            module.register_forward_pre_hook(lambda _, a, k, name=name: before(name, a, k), with_kwargs=True)
            for name, module in named_modules(self.sandbox.model)
            if name in self._inputs
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def largest_difference(layer: ExpectedLayer, calls: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
    """(H,): the largest |difference| of unmasked logits over all calls; NaN if the shapes differ."""
    if [call_BHIJ.shape for call_BHIJ in calls] != [call_BHIJ.shape for call_BHIJ in others]:
        return torch.full((layer.heads,), torch.nan)
    found_H = torch.zeros(layer.heads)
    for one_BHIJ, other_BHIJ in zip(calls, others, strict=True):
        masked_BHIJ = (one_BHIJ == -torch.inf) | (other_BHIJ == -torch.inf)
        found_H = found_H.maximum((one_BHIJ - other_BHIJ).masked_fill(masked_BHIJ, 0).abs().amax((0, 2, 3)).cpu())
    return found_H


def _unreadable(calls: Sequence[Tensor]) -> str:
    """Why the logits of some heads cannot be compared, or ""."""
    if any(bool((call_BHIJ.isnan() | (call_BHIJ == torch.inf)).any()) for call_BHIJ in calls):
        return "its logits are not finite"
    seen_H = [(call_BHIJ > -torch.inf).any(0).flatten(1).any(1) for call_BHIJ in calls]
    return "some heads look at nothing" if calls and not torch.stack(seen_H).any(0).all() else ""


def _eps(layer: ExpectedLayer) -> float:
    """The relative precision of the dtype of the layer's weights."""
    return max(torch.finfo(weight.param.dtype).eps for weight in layer.weights)
