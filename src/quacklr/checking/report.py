"""The result of a check: a table with one line for each layer, and a verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from quacklr.util.layer_names import pattern
from quacklr.util.text_table import columns, grouped, value_range

NO_LOGITS = "no logits to compare"
NO_BOUND = "its bound is not known"
NO_STEP = "its rows took no step: no gradient, or lr is 0"


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """(H,) each: the largest |change| of a logit in a step, the bound on it, and the root mean square of all changes.

    `exceeds_bound`: whether a change was above its bound. `exceeds_rate`: whether rows that the head reads took a
    larger step than their rates allow.
    """

    measured: Tensor
    bound: Tensor
    root_mean_square: Tensor
    exceeds_bound: Tensor
    exceeds_rate: Tensor

    @classmethod
    def largest(cls, steps: Sequence[Change]) -> Change:
        """The largest numbers of some steps."""
        return cls(*(torch.stack([getattr(step, field.name) for step in steps]).amax(0) for field in fields(cls)))


@dataclass(frozen=True, slots=True, eq=False)
class LayerReport:
    """The changes of the logits of one attention layer.

    `unmeasured`: why its rows could not be measured, or "". `start`: steps from the weights as they are. `plain` and
    `quack`: steps from grown weights, without and with QuacK. `trains`: whether any of its rows are trained.
    """

    module: str
    heads: int
    unmeasured: str
    start: Change
    plain: Change
    quack: Change
    trains: bool

    @property
    def wrong(self) -> str:
        """The heads whose logits or rows move too far, or ""."""
        changes = self.start, self.plain, self.quack
        found = {
            "above the bound": torch.stack([change.exceeds_bound for change in changes]).any(0),
            "steps larger than the rates": torch.stack([change.exceeds_rate for change in changes]).any(0),
        }
        return ", ".join(f"{what}: head {_heads(mask_H)}" for what, mask_H in found.items() if mask_H.any())

    @property
    def unproved(self) -> str:
        """Why the check does not show that this layer is right, or ""."""
        changes = self.start, self.plain, self.quack
        if self.unmeasured:
            return f"its rows could not be measured: {self.unmeasured}"
        if not all(change.measured.isfinite().all() for change in changes):
            return NO_LOGITS
        if not all(change.bound.isfinite().all() for change in changes):
            return NO_BOUND
        return NO_STEP if self.trains and not (self.quack.bound > 0).all() else ""

    def cells(self) -> tuple[str, ...]:
        """Its line in the table."""
        numbers = [self.start.measured, self.start.bound, self.plain.measured, self.quack.measured, self.quack.bound]
        ranges = [value_range(of_H, digits=2, missing="-") for of_H in numbers]
        right = "ok" if self.quack.bound.any() else "ok, but its rows took no step: they are frozen"
        wrong = f"WRONG: {self.wrong}" if self.wrong else ""
        return (self.module or "(model)", str(self.heads), *ranges, wrong or self.unproved or right)


@dataclass(frozen=True, slots=True, eq=False)
class CheckReport:
    """Whether QuacK scales the right rows, and no logit changes by more than its bound: `ok`, and a table if printed.

    `left_alone`: the reason for each attention or weight that QuacK does not control.
    """

    layers: tuple[LayerReport, ...]
    growth: float
    left_alone: Mapping[str, str]

    @property
    def ok(self) -> bool:
        """Whether every layer was shown to be right."""
        return bool(self.layers) and not any(layer.wrong or layer.unproved for layer in self.layers)

    def __str__(self) -> str:
        grown, alone = f"grown {self.growth:g}x", grouped(self.left_alone.items())
        titles = "attention", "heads", "at the start", "bound", f"{grown}, plain", f"{grown}, QuacK", "its bound", ""
        sections = [
            columns([titles, *(layer.cells() for layer in self.layers)]),
            ["left alone:", *alone] if alone else [],
            [self.verdict()],
        ]
        return "\n\n".join("\n".join(section) for section in sections if section)

    def verdict(self) -> str:
        """The last line."""
        total = f"{len(self.layers)} layer{'s' * (len(self.layers) != 1)}"
        if wrong := sum(bool(layer.wrong) for layer in self.layers):
            return f"wrong: {wrong} of {total}"
        if unproved := sum(bool(layer.unproved) for layer in self.layers):
            return f"not shown: {unproved} of {total}"
        heads = sum(layer.heads for layer in self.layers)
        return f"correct: {total}, {heads} heads; the rows are those measured, and no logit moves beyond its bound"


def _heads(mask_H: Tensor) -> str:
    """The indices that are True in a mask, as ranges: 0-3,7."""
    return pattern([str(head) for head in mask_H.nonzero().flatten().tolist()]).strip("{}")
