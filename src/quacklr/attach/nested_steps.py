"""Optimizer steps that are running now: a step may call its parent class's step, or another optimizer's.

torch runs the hooks of every such call, so a hook must find out whether it runs inside another step. Counting hook
calls is not enough: a step that raised an exception never runs its post-hook. So the call stack is read, but only if a
step is unfinished; an ordinary step costs nothing.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import FrameType

from torch.optim import Optimizer

from quacklr.core.blocks import Copies

_HOOKED_STEP = Optimizer.profile_hook_step(lambda _: None).__code__  # every class's step is wrapped by this function


@dataclass(slots=True)
class RunningStep:
    """A step between its pre-hook and its post-hook: copies of the rows before it, and ids of the tensors it moves."""

    copies: Copies
    tensors: set[int]
    calls_step: bool = False  # whether it called the step of its parent class, or of another optimizer


class RunningSteps(dict[Optimizer, RunningStep]):
    """The steps between their hooks, by optimizer."""

    def drop_failed(self, optimizer: Optimizer) -> None:
        """In a pre-hook, drop steps that raised an exception: they are not on the call stack."""
        for other, running in list(self.items()):
            running.calls_step = running_steps(other) > (other is optimizer)
            if not running.calls_step:
                del self[other]

    def finish(self, optimizer: Optimizer) -> RunningStep | None:
        """In a post-hook, remove and return the step that ends; None if only a nested step ends."""
        running = self.get(optimizer)
        if running is None or (running.calls_step and running_steps(optimizer) > 1):
            return None
        return self.pop(optimizer)


def running_steps(optimizer: Optimizer) -> int:
    """The number of calls of the optimizer's `step` on the call stack: 2 in a hook of a nested step."""
    frame: FrameType | None = sys._getframe(1)
    count = 0
    while frame is not None:
        code = frame.f_code  # torch.compile renames it, to torch_dynamo_resume_in_wrapper_at_...
        if code.co_filename == _HOOKED_STEP.co_filename and _HOOKED_STEP.co_name in code.co_name:
            count += any(value is optimizer for value in frame.f_locals.values())
        frame = frame.f_back
    return count
