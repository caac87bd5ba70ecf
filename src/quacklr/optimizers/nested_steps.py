"""Optimizer steps that are running now: a step may call its parent class's step, or another optimizer's.

torch calls the hooks of a step each time, so a hook must know whether it runs inside of another step. Counting hook
calls is not enough: after a step that raised, its post-hook is missing. So the call stack is read. Only a hook that
finds an unfinished step asks for it; an ordinary step costs nothing.
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
    """A step between its hooks: copies of the rows before it, and the ids of the tensors that it moves."""

    copies: Copies
    tensors: set[int]
    calls_step: bool = False  # its parent class's, or another optimizer's


def running_steps(optimizer: Optimizer) -> int:
    """How many calls of the optimizer's `step` are on the call stack: 2 in a hook of a step that a step called."""
    frame: FrameType | None = sys._getframe(1)
    count = 0
    while frame is not None:
        code = frame.f_code  # torch.compile renames it, to torch_dynamo_resume_in_wrapper_at_...
        if code.co_filename == _HOOKED_STEP.co_filename and _HOOKED_STEP.co_name in code.co_name:
            count += any(value is optimizer for value in frame.f_locals.values())
        frame = frame.f_back
    return count
