"""The table of the study `budgets`: one budget for all cells, compared with methods that are tuned in each cell."""

from __future__ import annotations

from collections.abc import Iterable

from quacklr.lab.methods import Budget, ConstantTau, Default, QKNorm
from quacklr.lab.studies.cell import Cell
from quacklr.lab.studies.scale import StudyScale
from quacklr.lab.studies.tuned_methods import LITERAL, QUACK, SAME_TAU_LR, TUNED, TunedMethod, fixed

OTHER_BUDGETS = (0.007, 0.06)  # a third of the default, 0.02, and three times it

PAPER = (TUNED[Default], TUNED[QKNorm], TUNED[ConstantTau], QUACK, LITERAL)
"""The methods of the paper, each at the best setting for the cell."""

METHODS: tuple[TunedMethod, ...] = (
    *PAPER,
    SAME_TAU_LR,
    TUNED[Budget],
    *(fixed(Budget(budget)) for budget in OTHER_BUDGETS),
)
"""All methods of the table, in its order."""


def methods_in(cell: Cell, methods: Iterable[TunedMethod] = METHODS) -> list[TunedMethod]:
    """The methods that are run in this cell: without latent norms, LITERAL is the same as QUACK and is left out."""
    return [method for method in methods if cell.latent_norm or method is not LITERAL]


def by_model(scale: StudyScale) -> dict[str, list[Cell]]:
    """The cells, by kind of attention and optimizer; the lowest learning rate first."""
    found: dict[str, list[Cell]] = {}
    for cell in scale.cells():
        found.setdefault(cell.model, []).insert(0, cell)
    return found
