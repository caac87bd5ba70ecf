"""The result of a check: a table with one line for each attention, and a verdict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from quacklr.util.text_table import columns, grouped, value_range

NO_LOGITS = "no logits to compare"
NO_STEP = "its rows took no step: no gradient, or lr is 0"


@dataclass(frozen=True, slots=True, eq=False)
class LayerReport:
    """The largest change of the logits of one attention in a step, (H,) each, in nats.

    `plain` and `quack`: root mean squares without and with QuacK. `asked` and `given`: those of `quack.changes()`.
    `unmeasured`: why its rows could not be measured, or "". `trains`: whether any of its rows are trained.
    """

    module: str
    trains: bool
    unmeasured: str
    plain: Tensor
    quack: Tensor
    asked: Tensor
    given: Tensor

    @property
    def heads(self) -> int:
        """The number of heads."""
        return len(self.plain)

    @property
    def unproved(self) -> str:
        """Why the check does not show that this attention is right, or ""."""
        if self.unmeasured:
            return f"its rows could not be measured: {self.unmeasured}"
        if not (self.plain + self.quack).isfinite().all():
            return NO_LOGITS
        return NO_STEP if self.trains and not (self.asked > 0).all() else ""

    def cells(self) -> tuple[str, ...]:
        """Its line in the table."""
        numbers = (self.plain, self.asked, self.quack, self.given)
        ranges = [value_range(of_H, digits=2, missing="-") for of_H in numbers]
        right = "ok" if self.trains else "ok, but its rows took no step: they are frozen"
        return (self.module or "(model)", str(self.heads), *ranges, self.unproved or right)


@dataclass(frozen=True, slots=True, eq=False)
class CheckReport:
    """Whether QuacK scales the right rows by the right rates: `ok`, and a table if printed.

    `wrong`: the names of parameters with a row that did not move by its rate times the step of the optimizer alone.
    `left_alone`: the reason for each attention or weight that QuacK does not control.
    """

    layers: tuple[LayerReport, ...]
    wrong: tuple[str, ...]
    growth: float
    left_alone: Mapping[str, str]

    @property
    def ok(self) -> bool:
        """Whether every attention was shown to be right."""
        return not self.wrong and not any(layer.unproved for layer in self.layers)

    def __str__(self) -> str:
        titles = "attention", "heads", "change without QuacK", "asked", "with QuacK", "given", ""
        lists = {"left alone:": grouped(self.left_alone.items())}
        lists["not moved by rate * step:"] = [f"  {name}" for name in self.wrong]
        sections = [
            [f"Changes of logits in a step, in nats, from weights multiplied by {self.growth:g}:"],
            columns([titles, *(layer.cells() for layer in self.layers)]),
            *([title, *lines] for title, lines in lists.items() if lines),
            [self.verdict()],
        ]
        return "\n\n".join("\n".join(section) for section in sections)

    def verdict(self) -> str:
        """The last line."""
        total = f"{len(self.layers)} layer{'s' * (len(self.layers) != 1)}"
        if self.wrong:
            return f"wrong: the steps of {len(self.wrong)} parameters"
        if unproved := sum(bool(layer.unproved) for layer in self.layers):
            return f"not shown: {unproved} of {total}"
        heads = sum(layer.heads for layer in self.layers)
        return f"correct: {total}, {heads} heads; the rows are those measured, and move by their rates"
