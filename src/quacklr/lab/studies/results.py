"""Queries on a ledger: the runs of a method in a cell, at the setting that was selected there.

Settings (tau, threshold) are selected on seed 0, once. Methods are judged on the seeds 1, 2, ..., so no run is used for
both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import mean
from typing import TypeVar

from quacklr.lab.config import Config, fingerprint
from quacklr.lab.errors import UserError
from quacklr.lab.ledger import Entry
from quacklr.lab.methods import Method
from quacklr.lab.studies.cell import TUNING_SEED, Cell
from quacklr.lab.studies.intervals import FEWEST_SEEDS, MOST_SEEDS
from quacklr.lab.studies.measures import Measure, NotRun, loss, lr_sensitivity
from quacklr.lab.studies.scale import StudyScale
from quacklr.lab.studies.tuned_methods import TUNED, TunedMethod, fixed
from quacklr.lab.studies.tuning import Selection, neighbour, select, tuning_loss

Key = TypeVar("Key")
Value = TypeVar("Value")
AnyMethod = type[Method] | Method | TunedMethod
"""A type is a method whose setting is selected in each cell. An instance is a method at the setting that it has."""

JUDGING_SEEDS = range(TUNING_SEED + 1, TUNING_SEED + 1 + MOST_SEEDS)


@dataclass(frozen=True)
class MethodRuns:
    """The runs of a method in a cell, at one setting."""

    cell: Cell
    tuned: TunedMethod
    value: float | None
    """The selected value of its setting; None for a method without one."""
    runs: dict[int, Entry]
    """By seed."""
    crashed: frozenset[int] = frozenset()
    """Seeds whose runs crashed."""

    def __str__(self) -> str:
        return self.tuned.label(self.value)

    @property
    def method(self) -> Method:
        """The method at its setting."""
        return self.tuned.of_value(self.value or 0.0)

    def config(self, seed: int) -> Config:
        """The run with this seed."""
        return self.cell.run(self.method, seed)

    def by_seed(self, measure: Measure = loss) -> dict[int, float]:
        """The measure of each run, by seed."""
        return {seed: measure(entry) for seed, entry in self.runs.items()}

    def mean(self) -> float:
        """The mean loss over the seeds."""
        return mean(self.by_seed().values())


class Results:
    """The runs of a ledger, with queries for the runs of one scale.

    `seeds` are the seeds that methods are judged on.
    """

    def __init__(self, entries: Iterable[Entry], scale: StudyScale, seeds: Sequence[int] = JUDGING_SEEDS) -> None:
        self.scale, self.ledger, self.seeds = scale, list(entries), seeds
        self.known = {entry.key: entry for entry in self.ledger}
        of_scale = [entry for entry in self.ledger if scale.contains(entry.config)]
        self.entries = [entry for entry in of_scale if entry.status != "crashed"]
        self.crashed = [entry for entry in of_scale if entry.status == "crashed"]
        self._selections: dict[tuple[Cell, TunedMethod], Selection] = {}

    def planned(self, cell: Cell, method: AnyMethod) -> MethodRuns:
        """A method at the setting that was selected in this cell, without its runs."""
        tuned = as_tuned(method)
        found = MethodRuns(cell, tuned, None if tuned.first is None else self.value(cell, tuned), {})
        try:
            found.config(TUNING_SEED)
        except UserError as not_for_this_model:
            raise NotRun(str(not_for_this_model)) from None
        return found

    def runs(self, cell: Cell, method: AnyMethod) -> MethodRuns:
        """The runs of a method at the setting that was selected in this cell."""
        planned = self.planned(cell, method)
        keys = {seed: fingerprint(planned.config(seed)) for seed in self.seeds}
        entries = {seed: self.known[key] for seed, key in keys.items() if key in self.known}
        crashed = frozenset(seed for seed, entry in entries.items() if entry.status == "crashed")
        runs = {seed: entry for seed, entry in entries.items() if seed not in crashed}
        if not runs:
            seeds = [seed for seed in self.seeds if seed not in crashed]
            raise NotRun(f"no run of {planned} in {cell}", map(planned.config, seeds[:FEWEST_SEEDS]))
        return replace(planned, runs=runs, crashed=crashed)

    def best(
        self,
        attention: str,
        method: AnyMethod,
        lr: float | None = None,
        *,
        adamw: bool = False,
        latent_norm: bool = False,
    ) -> MethodRuns:
        """The runs of a method at its best setting, and at its best learning rate unless that is given."""
        rates = self.scale.rates if lr is None else (lr,)
        cells = [self.scale.cell(attention, each, adamw=adamw, latent_norm=latent_norm) for each in rates]
        return self.runs(self._best_cell(cells, as_tuned(method)), method)

    def planned_best(self, attention: str, method: AnyMethod) -> MethodRuns:
        """A method at its best setting and learning rate, without its runs."""
        cells = [self.scale.cell(attention, each) for each in self.scale.rates]
        return self.planned(self._best_cell(cells, as_tuned(method)), method)

    def lr_sensitivity(self, attention: str, method: AnyMethod) -> dict[int, float]:
        """The sensitivity to the learning rate by seed, of a method at its best setting at every rate."""
        return lr_sensitivity(self.best(attention, method, lr).by_seed() for lr in self.scale.rates)

    def value(self, cell: Cell, tuned: TunedMethod) -> float:
        """The value of a method's setting that was selected for this cell."""
        assert tuned.first is not None
        if tuned.same_in_all_cells:
            return neighbour(tuned.first(cell), self._same_steps(cell, tuned))
        found = self.selection(cell, tuned)
        if found.value is None:
            raise NotRun(f"the {tuned.setting} of {tuned.name} is not selected yet in {cell}", found.needed)
        return found.value

    def selection(self, cell: Cell, tuned: TunedMethod) -> Selection:
        """The search for the best value of a method's setting in this cell."""
        assert tuned.first is not None
        if (cell, tuned) not in self._selections:
            run = lambda value: cell.run(tuned.of_value(value), TUNING_SEED)  # noqa: E731
            found = select(run, tuned.first(cell), self.known, tuned.values)
            self._selections[cell, tuned] = found
        return self._selections[cell, tuned]

    def _best_cell(self, cells: Sequence[Cell], tuned: TunedMethod) -> Cell:
        """The cell with the lowest loss on the tuning seed."""
        if len(cells) == 1:
            return cells[0]
        values = [0.0 if tuned.first is None else self.value(cell, tuned) for cell in cells]
        runs = [cell.run(tuned.of_value(value), TUNING_SEED) for cell, value in zip(cells, values, strict=True)]
        losses = self._tuning_losses(runs, f"{tuned.name}: its learning rate is not selected yet")
        return cells[losses.index(min(losses))]

    def _same_steps(self, cell: Cell, tuned: TunedMethod) -> int:
        """How many positions in VALUES the setting is from its first value, the same for all cells of an optimizer."""
        assert tuned.first is not None
        cells = [each for each in self.scale.cells() if each.adamw == cell.adamw]
        firsts = [tuned.first(each) for each in cells]
        best, means = 0, dict[int, float]()
        while not {best - 1, best, best + 1} <= means.keys():
            for steps in {best, best - 1, best + 1} - means.keys():
                methods = [tuned.of_value(neighbour(first, steps)) for first in firsts]
                runs = [each.run(method, TUNING_SEED) for each, method in zip(cells, methods, strict=True)]
                reason = f"the {tuned.setting} of {tuned.name} is not selected yet"
                means[steps] = mean(self._tuning_losses(runs, reason))
            best = min(means, key=lambda steps: means[steps])
        return best

    def _tuning_losses(self, runs: Sequence[Config], reason: str) -> list[float]:
        entries = [self.known.get(fingerprint(run)) for run in runs]
        needed = [run for run, entry in zip(runs, entries, strict=True) if entry is None]
        if needed:
            raise NotRun(reason, needed)
        return [tuning_loss(entry) for entry in entries if entry is not None]


def as_tuned(method: AnyMethod) -> TunedMethod:
    """A method, and how its setting is selected."""
    if isinstance(method, TunedMethod):
        return method
    return TUNED[method] if isinstance(method, type) else fixed(method)


def available(keys: Iterable[Key], query: Callable[[Key], Value]) -> dict[Key, Value]:
    """The query's result for every key for which the ledger has runs."""
    found = {}
    for key in keys:
        with suppress(NotRun):
            found[key] = query(key)
    return found
