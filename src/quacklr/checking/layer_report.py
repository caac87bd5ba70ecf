"""The result of a check for one attention layer: changes of its logits, and faults in its rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from quacklr.checking.steps import Change
from quacklr.util.layer_names import pattern
from quacklr.util.text_table import value_range

NO_BOUND = "its bound is not known"
NO_STEP = "its rows took no step: no gradient, or lr is 0"
NOT_COMPARABLE = "its logits are not finite, or not comparable, after a step"


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of some heads of a layer."""

    heads: tuple[int, ...]
    text: str


def indices(mask: Tensor) -> tuple[int, ...]:
    """The indices that are True in a mask."""
    return tuple(mask.nonzero().flatten().tolist())


def ranges(mask: Tensor) -> str:
    """The indices that are True in a mask, as ranges: 0-3,7."""
    return pattern([str(index) for index in indices(mask)]).strip("{}")


def fault_of(heads: Tensor, text: str) -> Fault:
    """The fault of the heads that are True in a mask; `text` follows "head 3 is" or "heads 0-3 are"."""
    subject = f"heads {ranges(heads)} are" if heads.sum() > 1 else f"head {ranges(heads)} is"
    return Fault(indices(heads), f"{subject} {text}")


@dataclass(frozen=True, slots=True, eq=False)
class LayerReport:
    """The changes of one attention's logits in real steps, and its faults.

    `start`: steps from the weights as they are. `plain` and `quack`: steps from grown weights, without and with QuacK.
    `unobserved`: why its logits cannot be compared, or "". `row_faults`: faults found by perturbing rows. `trains`:
    whether any of its rows are trained.
    """

    module: str
    heads: int
    unobserved: str
    start: Change
    plain: Change
    quack: Change
    row_faults: list[Fault]
    trains: bool = True

    @property
    def unproved(self) -> str:
        """Why the check does not prove that this layer is right, or ""."""
        if self.unobserved:
            return self.unobserved
        changes = self.start, self.plain, self.quack
        if not all(bool(change.bound.isfinite().all()) for change in changes):
            return NO_BOUND
        if not all(bool(change.measured.isfinite().all()) for change in changes):
            return NOT_COMPARABLE
        return "" if bool((self.quack.bound > 0).all()) or not self.trains else NO_STEP

    @property
    def faults(self) -> list[Fault]:
        """Everything that is wrong."""
        stepped = {"at the start": self.start, "grown, without QuacK": self.plain, "grown, with QuacK": self.quack}
        found = [] if self.unobserved else [fault for each in stepped.items() for fault in _step_faults(*each)]
        return [*self.row_faults, *found]

    @property
    def wrong(self) -> Tensor:
        """(H,): the heads that have a fault."""
        wrong = torch.zeros(self.heads, dtype=torch.bool)
        wrong[[head for fault in self.faults for head in fault.heads]] = True
        return wrong

    def cells(self, with_budget: bool) -> tuple[str, ...]:
        """Its row in the table of the report; with a budget, also the root mean squares of the changes."""
        pairs = [self.start.measured, self.start.bound, self.plain.measured, self.quack.measured, self.quack.bound]
        if with_budget:
            pairs += [self.plain.root_mean_square, self.quack.root_mean_square]
        ranges = ["-" if self.unobserved else value_range(of, digits=2, missing="-") for of in pairs]
        return (self.module or "(model)", str(self.heads), *ranges, self._verdict())

    def _verdict(self) -> str:
        if self.faults:
            return f"WRONG: head{'s' * (int(self.wrong.sum()) > 1)} {ranges(self.wrong)}"
        if self.unproved:
            return self.unproved
        if not self.quack.bound.any():
            return "ok, but its rows took no step: no gradient, they are frozen"
        return "ok" if self.plain.measured.any() else "ok, but its steps are too small to see: raise lr"


def _step_faults(when: str, change: Change) -> Iterator[Fault]:
    if heads := indices(change.exceeds_bound):
        measured, bound = (f"{float(of[heads[0]]):.3g}" for of in (change.measured, change.bound))
        moves = f"moves by {measured} in a step, and the rates of its rows allow {bound}"
        yield Fault(heads, f"{when} a logit of head {ranges(change.exceeds_bound)} {moves}")
    if heads := indices(change.exceeds_rate):
        rows = f"rows of head {ranges(change.exceeds_rate)}"
        yield Fault(heads, f"{when} {rows} take a larger step than their rates allow")
