"""A model to inspect or check, and the error for a name that gives no model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn


class BadTargetError(Exception):
    """The message states what is wrong with a target and how to fix it."""


@dataclass(frozen=True, slots=True)
class Target:
    """A model, perhaps on the meta device. `batch` is an input that it takes; `optimizers` are those of a factory."""

    model: nn.Module
    batch: Any = None
    optimizers: Any = None

    def runnable(self) -> tuple[nn.Module, Any]:
        """The model and its batch. BadTargetError if the target has no batch."""
        if self.batch is None:
            raise BadTargetError(
                f"{type(self.model).__name__}: to run it, name a function that returns a batch too, as "
                "path/to/file.py:factory with `return model, batch`"
            )
        return self.model, self.batch


def one_line(error: BaseException) -> str:
    """An exception in one line: its class, the beginning of its message, and the line of code that raised it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = "" if trace is None else f" ({Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno})"
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message if len(message) < 300 else message[:300] + ' ...'}{where}"
