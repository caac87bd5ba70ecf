"""The time that a run is expected to take, from the times of other runs."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

from quacklr.lab.config import Config
from quacklr.lab.ledger import Entry


class RunCost:
    """Estimates the time of a step from the runs of the ledger with the same attention, model size and batch.

    If there is none, from the other runs: the time is then proportional to the size of the model and of the batch. In
    a ledger without times, runs can be compared, but their times are not known.
    """

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        times: dict[object, list[float]] = {}
        relative: list[float] = []
        for entry in entries:
            if entry.step_seconds:
                times.setdefault(_kind(entry.config), []).append(entry.step_seconds)
                relative.append(entry.step_seconds / _size(entry.config))
        self._known = {kind: median(values) for kind, values in times.items()}
        self._relative = median(relative) if relative else 1.0

    def step_seconds(self, config: Config) -> float:
        """The time of a step."""
        return self._known.get(_kind(config), self._relative * _size(config))

    def seconds(self, config: Config) -> float:
        """The time of a run."""
        return self.step_seconds(config) * config.training.steps

    def total(self, configs: Iterable[Config]) -> float | None:
        """The time of all runs, one after another; None if the ledger has no times."""
        return sum(map(self.seconds, configs)) if self._known else None


def _kind(config: Config) -> object:
    return config.shape, config.attention, config.training.batch_tokens


def _size(config: Config) -> int:
    """Proportional to the number of multiplications in a step of a wide model."""
    return config.shape.layers * config.shape.d_model**2 * config.training.batch_tokens
