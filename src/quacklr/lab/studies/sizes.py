"""Models of four sizes, which differ in their width only, and the critical learning rate of each.

The critical learning rate is the one at which the largest logit of the default is 100 at the end of training. It is
searched for on seed 0, among 0.001, 0.003, 0.01, ..., until it is between two neighbours, and interpolated between
them: both axes are logarithmic. On other seeds, it is computed from runs at the same two learning rates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from quacklr.lab.config import fingerprint
from quacklr.lab.methods import Default, Method, Quack
from quacklr.lab.model import MHA
from quacklr.lab.studies.cell import TUNING_SEED, Cell, cell_of
from quacklr.lab.studies.measures import NotRun, largest_logit
from quacklr.lab.studies.results import MethodRuns, Results
from quacklr.lab.studies.tuned_methods import QUACK
from quacklr.lab.studies.tuning import nearest, neighbour
from quacklr.lab.studies.verdicts import STABLE

WIDTHS = {"0.3M": 64, "1M": 128, "4M": 256, "16M": 512}
"""By number of parameters, ascending."""
JUDGED = ("0.3M", "1M", "4M")
"""The sizes that claims are about. The largest has too few seeds for an interval; the figure shows it."""
FIRST_RATE = 0.03
ABOVE_CRITICAL = 10
"""Methods are compared at this multiple of the critical learning rate."""


class Bracket(NamedTuple):
    """The two learning rates around the critical one of a size, and the critical one between them, on seed 0."""

    low: Cell
    high: Cell
    critical: float
    """As log10."""


@dataclass(frozen=True)
class CriticalRate:
    """The critical learning rate of a size, and the two learning rates that it is computed from."""

    low: MethodRuns
    high: MethodRuns
    on_tuning_seed: float

    def by_seed(self) -> dict[int, float]:
        """log10 of the critical learning rate, on the seeds that methods are judged on.

        A seed whose logits do not grow from the low to the high learning rate has no critical rate, and is left out.
        """
        low, high = self.low.by_seed(largest_logit), self.high.by_seed(largest_logit)
        found = {
            seed: crossing(self.low.cell.lr, low[seed], self.high.cell.lr, high[seed]) for seed in low.keys() & high
        }
        return {seed: rate for seed, rate in found.items() if not math.isnan(rate)}


def size_cell(results: Results, size: str, lr: float) -> Cell:
    """MHA with heads of the same size as in all other studies, trained with Muon."""
    base, width = results.scale.base, WIDTHS[size]
    spec = results.scale.attentions["mha"]
    assert isinstance(spec, MHA)
    heads = width // spec.head_dim
    shape = replace(base.shape, d_model=width, d_ff=width * base.shape.d_ff // base.shape.d_model)
    attention = replace(spec, heads=heads, kv_heads=heads)
    optimizer = replace(base.optimizer, lr=lr)
    return cell_of(f"MHA of {size}, Muon", replace(base, shape=shape, attention=attention, optimizer=optimizer))


def bracket(results: Results, size: str) -> Bracket:
    """The learning rates around the critical one; NotRun, with the run that is needed next, if not known yet."""
    step = -1 if logit_at(results, size, FIRST_RATE) > STABLE else 1
    last, lr = FIRST_RATE, neighbour(FIRST_RATE, step)
    while (logit_at(results, size, lr) > STABLE) == (step < 0):
        if lr == last:
            raise NotRun(f"no critical learning rate of {size}: the search has reached {lr:g}")
        last, lr = lr, neighbour(lr, step)
    low, high = sorted((last, lr))
    at_low, at_high = (logit_at(results, size, lr) for lr in (low, high))
    below, above = (size_cell(results, size, lr) for lr in (low, high))
    return Bracket(below, above, crossing(low, at_low, high, at_high))


def critical_rate(results: Results, size: str) -> CriticalRate:
    """The critical learning rate of the default; NotRun, with the runs that are needed, if it is not known yet."""
    found = bracket(results, size)
    below, above = (results.runs(cell, Default) for cell in (found.low, found.high))
    return CriticalRate(below, above, found.critical)


def logit_at(results: Results, size: str, lr: float) -> float:
    """log10 of the largest logit of the default on the tuning seed."""
    run = size_cell(results, size, lr).run(Default(), TUNING_SEED)
    entry = results.known.get(fingerprint(run))
    if entry is None:
        raise NotRun(f"the critical learning rate of {size} is not known yet", [run])
    return largest_logit(entry)


def crossing(low: float, at_low: float, high: float, at_high: float) -> float:
    """log10 of the learning rate where log10 of the logit is STABLE, on a line through two points."""
    slope = (at_high - at_low) / (math.log10(high) - math.log10(low))
    return math.log10(low) + (STABLE - at_low) / slope if slope > 0 else math.nan


def tau_of_size(cell: Cell) -> float:
    """The tau of QuacK in a cell of `above_critical`: tau * lr is 0.1, which is the best for 1M."""
    assert QUACK.first is not None
    return QUACK.first(cell)


def above_critical(results: Results, size: str) -> Cell:
    """The cell with ABOVE_CRITICAL times the critical learning rate, rounded to 0.1, 0.3, 1, ..."""
    return size_cell(results, size, nearest(ABOVE_CRITICAL * 10 ** bracket(results, size).critical))


def runs_above(results: Results, method: type[Method], size: str) -> MethodRuns:
    """The runs of a method at `above_critical`. tau of QuacK is not selected there."""
    cell = above_critical(results, size)
    return results.runs(cell, Quack(tau_of_size(cell)) if method is Quack else method())
