"""The learning rate over a run, as a factor of its peak: a pure function of the step.

All schedules warm up first, linearly: step s of w takes (s + 1) / w of the peak, so that none is wasted on lr 0. What
goes down reaches its `final` factor when the run ends, one step after the last, for the same reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch.optim import Optimizer

from quacklr.lab.errors import UserError, validate, validate_non_negative


@dataclass(frozen=True, slots=True)
class Constant:
    """Warmup, then the peak to the end. What the paper trains with."""

    warmup: int
    """Steps until the peak; 0 for none."""

    def __post_init__(self) -> None:
        validate_non_negative(warmup=self.warmup)


@dataclass(frozen=True, slots=True)
class Cosine:
    """Warmup, then down along half a cosine."""

    warmup: int
    """Steps until the peak; 0 for none."""
    final: float = 0.1
    """The factor at the end."""

    def __post_init__(self) -> None:
        validate_non_negative(warmup=self.warmup)
        _refuse_final(self.final)


@dataclass(frozen=True, slots=True)
class WSD:
    """Warmup, stable, decay: the peak until `decay` steps before the end, then down in a straight line."""

    warmup: int
    """Steps until the peak; 0 for none."""
    decay: int
    """Steps from the peak to the end."""
    final: float = 0.0
    """The factor at the end."""

    def __post_init__(self) -> None:
        validate_non_negative(warmup=self.warmup, decay=self.decay)
        _refuse_final(self.final)


Schedule = Constant | Cosine | WSD


def check(schedule: Schedule, steps: int) -> None:
    """UserError if the parts of the schedule do not fit into that many steps."""
    if schedule.warmup > steps:
        raise UserError(f"--warmup {schedule.warmup} is longer than the run of {steps} steps")
    if isinstance(schedule, WSD) and schedule.warmup + schedule.decay > steps:
        raise UserError(
            f"--warmup {schedule.warmup} and --decay {schedule.decay} together are longer than the run of {steps} steps"
        )


def factor(schedule: Schedule, step: int, steps: int) -> float:
    """What the peak learning rate is multiplied by at `step`, counted from 0, of a run of `steps`."""
    if step < schedule.warmup:
        return (step + 1) / schedule.warmup
    match schedule:
        case Constant():
            return 1.0
        case Cosine(warmup, final):
            return final + (1 - final) * (1 + math.cos(math.pi * _progress(step, warmup, steps))) / 2
        case WSD(_, decay, final):
            return 1 - (1 - final) * _progress(step, steps - decay, steps)


def set_lr(optimizers: Iterable[Optimizer], factor: float) -> None:
    """Write every group's lr: its peak times this factor."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor


def _progress(step: int, start: int, end: int) -> float:
    """0 until the start, 1 from the end on."""
    return min(1.0, max(0, step - start) / max(1, end - start))


def _refuse_final(final: float) -> None:
    validate(lambda value: 0 <= value <= 1, "between 0 and 1", {"final": final})
