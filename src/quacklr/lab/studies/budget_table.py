"""Where the budget stands: one budget for all cells, compared with methods that are tuned in each cell.

A cell is a kind of attention, an optimizer and a learning rate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import mean
from typing import NamedTuple, Self

from quacklr.lab.config import Config, fingerprint
from quacklr.lab.methods import Budget, ConstantTau, Default, Method, QKNorm, Quack
from quacklr.lab.optim import AdamWRecipe, MuonRecipe
from quacklr.lab.studies.results import NotRun, Results, RunsBySeed, lr_sensitivity
from quacklr.lab.studies.scale import StudyScale, with_seed
from quacklr.lab.studies.tuning import TUNING_SEED, Runs, Selection, nearest, neighbour, select, tuning_loss

BUDGET = 0.02  # chosen before, on other seeds: docs/log.md
OTHER_BUDGETS = (0.007, 0.06)  # a third of it, and three times it
ADAMW_RELATIVE_RATE = 0.3  # learning rates of AdamW, relative to those of Muon
FIXED = "QuacK, tau * lr fixed"
MOST_SEEDS = 16


class Column(NamedTuple):
    """A method of the table.

    `method` gives the method for a value of its setting. `first` is the value times lr where the search for the best
    value begins, with Muon and with AdamW; None for a method without a setting.
    """

    method: Callable[[float], Method]
    first: tuple[float, float] | None = None


def without_setting(method: Method) -> Column:
    """The column of a method that is the same in all cells."""
    return Column(lambda _: method)


COLUMNS: dict[str, Column] = {
    "default": without_setting(Default()),
    "QK norm": without_setting(QKNorm()),
    "constant tau": Column(lambda tau: Default() if tau == 1 else ConstantTau(tau), (0.01, 0.003)),
    "QuacK": Column(Quack, (0.1, 0.01)),
    "QuacK, literal": Column(lambda tau: Quack(tau, literal=True), (0.1, 0.01)),
    FIXED: Column(Quack, (0.1, 0.01)),
    "budget": without_setting(Budget(BUDGET)),
    **{f"budget {budget:g}": without_setting(Budget(budget)) for budget in OTHER_BUDGETS},
}
"""In the order of the table. `QuacK, literal` is Algorithm 2 as printed; it differs only where latents have norms."""

PAPER = ("default", "QK norm", "constant tau", "QuacK", "QuacK, literal")
"""The methods of the paper, each at the best setting for the cell."""


@dataclass(frozen=True, eq=False)  # equal only to itself, so it can be the key of a dict
class Cell:
    """A kind of attention, an optimizer and a learning rate."""

    scale: StudyScale
    attention: str
    latent_norm: bool
    adamw: bool
    muon_lr: float
    """The learning rate of Muon in this cell; AdamW's is ADAMW_RELATIVE_RATE of it."""

    @property
    def lr(self) -> float:
        """The learning rate."""
        exact = float(f"{self.muon_lr * ADAMW_RELATIVE_RATE:.6g}")  # 0.003, not 0.0029999999999999996
        return exact if self.adamw else self.muon_lr

    def __str__(self) -> str:
        return f"{self.model_and_optimizer}, lr {self.lr:g}"

    @property
    def model_and_optimizer(self) -> str:
        """Such as `MLA with latent norms, AdamW`."""
        norms = " with latent norms" if self.latent_norm else ""
        return f"{self.attention.upper()}{norms}, {'AdamW' if self.adamw else 'Muon'}"

    def run(self, method: Method) -> Config:
        """The run of a method in this cell."""
        scale = self.scale.with_latent_norms() if self.latent_norm else self.scale
        return scale.run(
            self.attention, method, self.lr, optimizer=AdamWRecipe() if self.adamw else scale.base.optimizer
        )

    def first(self, column: Column) -> float:
        """Where the search for the best value begins."""
        assert column.first is not None
        return nearest(column.first[self.adamw] / self.lr)


def cells(scale: StudyScale) -> Iterator[Cell]:
    """All cells, the highest learning rate first."""
    assert isinstance(scale.base.optimizer, MuonRecipe)
    for attention, latent_norm in (("mha", False), ("mla", False), ("mla", True)):
        for adamw in (False, True):
            for lr in reversed(scale.rates):
                yield Cell(scale, attention, latent_norm, adamw, lr)


class BudgetTable:
    """The runs of the table, and those that it still needs."""

    def __init__(self, scale: StudyScale, known: Runs) -> None:
        self.known, self.cells = known, list(cells(scale))
        self._selections: dict[tuple[Cell, Column], Selection] = {}

    @classmethod
    def of(cls, results: Results) -> Self:
        """The table of the runs in a ledger."""
        return cls(results.scale, {entry.key: entry for entry in results.entries})

    @staticmethod
    def columns(cell: Cell) -> list[str]:
        """The columns that differ from each other in this cell."""
        return [name for name in COLUMNS if cell.latent_norm or name != "QuacK, literal"]

    def needed(self, seeds: int) -> Iterator[Config]:
        """All runs as far as they are known now: those that select settings, then those of seeds 1, 2, ..."""
        for cell in self.cells:
            for name in self.columns(cell):
                column = COLUMNS[name]
                if column.first is not None:
                    around = (neighbour(cell.first(column), steps) for steps in (-1, 0, 1))
                    yield from (with_seed(cell.run(column.method(value)), TUNING_SEED) for value in around)
                    yield from self._selection(cell, column).needed
        for seed in range(1, seeds + 1):
            for cell in self.cells:
                methods = (self.method(cell, name) for name in self.columns(cell))
                yield from (with_seed(cell.run(method), seed) for method in methods if method is not None)

    def value(self, cell: Cell, name: str) -> float | None:
        """The value of a column's setting that was selected for this cell; None if that is not known yet."""
        column = COLUMNS[name]
        if name == FIXED:
            steps = self._fixed[cell.adamw]
            return None if steps is None else neighbour(cell.first(column), steps)
        return self._selection(cell, column).value

    def method(self, cell: Cell, name: str) -> Method | None:
        """The method of a column, with the setting that was selected for this cell; None if that is not known yet."""
        column = COLUMNS[name]
        value = 0.0 if column.first is None else self.value(cell, name)
        return None if value is None else column.method(value)

    def runs(self, cell: Cell, name: str) -> RunsBySeed:
        """The runs of a column in a cell that judge it, by seed."""
        method, found = self.method(cell, name), {}
        if method is not None:
            keys = {seed: fingerprint(with_seed(cell.run(method), seed)) for seed in range(1, MOST_SEEDS + 1)}
            found = {seed: self.known[key] for seed, key in keys.items() if key in self.known}
        if not found:
            raise NotRun(f"{name} was not run: {cell}")
        return found

    def by_model(self) -> dict[str, list[Cell]]:
        """The cells, by kind of attention and optimizer; the lowest learning rate first."""
        found: dict[str, list[Cell]] = {}
        for cell in self.cells:
            found.setdefault(cell.model_and_optimizer, []).insert(0, cell)
        return found

    def lr_sensitivity(self, cells: Sequence[Cell], name: str) -> dict[int, float]:
        """By seed: mean minus minimum of the loss over learning rates (Wortsman et al. 2023)."""
        return lr_sensitivity([self.runs(cell, name) for cell in cells])

    def _selection(self, cell: Cell, column: Column) -> Selection:
        if (cell, column) not in self._selections:
            found = select(lambda value: cell.run(column.method(value)), cell.first(column), self.known)
            self._selections[cell, column] = found
        return self._selections[cell, column]

    @cached_property
    def _fixed(self) -> dict[bool, int | None]:
        """By `adamw`: how many steps of VALUES tau is from its first value, the same in all cells; None if not known.

        The first values have the same tau * lr at all learning rates.
        """
        return {
            adamw: self._best_steps([each for each in self.cells if each.adamw == adamw]) for adamw in (False, True)
        }

    def _best_steps(self, cells: Sequence[Cell]) -> int | None:
        column, means = COLUMNS[FIXED], {}
        for steps in (-1, 0, 1):
            methods = [column.method(neighbour(cell.first(column), steps)) for cell in cells]
            configs = (cell.run(method) for cell, method in zip(cells, methods, strict=True))
            entries = [self.known.get(fingerprint(with_seed(config, TUNING_SEED))) for config in configs]
            if None in entries:
                return None
            means[steps] = mean(tuning_loss(entry) for entry in entries if entry is not None)
        return min(means, key=lambda steps: means[steps])
