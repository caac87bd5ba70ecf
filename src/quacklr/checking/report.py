"""The result of a check: a table with one line for each layer, and a verdict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from quacklr.util.text_table import columns, grouped, value_range

TITLES = "attention", "heads", "asked", "given", "measured", ""


@dataclass(frozen=True, slots=True, eq=False)
class LayerReport:
    """The largest change of each head's logits in a step, in nats, (heads,) each.

    `asked` and `given` are those of `quack.changes()`: by the optimizer's own step, and the bound for the step as QuacK
    scaled it. `measured`: the mean |change| of the logits of the batch by the layer's own rows, as LogitMonitor has it.
    `problem`: why the check does not show that the layer is right, or "".
    """

    module: str
    heads: int
    asked: Tensor
    given: Tensor
    measured: Tensor
    problem: str

    def cells(self) -> tuple[str, ...]:
        """Its line in the table."""
        ranges = [value_range(of_H) for of_H in (self.asked, self.given, self.measured)]
        right = "ok" if self.given.any() else "ok, but its rows took no step: they are frozen"
        return (self.module or "(model)", str(self.heads), *ranges, self.problem or right)


@dataclass(frozen=True, slots=True, eq=False)
class CheckReport:
    """Whether QuacK scales the right rows: `ok`, and a table if printed.

    `left_alone`: the reason for each attention or weight that QuacK does not control.
    """

    layers: tuple[LayerReport, ...]
    left_alone: Mapping[str, str]

    @property
    def ok(self) -> bool:
        """Whether every layer was shown to be right."""
        return not any(layer.problem for layer in self.layers)

    def __str__(self) -> str:
        table = columns([TITLES, *(layer.cells() for layer in self.layers)])
        verdict = f"correct: {sum(not layer.problem for layer in self.layers)} of {len(self.layers)} layers"
        sections = table, grouped("left alone:", self.left_alone), [verdict]
        return "\n\n".join("\n".join(section) for section in sections if section)
