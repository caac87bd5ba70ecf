"""From nudges to verdicts: rows of others that move a head, rows that move none, rows that are missing."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from quacklr.checking.expected_rows import ExpectedLayer, ExpectedRows
from quacklr.checking.faults import Fault, about, listed
from quacklr.checking.perturb import Perturbation, Perturbations
from quacklr.checking.sandbox import Sandbox
from quacklr.find.finding import MEASURED
from quacklr.util.modules import named_parameters

ROUTED = "attends with several heads for each of these: every token has experts of its own"
LOST = "not comparable when its rows change"
SCALE_FREE = 1e-3  # of a head's largest logit: what scaling still changes through the epsilon of a norm


class Diagnosis:
    """Judges every layer of a model by its claims; `silent` says of each why it cannot be judged, if it cannot."""

    def __init__(self, twin: Sandbox) -> None:
        self.claims: ExpectedRows = twin.claims()
        self.layers = self.claims.layers
        self.names = {id(param): name for name, param in named_parameters(twin.model)}
        self.nudges = Perturbations(twin, self.claims)
        self.measured = {name for name, of in getattr(twin.paths, "found", {}).items() if of.origin == MEASURED}
        self.silent = [self._silence(*each) for each in enumerate(self.nudges.hearing.change())]
        self.roles = range(max(len(layer.weights) for layer in self.layers))

    def _silence(self, number: int, change: Tensor) -> str:
        hearing = self.nudges.hearing
        if hearing.unread[number] or not hearing.first[number]:
            return hearing.unread[number] or ROUTED * self._is_routed(number) or "not heard"
        return "" if (change <= hearing.rounding[number]).all() else "not the same twice"

    def faults(self) -> list[list[Fault]]:
        """For each layer what is wrong with it."""
        found: list[list[Fault]] = [[] for _ in self.layers]
        for number, fault in self._counted():
            found[number].append(fault)
        for test in (self._other_layers, self._other_blocks, self._dead, self._free):
            for number, fault in test():
                if not self.silent[number]:
                    found[number].append(fault)
        self.silent = [silent or LOST * lost for silent, lost in zip(self.silent, self.nudges.lost, strict=True)]
        return found

    def _counted(self) -> Iterator[tuple[int, Fault]]:
        """Layers that attend, but with another number of heads."""
        for number, strange in enumerate(self.nudges.hearing.strange):
            if strange and not self.nudges.hearing.first[number] and not self._is_routed(number):
                heads = self.layers[number].heads
                text = f"attends with {' or '.join(map(str, sorted(strange)))} heads, but its paths say {heads}"
                yield number, Fault(tuple(range(heads)), text)

    def _is_routed(self, number: int) -> bool:
        """Whether it attends with several times the heads that were measured: which rows a head reads is routed."""
        layer, strange = self.layers[number], self.nudges.hearing.strange[number]
        return bool(strange) and layer.module in self.measured and not any(of % layer.heads for of in strange)

    def _other_layers(self) -> Iterator[tuple[int, Fault]]:
        """Heads that rows of another layer move."""
        if not self._strays(self.nudges.layers_in_halves()):
            return
        for other, layer in enumerate(self.layers):
            nudge = self.nudges.layer(other)
            for number, strays in enumerate(nudge.strays(self.layers)):
                if strays.any():
                    yield number, about(strays, f"moved by rows claimed for {layer.module or 'the model'}")

    def _other_blocks(self) -> Iterator[tuple[int, Fault]]:
        """Heads that blocks of their own layer move, though they do not read them."""
        for role in self.roles:
            if not self._strays(self.nudges.blocks_in_halves(role)):
                continue
            strays: list[dict[int, list[int]]] = [{} for _ in self.layers]  # for each head the blocks
            for block in range(self.nudges.blocks(role)):
                nudge = self.nudges.block(role, block)
                for of_head, heads in zip(strays, nudge.strays(self.layers), strict=True):
                    for head in heads.nonzero().flatten().tolist():
                        of_head.setdefault(head, []).append(block)
            for number, of_head in enumerate(strays):
                if of_head:
                    yield number, self._stray(self.layers[number], role, of_head)

    def _stray(self, layer: ExpectedLayer, role: int, of_head: dict[int, list[int]]) -> Fault:
        heads = torch.zeros(layer.heads, dtype=torch.bool)
        heads[list(of_head)] = True
        name = layer.role(layer.weights[min(role, len(layer.weights) - 1)])
        first = min(of_head)
        example = f"head {first} by {name}[{listed(of_head[first])}]"
        return about(heads, f"moved by rows of {name} claimed for others: {example}")

    def _strays(self, nudges: Iterator[Perturbation]) -> bool:
        return any(bool(strays.any()) for nudge in nudges for strays in nudge.strays(self.layers))

    def _dead(self) -> Iterator[tuple[int, Fault]]:
        """Blocks, or some rows of them, that move no logit."""
        for role in self.roles:
            whole = self.nudges.role(role).dead(self.layers)
            halves = [nudge.dead(self.layers) for nudge in self.nudges.rows_in_halves(role)]
            part = torch.stack([whole, *halves]).any(0) & ~whole
            for number, layer in enumerate(self.layers):
                if role < len(layer.weights):
                    yield from ((number, fault) for fault in self._deaths(layer, role, whole, part))

    def _deaths(self, layer: ExpectedLayer, role: int, whole: Tensor, part: Tensor) -> Iterator[Fault]:
        weight = layer.weights[role]
        place, name = self.claims.rule.blocks.flat_index[weight], layer.role(weight)
        for dead, words in (
            (whole, "{} moves no logit of its heads"),
            (part, "some rows of {} move no logit of its heads"),
        ):
            if dead[place].any():
                blocks = f"{name}[{listed(dead[place].nonzero().flatten().tolist())}]"
                heads = layer.readers(dead).nonzero().flatten().tolist()
                yield Fault(tuple(heads), words.format(blocks))

    def _free(self) -> Iterator[tuple[int, Fault]]:
        """Heads that rows on no path move."""
        free = {id(part.param) for part, _ in self.claims.unclaimed()}
        if not free:
            return
        hearing = self.nudges.hearing
        each = zip(self.layers, self.nudges.double_unclaimed(), hearing.sizes, hearing.rounding, strict=True)
        for number, (layer, change, size, still) in enumerate(each):
            moved = change > torch.maximum(SCALE_FREE * size, still)
            if moved.any():
                parts = [part for weight in layer.weights for part in weight.parts if id(part.param) in free]
                own = {self.names.get(id(part.param), part.name).removeprefix(f"{layer.module}.") for part in parts}
                rows = " and ".join(sorted(own)) or "other layers"
                yield number, about(moved, f"moved by rows of {rows} that are on no path")
