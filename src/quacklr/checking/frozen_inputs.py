"""The logits of a batch while the inputs of every attention module are frozen at those of a first forward pass.

The change of a layer's logits then comes from the layer's own weights alone, not from the layers before it.

Shapes: B batch, H head, I query, J key.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from quacklr.attention.capture import capture_logits
from quacklr.attention.logits import Logits
from quacklr.checking.expected_rows import ExpectedLayer
from quacklr.checking.inputs import Inputs
from quacklr.checking.sandbox import Sandbox
from quacklr.util.modules import named_modules, run, undisturbed
from quacklr.util.torch_functions import copied

ROUNDING = 1e-5  # relative to a head's largest logit: a smaller change is only rounding
KEPT = 2**20  # logits kept for each attention; of a long context, those of the last queries


class LayerLogits:
    """The logits of one layer in the first forward pass: `calls` are (B, H, I, J) each.

    `scale`: the largest factor between q.k and the logit. `other_head_counts`: numbers of heads of attentions in the
    module that are not the layer's number. `unreadable`: the reason why the logits cannot be compared, or "".
    """

    def __init__(self, layer: ExpectedLayer) -> None:
        self.layer, self.scale, self.unreadable = layer, 0.0, ""
        self.calls: list[Tensor] = []
        self.other_head_counts: set[int] = set()

    def add(self, logits: Logits, calls: list[Tensor]) -> None:
        """Append one attention's logits to `calls`, if it is this layer's."""
        if logits.heads != self.layer.heads:
            self.other_head_counts.add(logits.heads)
            return
        rows = max(1, KEPT // logits.rows(slice(0, 1)).numel())
        rows_BHIJ = logits.rows(slice(max(0, logits.queries - rows), None))
        if not calls or len(rows_BHIJ) == len(calls[0]):  # otherwise B is not the batch, as in big_bird
            calls.append(rows_BHIJ)
            self.scale = max(self.scale, abs(logits.scale))

    def difference(self, calls: Sequence[Tensor]) -> Tensor:
        """(H,): the largest |difference| of unmasked logits over all calls; NaN if the shapes differ."""
        if [call_BHIJ.shape for call_BHIJ in self.calls] != [call_BHIJ.shape for call_BHIJ in calls]:
            return torch.full((self.layer.heads,), torch.nan)
        found_H = torch.zeros(self.layer.heads)
        for one_BHIJ, other_BHIJ in zip(self.calls, calls, strict=True):
            masked_BHIJ = (one_BHIJ == -torch.inf) | (other_BHIJ == -torch.inf)
            found_H = found_H.maximum((one_BHIJ - other_BHIJ).masked_fill(masked_BHIJ, 0).abs().amax((0, 2, 3)).cpu())
        return found_H

    def root_mean_square(self, calls: Sequence[Tensor]) -> Tensor:
        """(H,): the root mean square difference of unmasked logits over all calls; NaN if the shapes differ."""
        if [call_BHIJ.shape for call_BHIJ in self.calls] != [call_BHIJ.shape for call_BHIJ in calls]:
            return torch.full((self.layer.heads,), torch.nan)
        squares_H, count_H = torch.zeros(2, self.layer.heads)
        for one_BHIJ, other_BHIJ in zip(self.calls, calls, strict=True):
            masked_BHIJ = (one_BHIJ == -torch.inf) | (other_BHIJ == -torch.inf)
            squares_H += (one_BHIJ - other_BHIJ).masked_fill(masked_BHIJ, 0).square().sum((0, 2, 3)).cpu()
            count_H += (~masked_BHIJ).expand_as(one_BHIJ).sum((0, 2, 3)).cpu()
        return (squares_H / count_H.clamp(min=1)).sqrt()

    @cached_property
    def size(self) -> Tensor:
        """(H,): the largest |logit|."""
        return self.difference([torch.zeros_like(call_BHIJ) for call_BHIJ in self.calls])

    @cached_property
    def rounding(self) -> Tensor:
        """(H,): the largest change that counts as none."""
        eps = max(torch.finfo(weight.param.dtype).eps for weight in self.layer.weights)
        return max(ROUNDING, 4 * eps) * self.size

    def validate(self) -> None:
        """Set `unreadable` if the logits of some heads cannot be compared."""
        seen_H = torch.zeros(self.layer.heads, dtype=torch.bool)
        for call_BHIJ in self.calls:
            if (call_BHIJ.isnan() | (call_BHIJ == torch.inf)).any():
                self.unreadable = self.unreadable or "its logits are not finite"
            seen_H |= (call_BHIJ > -torch.inf).any(0).flatten(1).any(1).cpu()
        if self.calls and not seen_H.all():
            self.unreadable = self.unreadable or "some heads see no key"


class FrozenInputs:
    """Runs a first forward pass of the batch; `change` runs it again and compares the logits.

    `logits` has the logits of the first pass for each layer, `lengths` the norms of the inputs of the weights.
    """

    def __init__(self, sandbox: Sandbox, layers: Sequence[ExpectedLayer]) -> None:
        self.sandbox, self.logits = sandbox, [LayerLogits(layer) for layer in layers]
        count = Counter(layer.module for layer in layers)
        self._heads = {layer.module: layer.heads for layer in layers if count[layer.module] == 1}
        self._inputs: dict[str, list[Any]] = {layer.module: [] for layer in layers}
        with Inputs([weight for layer in layers for path in layer.paths for weight in path.ends]) as self.lengths:
            self._forward([of.calls for of in self.logits], record=True)
        for of in self.logits:
            of.validate()

    def change(self) -> list[Tensor]:
        """For each layer (H,): the largest |change| of an unmasked logit since the first forward pass.

        NaN if the logits cannot be compared, because their number or shape differs or some are not finite.
        """
        return [of.difference(each) for of, each in zip(self.logits, self.again(), strict=True)]

    def again(self) -> list[list[Tensor]]:
        """The logits of each layer with the weights as they are now."""
        calls: list[list[Tensor]] = [[] for _ in self.logits]
        self._forward(calls, record=False)
        return calls

    def _forward(self, calls: list[list[Tensor]], record: bool) -> None:
        """Run the batch, and append the logits of each layer to its list."""

        def keep(name: str, logits: Logits) -> None:
            for number in self._layers_of(name):
                if name in self.sandbox.orders.unknown:
                    self.logits[number].unreadable = self.sandbox.orders.unknown[name]
                else:
                    self.logits[number].add(logits, calls[number])

        model = self.sandbox.model
        torch.clear_autocast_cache()  # it holds casts of weights that have changed since
        attention = capture_logits(model, keep, self._heads, self.sandbox.orders)
        with undisturbed(model), self._hooked(record), attention:
            run(model, self.sandbox.batch)

    def _layers_of(self, name: str) -> list[int]:
        """The layers of the innermost module that has paths and contains this attention."""
        modules = [of.layer.module for of in self.logits]
        outer = [module for module in modules if f"{name}.".startswith(f"{module}." * bool(module))]
        inner = max(outer, key=len, default=None)
        return [number for number, module in enumerate(modules) if module == inner]

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
