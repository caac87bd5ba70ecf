"""Selection of a method's setting on one seed; the selected setting is then judged on other seeds.

The values to select from are 1, 3, 10, 30 and so on. A search tries a first value and its two neighbours, and goes on
until the best value has been compared with both of its neighbours, so the best is never at the edge of what was tried.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from quacklr.lab.config import Config, fingerprint
from quacklr.lab.ledger import Entry
from quacklr.lab.studies.results import loss
from quacklr.lab.studies.scale import with_seed

TUNING_SEED = 0
"""The seed that settings are selected on. Methods are judged on 1, 2, ..."""
VALUES = tuple(float(f"{digit}e{exponent}") for exponent in range(-4, 5) for digit in (1, 3))

Runs = Mapping[str, Entry]
"""Runs that have ended, by fingerprint."""


class Selection(NamedTuple):
    """The selected value; None as long as runs are needed to select it."""

    value: float | None
    needed: list[Config]


def nearest(value: float) -> float:
    """The value of VALUES that differs by the smallest factor."""
    return min(VALUES, key=lambda other: max(value / other, other / value))


def neighbour(value: float, steps: int) -> float:
    """The value that is some steps further in VALUES, or its last one."""
    return VALUES[min(max(VALUES.index(value) + steps, 0), len(VALUES) - 1)]


def select(run: Callable[[float], Config], first: float, known: Runs) -> Selection:
    """The value with the lowest loss on the tuning seed, or the runs that are needed before it is known.

    Args:
        run: the run for a value.
        first: where the search begins.
        known: runs that have ended.

    Of values with equal losses, the nearest to `first` is selected.
    """
    configs = {value: with_seed(run(value), TUNING_SEED) for value in VALUES}
    entries = {value: known.get(fingerprint(config)) for value, config in configs.items()}
    losses = {value: tuning_loss(entry) for value, entry in entries.items() if entry is not None}
    by_distance = sorted(losses, key=lambda value: abs(VALUES.index(value) - VALUES.index(first)))
    for center in (first, min(by_distance, key=lambda value: losses[value], default=first)):
        tried = dict.fromkeys(neighbour(center, steps) for steps in (0, -1, 1))
        needed = [configs[value] for value in tried if value not in losses]
        if needed:
            return Selection(None, needed)
    return Selection(center, [])


def tuning_loss(entry: Entry) -> float:
    """The loss of a run; infinity if it crashed."""
    return float("inf") if entry.status == "crashed" else loss(entry)
