"""Learning-rate schedules: the factor of the peak learning rate, as a pure function of the step.

All schedules begin with a linear warmup: step s of w has the factor (s + 1) / w, so no step has lr 0. A decay reaches
its `final` factor one step after the last one, for the same reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch.optim import Optimizer

from quacklr.lab.errors import UserError, validate, validate_non_negative


@dataclass(frozen=True, slots=True)
class Constant:
    """Warmup, then the peak to the end; the paper's schedule."""

    warmup: int
    """Steps of warmup; 0 for none."""

    def __post_init__(self) -> None:
        validate_non_negative(warmup=self.warmup)


@dataclass(frozen=True, slots=True)
class Cosine:
    """Warmup, then a decay along half a cosine."""

    warmup: int
    """Steps of warmup; 0 for none."""
    final: float = 0.1
    """Factor of the peak learning rate at the end."""

    def __post_init__(self) -> None:
        validate_non_negative(warmup=self.warmup)
        _validate_final(self.final)


@dataclass(frozen=True, slots=True)
class WSD:
    """Warmup, stable, decay: the peak until `decay` steps before the end, then a linear decay."""

    warmup: int
    """Steps of warmup; 0 for none."""
    decay: int
    """Steps of decay."""
    final: float = 0.0
    """Factor of the peak learning rate at the end."""

    def __post_init__(self) -> None:
        validate_non_negative(warmup=self.warmup, decay=self.decay)
        _validate_final(self.final)


Schedule = Constant | Cosine | WSD


def validate_schedule(schedule: Schedule, steps: int) -> None:
    """UserError if warmup and decay are longer than the run."""
    if schedule.warmup > steps:
        raise UserError(f"--warmup {schedule.warmup} is longer than the run of {steps} steps")
    if isinstance(schedule, WSD) and schedule.warmup + schedule.decay > steps:
        raise UserError(
            f"--warmup {schedule.warmup} and --decay {schedule.decay} together are longer than the run of {steps} steps"
        )


def factor(schedule: Schedule, step: int, steps: int) -> float:
    """The factor of the peak learning rate at `step`, counted from 0, of a run of `steps`."""
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
    """Set the lr of every param group to its peak_lr times the factor."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor


def _progress(step: int, start: int, end: int) -> float:
    """Rises linearly from 0 at the start to 1 at the end."""
    return min(1.0, max(0, step - start) / max(1, end - start))


def _validate_final(final: float) -> None:
    validate(lambda value: 0 <= value <= 1, "between 0 and 1", {"final": final})
