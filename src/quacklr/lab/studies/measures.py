"""Quantities of a run that claims compare: its loss, its logits, the time of its steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from statistics import mean

from quacklr.lab.config import Config
from quacklr.lab.ledger import Entry

Measure = Callable[[Entry], float]
DIVERGED_LOG10 = 38.0
"""log10 of the largest float32. It is used as log10 of the logits of a run that diverged."""
SMALLEST = 1e-12
"""Used in place of a smaller value, whose log10 may not exist."""


class NotRun(Exception):  # noqa: N818 - not an error: a study may be partly done
    """The ledger lacks runs that a question needs. `needed` are the runs to do next."""

    def __init__(self, reason: str, needed: Iterable[Config] = ()) -> None:
        super().__init__(reason)
        self.needed = list(needed)


def loss(entry: Entry) -> float:
    """The final validation loss; for a run that diverged, that of the untrained model (Wortsman et al. 2023)."""
    if entry.status == "finished":
        return float(entry.result["val_loss"])
    for _, value in entry.curve("val_loss"):
        return float(value)
    raise NotRun(f"{entry.key} has no validation loss, not even of the untrained model")


def largest_logit(entry: Entry) -> float:
    """log10 of the largest logit over layers and heads at the last measurement."""
    found, exact = _log10_of_largest(entry, "max", -1), entry.result.get("max_logit")
    return found if found == DIVERGED_LOG10 or exact is None else math.log10(max(exact, SMALLEST))


def step_change(entry: Entry) -> float:
    """log10 of the mean change of the logits by one step, of the head where it is largest, at the last measurement."""
    return _log10_of_largest(entry, "step_change", -1)


def middle_step_change(entry: Entry) -> float:
    """`step_change` at the measurement in the middle of training."""
    return _log10_of_largest(entry, "step_change", sum(1 for _ in entry.curve("logits", "step_change")) // 2)


def step_time(entry: Entry) -> float:
    """log10 of the median time of a step."""
    if not entry.step_seconds or entry.step_seconds < 0:
        raise NotRun(f"{entry.key} has no times")
    return math.log10(entry.step_seconds)


def _log10_of_largest(entry: Entry, name: str, index: int) -> float:
    """log10 of the largest value over layers and heads in one measurement; DIVERGED_LOG10 if the run diverged."""
    tables = [table for _, table in entry.curve("logits", name)]
    values = [value for row in tables[index] for value in row] if tables else []
    if entry.status == "diverged" or None in values:
        return DIVERGED_LOG10
    if not values:
        raise NotRun(f"{entry.key} has no measurement of {name}")
    return math.log10(max(*values, SMALLEST))


def lr_sensitivity(losses: Iterable[Mapping[int, float]]) -> dict[int, float]:
    """Learning-rate sensitivity by seed (Wortsman et al. 2023): mean minus minimum of the loss over learning rates.

    `losses` are those of each learning rate, by seed. The loss of a run that diverged is that of the untrained model.
    """
    rows = list(losses)
    seeds = sorted(set.intersection(*(set(row) for row in rows)))
    if not seeds:
        raise NotRun("its learning rates have no seed in common")
    return {seed: mean(row[seed] for row in rows) - min(row[seed] for row in rows) for seed in seeds}
