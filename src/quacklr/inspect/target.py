"""A model to inspect or check, and the errors for a name that gives no model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

SMALL = "a small model of the same kind"


class BadTargetError(Exception):
    """The message states what is wrong with a target and how to fix it."""


class NoMeasurementError(ValueError):
    """The model does not run on the batch, or the batch runs no attention."""


@dataclass(frozen=True, slots=True)
class Target:
    """A model, perhaps on the meta device; and a function that returns a model that runs, and a batch for it.

    `measured_on` describes the model that runs, if it is another model. `optimizers`: those of the target, if any.
    """

    model: nn.Module
    runnable: Callable[[], tuple[nn.Module, Any]]
    measured_on: str = ""
    optimizers: Any = None


def one_line(error: BaseException) -> str:
    """An exception in one line: its class, the beginning of its message, and the line of code that raised it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = "" if trace is None else f" ({Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno})"
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message if len(message) < 300 else message[:300] + ' ...'}{where}"
