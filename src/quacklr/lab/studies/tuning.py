"""Selection of a method's setting on one seed; the selected setting is then judged on other seeds.

The values to select from are 0.0001, 0.0003, 0.001, ..., 30,000. A search tries a first value and its two neighbours,
and goes on until the best value has been compared with both of its neighbours. So the best is not at the edge of the
values that were tried, unless it is the first or the last of all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from quacklr.lab.config import Config, fingerprint
from quacklr.lab.ledger import Entry
from quacklr.lab.studies.measures import loss

VALUES = tuple(float(f"{digit}e{exponent}") for exponent in range(-4, 5) for digit in (1, 3))

Runs = Mapping[str, Entry]
"""Runs that have ended, by fingerprint."""


class Selection(NamedTuple):
    """The result of a search."""

    value: float | None
    """The selected value; None while runs are missing that select it."""
    needed: list[Config]
    """The runs that are missing."""
    tried: list[Config]
    """The runs of all values that were tried, and of those that are tried next."""


def nearest(value: float) -> float:
    """The value of VALUES that differs by the smallest factor."""
    return min(VALUES, key=lambda other: max(value / other, other / value))


def neighbour(value: float, steps: int, values: Sequence[float] = VALUES) -> float:
    """The value that is `steps` positions further in `values`; at its ends, the first or the last value."""
    return values[min(max(values.index(value) + steps, 0), len(values) - 1)]


def select(run: Callable[[float], Config], first: float, known: Runs, values: Sequence[float] = VALUES) -> Selection:
    """The value with the lowest loss on the tuning seed, or the runs that are needed before it is known.

    Args:
        run: the run for a value, with the tuning seed.
        first: where the search begins.
        known: runs that have ended.
        values: the values to select from.

    Of values with equal losses, the nearest to `first` is selected.
    """
    configs = {value: run(value) for value in values}
    entries = {value: known.get(fingerprint(config)) for value, config in configs.items()}
    losses = {value: tuning_loss(entry) for value, entry in entries.items() if entry is not None}
    by_distance = sorted(losses, key=lambda value: abs(values.index(value) - values.index(first)))
    tried: dict[float, Config] = {}
    for center in (first, min(by_distance, key=lambda value: losses[value], default=first)):
        around = {value: configs[value] for value in (neighbour(center, steps, values) for steps in (0, -1, 1))}
        tried |= {value: configs[value] for value in losses} | around
        needed = [config for value, config in around.items() if value not in losses]
        if needed:
            return Selection(None, needed, list(tried.values()))
    return Selection(center, [], list(tried.values()))


def tuning_loss(entry: Entry) -> float:
    """The loss of a run; infinity if it crashed."""
    return float("inf") if entry.status == "crashed" else loss(entry)
