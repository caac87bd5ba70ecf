"""Find the faults of every layer: heads whose logits wrong rows change, rows that change none, missing rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from quacklr.checking.expected_rows import ExpectedLayer
from quacklr.checking.frozen_inputs import LayerLogits
from quacklr.checking.layer_report import Fault, fault_of, indices, ranges
from quacklr.checking.perturb import Numbers, Perturbations
from quacklr.checking.sandbox import Sandbox
from quacklr.find.finding import MEASURED
from quacklr.util.modules import named_parameters

ROUTED = "attends with several heads for each of these: every token has experts of its own"
LOST = "not comparable when its rows change"
WHOLE, SOME_ROWS = "{} moves no logit of its heads", "some rows of {} move no logit of its heads"
SCALE_FREE = 1e-3  # relative to a head's largest logit: the epsilon of a norm can cause a smaller change


class Diagnosis:
    """Tests every layer of a sandbox. `unobserved` has for each layer the reason why it cannot be tested, or ""."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.expected = sandbox.expected_rows()
        self.layers = self.expected.layers
        self.names = {id(param): name for name, param in named_parameters(sandbox.model)}
        self.perturbations = Perturbations(sandbox, self.expected)
        self.logits = self.perturbations.frozen.logits
        self.measured = {name for name, of in getattr(sandbox.paths, "found", {}).items() if of.origin == MEASURED}
        changes = self.perturbations.frozen.change()
        self.unobserved = [self._unobserved(*each) for each in zip(self.logits, changes, strict=True)]
        self.roles = range(max(len(layer.weights) for layer in self.layers))

    def _unobserved(self, logits: LayerLogits, change: Tensor) -> str:
        if logits.unreadable or not logits.calls:
            return logits.unreadable or ROUTED * self._is_routed(logits) or "not seen"
        return "" if (change <= logits.rounding).all() else "not the same twice"

    def faults(self) -> list[list[Fault]]:
        """The faults of each layer."""
        found: list[list[Fault]] = [[] for _ in self.layers]
        for number, fault in self._wrong_head_counts():
            found[number].append(fault)
        for test in (self._other_layers, self._other_blocks, self._dead_blocks, self._rows_on_no_path):
            for number, fault in test():
                if not self.unobserved[number]:
                    found[number].append(fault)
        lost = self.perturbations.lost
        self.unobserved = [why or LOST * of for why, of in zip(self.unobserved, lost, strict=True)]
        return found

    def _wrong_head_counts(self) -> Iterator[tuple[int, Fault]]:
        """Layers that attend with another number of heads than their paths have."""
        for number, logits in enumerate(self.logits):
            counts, heads = logits.other_head_counts, logits.layer.heads
            if counts and not logits.calls and not self._is_routed(logits):
                text = f"attends with {' or '.join(map(str, sorted(counts)))} heads, but its paths say {heads}"
                yield number, Fault(tuple(range(heads)), text)

    def _is_routed(self, logits: LayerLogits) -> bool:
        """Whether a layer attends with a multiple of the measured heads: a router picks the rows of a head."""
        layer, counts = logits.layer, logits.other_head_counts
        return bool(counts) and layer.module in self.measured and not any(count % layer.heads for count in counts)

    def _stray_heads(self, numbers: Numbers) -> Iterator[tuple[int, list[Tensor]]]:
        """For each number, the heads of each layer that move with its rows, but do not read them.

        Rows are perturbed one number at a time only if some half of them moves a head that it should not.
        """
        halves = self.perturbations.halves(numbers)
        if any(bool(strays.any()) for half in halves for strays in half.strays(self.layers)):
            yield from enumerate(single.strays(self.layers) for single in self.perturbations.singles(numbers))

    def _other_layers(self) -> Iterator[tuple[int, Fault]]:
        """Heads whose logits change with rows of another layer."""
        layer_of_row = self.perturbations.numbers(lambda rows: torch.full_like(rows.block, rows.layer))
        for other, strays in self._stray_heads(layer_of_row):
            text = f"moved by rows claimed for {self.layers[other].module or 'the model'}"
            yield from ((number, fault_of(heads, text)) for number, heads in enumerate(strays) if heads.any())

    def _other_blocks(self) -> Iterator[tuple[int, Fault]]:
        """Heads whose logits change with blocks that they do not read."""
        for role in self.roles:
            strays = [of for _, of in self._stray_heads(self.perturbations.numbers(lambda rows: rows.block, role))]
            for number, layer in enumerate(self.layers if strays else []):
                stray_BH = torch.stack([of[number] for of in strays])
                if stray_BH.any():
                    yield number, self._stray_fault(layer, role, stray_BH)

    def _stray_fault(self, layer: ExpectedLayer, role: int, stray_BH: Tensor) -> Fault:
        name = layer.role(layer.weights[min(role, len(layer.weights) - 1)])
        first = indices(stray_BH.any(0))[0]
        example = f"head {first} by {name}[{ranges(stray_BH[:, first])}]"
        return fault_of(stray_BH.any(0), f"moved by rows of {name} claimed for others: {example}")

    def _dead_blocks(self) -> Iterator[tuple[int, Fault]]:
        """Blocks, or some rows of them, that move no logit."""
        for role in self.roles:
            every_row = self.perturbations.numbers(lambda rows: rows.on_path, role)
            whole = self.perturbations.perturb(every_row).dead_blocks(self.layers)
            halves = self.perturbations.halves(self.perturbations.numbers(lambda rows: rows.index_in_block, role))
            part = torch.stack([whole, *(half.dead_blocks(self.layers) for half in halves)]).any(0) & ~whole
            for number, layer in enumerate(self.layers):
                for dead, text in ((whole, WHOLE), (part, SOME_ROWS)):
                    if role < len(layer.weights) and dead[self.expected.flat_index[layer.weights[role]]].any():
                        yield number, self._dead_fault(layer, role, dead, text)

    def _dead_fault(self, layer: ExpectedLayer, role: int, dead: Tensor, text: str) -> Fault:
        weight = layer.weights[role]
        blocks = ranges(dead[self.expected.flat_index[weight]])
        return Fault(indices(layer.heads_reading(dead)), text.format(f"{layer.role(weight)}[{blocks}]"))

    def _rows_on_no_path(self) -> Iterator[tuple[int, Fault]]:
        """Heads whose logits change with rows on no path."""
        free = {id(part.param) for part, _ in self.expected.rows_on_no_path()}
        changes = self.perturbations.double_rows_on_no_path() if free else []
        for number, change in enumerate(changes):
            layer, logits = self.layers[number], self.logits[number]
            moved = change > torch.maximum(SCALE_FREE * logits.size, logits.rounding)
            if moved.any():
                params = [part for weight in layer.weights for part in weight.parts if id(part.param) in free]
                own = {self.names.get(id(of.param), of.name).removeprefix(f"{layer.module}.") for of in params}
                rows = " and ".join(sorted(own)) or "other layers"
                yield number, fault_of(moved, f"moved by rows of {rows} that are on no path")
