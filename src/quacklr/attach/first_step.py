"""The checks of the first step: are the rows right, and do the optimizers step them?

The scaler calls them from its hooks, and forgets them when each optimizer has stepped and all attention is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.optim import Optimizer

from quacklr.attach.attachment import Attachment
from quacklr.attach.step_check import StepCheck
from quacklr.core.step_scaler import Arguments, StepScaler


class FirstStep:
    """Called by the scaler before and after the first step of each optimizer.

    `start` is called if a measurement has found paths. `check` is None until there are any.
    """

    def __init__(self, attachment: Attachment, scaler: StepScaler, start: Callable[[], None]) -> None:
        self._attachment, self._scaler, self._start = attachment, scaler, start
        self.check: StepCheck | None = None
        self._more = False  # whether paths were found that are not used yet

    def before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """Measure the first batch, and check that the optimizer steps the weights on the paths.

        If the model runs only in the step, in a closure, returns other arguments for the step: a closure that also
        calls the scaler's `before`.
        """
        runs_later = self._scaler.paths is None and not self._attachment.has_batch
        if runs_later and (with_closure := self._with_closure(optimizer, args, kwargs)):
            return with_closure
        if self._attachment.has_batch or self._scaler.paths is None:
            self._more |= self._attachment.measure()
        if self._more:
            self._start()
            self._more = False
        if self.check is not None:
            self.check.before_step()
        return None

    def _with_closure(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            return None

        def measured() -> Any:
            result = closure()
            self._scaler.before(optimizer)
            return result

        return ((args[0], measured, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": measured})

    def after(self, optimizer: Optimizer) -> None:
        """Check that the weights had gradients, or moved. Paths that are found now are for the next step."""
        assert self.check is not None
        if self._attachment.waits:
            self._more |= self._attachment.measure()
        step = self._scaler.running[optimizer]
        self.check.after_step(optimizer, step.tensors, partial(step.blocks.have_moved, step.copies))
        if self.check.is_done and not self._attachment.waits and not self._more:
            self._scaler.first_step = None
