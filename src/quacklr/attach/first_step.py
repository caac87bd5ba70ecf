"""The checks of the first step: are the rows right, and do the optimizers step them?

The scaler calls them from its hooks, and forgets them when each optimizer has stepped.
"""

from __future__ import annotations

from functools import partial

from torch.optim import Optimizer

from quacklr.attach.attachment import Attachment
from quacklr.attach.step_check import StepCheck
from quacklr.core.step_scaler import StepScaler


class FirstStep:
    """Called by the scaler before and after the first step of each optimizer."""

    def __init__(self, attachment: Attachment, scaler: StepScaler, check: StepCheck) -> None:
        self._attachment, self._scaler, self._check = attachment, scaler, check

    def before(self, optimizer: Optimizer) -> None:
        """Check that the optimizer steps the weights on the paths, and measure the first batch, if there was one."""
        tensors, stepped = self._scaler.tensors_of(optimizer), self._scaler.rule.stepped
        begins = not stepped or not stepped.isdisjoint(tensors)
        self._check.before_step(tensors, stepped if begins else ())
        if tensors and self._attachment.verification is not None:
            self._attachment.verification.before_step()

    def after(self, optimizer: Optimizer) -> None:
        """Check that the weights had gradients, or moved."""
        if self._attachment.verification is not None:
            self._attachment.verification.finish()
        step = self._scaler.running[optimizer]
        self._check.after_step(optimizer, step.tensors, partial(step.blocks.have_moved, step.copies))
        if self._check.is_done:
            self._scaler.first_step = None
