"""The rates of the paper: tau * (sensitivity when QuacK was attached) / (sensitivity now)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from quacklr.core.blocks import Copies, Memory
from quacklr.core.norms import Norm
from quacklr.core.sensitivity import Rule, rates_from
from quacklr.core.state import Saved, norm_name, read_state, write_state
from quacklr.core.validate import FLOAT32, validate_norms
from quacklr.core.weight import Weight

RESUMED_ALONE = (
    "the optimizer's state was loaded but QuacK's was not, so all rates start again from tau; "
    "call quack.load_state_dict(...) too when you resume a run"
)
ATTACHED_LATE = (
    "the optimizer had stepped before QuacK was attached, so rates are relative to the weights at that time. This is "
    "right if QuacK is new in this run; to resume a run with QuacK, call quack.load_state_dict(...) before the next "
    "step"
)


class RelativeRates:
    """Rates relative to the sensitivities at the start, computed from the weights before each step.

    `stepped` are the ids of the tensors that have stepped in this iteration. An iteration ends when one of them steps
    again. All steps of an iteration use the rates that were computed before its first step.
    """

    def __init__(self, rule: Rule, tau: float, norm: Norm, adapt: bool, floor: float) -> None:
        self.rule, self.norm, self.adapt, self.floor = rule, norm, adapt, floor
        self.start, self.memory = self._measure_start()
        self.largest, self.rates = _largest(self.start), torch.full_like(self.start, tau)
        self.stepped: set[int] = set()
        self.set_tau(tau)

    def set_tau(self, tau: float) -> None:
        """Use another tau from the next step on."""
        if self.adapt and tau * self.largest > FLOAT32.max:
            raise ValueError(f"tau={tau!r}: with these weights, tau * sensitivity is more than float32 can hold")
        self.tau = tau
        self.target = tau * self.start
        if not self.adapt:
            self.rates.fill_(tau)

    def no_step(self, tensors: Collection[int], new_iteration: bool) -> None:
        """Do nothing: a step with every lr 0 changes no weight, so no rate changes."""

    def before_step(self, tensors: Collection[int], new_iteration: bool) -> Copies:
        """Compute the rates if an iteration begins. Returns copies of the rows of these tensors (by id)."""
        if new_iteration:
            self.stepped.clear()
        self.stepped |= set(tensors)
        if not (new_iteration and self.adapt):
            return self.rule.blocks.copy(tensors)
        copies, norms, self.memory = self._measure(self.memory)
        rates_from(self.target, self.rule.sensitivity(norms), self.tau, out=self.rates)
        return copies

    def after_step(self, *_: object) -> Tensor:
        """The rates of all blocks, which do not depend on the step that was taken."""
        return self.rates

    def has_rates(self, weight: Weight) -> bool:
        """Whether a weight has rates."""
        return weight.trains

    def next_rates(self) -> Tensor:
        """The rates that the next step will use. Collective for sharded weights."""
        if not self.adapt:
            return torch.full_like(self.start, self.tau)
        copies, norms, _ = self._measure(self.memory)
        self.rule.blocks.recycle(copies)
        return rates_from(self.target, self.rule.sensitivity(norms), self.tau)

    def state_dict(self) -> dict[str, Any]:
        """The state, by weight name."""
        return write_state(self.rule, self.norm, self._saved())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state; ValueError if it is of another model or norm."""
        saved = read_state(self.rule, self.norm, state_dict, self._saved(), self.adapt)
        self.start, self.memory, self.stepped = saved.start, saved.memory, saved.stepped
        self.largest = _largest(self.start)
        self.rates.copy_(saved.rates if saved.rates is not None else torch.tensor(torch.nan))
        self.set_tau(self.tau)

    def _saved(self) -> Saved:
        rates = None if bool(self.rates.isnan().any()) else self.rates
        return Saved(self.start, rates, self.stepped, self.memory)

    def _measure(self, memory: Memory) -> tuple[Copies, list[Tensor], Memory]:
        copies, norms, memory = self.rule.blocks.measure(self.norm, memory)
        return copies, [norm.clamp(min=self.floor) for norm in norms] if self.floor else norms, memory

    def _measure_start(self) -> tuple[Tensor, Memory]:
        """The sensitivities at the start, to which all later rates are relative, and the norm's memory."""
        _, _, memory = self._measure(self.rule.blocks.empty_memory())
        _, norms, _ = self._measure(memory)  # the first step uses this memory too, so its rates are exactly tau
        start = self.rule.sensitivity(norms)
        validate_norms(self.rule, torch.cat(norms), start, self.adapt)
        return start, memory

    def __repr__(self) -> str:
        return f"tau={self.tau:g}, norm={norm_name(self.norm)}, adapt={self.adapt}, floor={self.floor:g}"


def _largest(sensitivity: Tensor) -> float:
    """The largest finite sensitivity. Waits for the device."""
    return float(sensitivity.nan_to_num(0, 0).max())
