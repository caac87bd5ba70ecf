"""What was found, as a table to read: a line a layer, what is wrong, and a sentence to end with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quacklr.checking.faults import Fault, listed
from quacklr.checking.steps import Change

NO_BOUND = "its bound is not known"
NO_STEP = "its rows took no step: no gradient, or lr is 0"


@dataclass(frozen=True, slots=True, eq=False)
class LayerReport:
    """One attention: what steps do to its heads at the start, and grown, without QuacK and with it; and its faults.

    `silent` says why nothing is known of it, if that is so. `trains`: whether any of its rows do.
    """

    module: str
    heads: int
    silent: str
    start: Change
    plain: Change
    quack: Change
    nudged: list[Fault]
    trains: bool = True

    @property
    def unshown(self) -> str:
        """What the steps do not show of it, if anything."""
        if self.silent:
            return self.silent
        changes = self.start, self.plain, self.quack
        if not all(bool(change.bound.isfinite().all()) for change in changes):
            return NO_BOUND
        if not all(bool(change.measured.isfinite().all()) for change in changes):
            return "its logits are not finite, or not comparable, after a step"
        return "" if bool((self.quack.bound > 0).all()) or not self.trains else NO_STEP

    @property
    def faults(self) -> list[Fault]:
        """All that is wrong."""
        if self.silent:
            return self.nudged
        beyond = [(self.start, "at the start"), (self.plain, "grown, without QuacK"), (self.quack, "grown, with QuacK")]
        return [*self.nudged, *(fault for change, when in beyond for fault in _beyond(change, when))]

    @property
    def wrong(self) -> Tensor:
        """(H,): the heads that something is wrong with."""
        wrong = torch.zeros(self.heads, dtype=torch.bool)
        wrong[[head for fault in self.faults for head in fault.heads]] = True
        return wrong


def _beyond(change: Change, when: str) -> list[Fault]:
    found = []
    if heads := change.beyond.nonzero().flatten().tolist():
        by, allowed = (f"{float(of[heads[0]]):.3g}" for of in (change.measured, change.bound))
        text = (
            f"{when} a logit of head {listed(heads)} moves by {by} in a step, and the rates of its rows allow {allowed}"
        )
        found.append(Fault(tuple(heads), text))
    if heads := change.overstepped.nonzero().flatten().tolist():
        text = f"{when} rows of head {listed(heads)} take a larger step than their rates allow"
        found.append(Fault(tuple(heads), text))
    return found


@dataclass(frozen=True, slots=True, eq=False)
class CheckReport:
    """The proof of a model's wiring, or what is wrong with it: `ok`, a table when printed, a picture when saved.

    `unmeasured`: why the paths are those of the rules, if the batch did not show them. `contradiction`: how the batch
    shows other ones than the rules, if it does.
    """

    layers: tuple[LayerReport, ...]
    growth: float
    steps: int
    left_alone: Mapping[str, str]
    unmeasured: str = ""
    contradiction: str = ""

    @property
    def ok(self) -> bool:
        """Whether every layer was shown to be right, and paths are not otherwise than they were measured."""
        shown = all(not layer.unshown and not layer.faults for layer in self.layers)
        return bool(self.layers) and shown and not self.contradiction

    def save(self, file: str | Path) -> None:
        """Draw it: for each layer and head the changes and the bound. Needs matplotlib (quacklr[lab])."""
        try:
            from quacklr.checking.figure import draw
        except ModuleNotFoundError as missing:
            raise ModuleNotFoundError(
                f"a picture needs {missing.name}: pip install 'quacklr[lab]'", name=missing.name
            ) from missing
        draw(self, file)

    def __str__(self) -> str:
        from quacklr.checking.show import show

        return show(self)
