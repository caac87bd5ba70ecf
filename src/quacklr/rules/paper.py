"""The rule of the paper, its Algorithms 1 and 2: rates go with 1 / sensitivity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from quacklr.core.blocks import Copies
from quacklr.core.norms import Norm, frobenius
from quacklr.core.rule import Rule, Step
from quacklr.core.sensitivity import CompiledPaths
from quacklr.core.state import norm_name, read_state, write_state
from quacklr.core.stepped import Stepped, has_stepped
from quacklr.core.validate import FLOAT32, validate_norm, validate_norms, validate_number
from quacklr.util.caller import warn

RESUMED_ALONE = (
    "the optimizer's state was loaded but QuacK's was not, so all rates start again from tau; "
    "call quack.load_state_dict(...) too when you resume a run"
)
ATTACHED_LATE = (
    "the optimizer had stepped before QuacK was attached, so rates are relative to the weights at that time. This is "
    "right if QuacK is new in this run; to resume a run with QuacK, call quack.load_state_dict(...) before the next "
    "step"
)


class Paper(Rule):
    """rate = tau * (sensitivity at the start) / (sensitivity now), with the sensitivities of the weights before a step.

    Args:
        tau: the rate at the start, relative to the optimizer's lr. It can be set during training, for a schedule.
        norm: the norm of a block of weights: `quacklr.frobenius`, `quacklr.spectral`, or a function of the same form.
        floor: a lower bound on all norms, for weights that are all zeros at the start.

    All steps of an iteration use the rates that were computed before its first step.
    """

    linear = True
    has_state = True

    def __init__(self, tau: float = 1.0, *, norm: Norm = frobenius, floor: float = 0.0) -> None:
        validate_norm(norm)
        validate_number("floor", floor, "the least norm of a block", zero=True)
        self._norm, self._floor = norm, floor
        self._start, self._largest = torch.zeros(0), 0.0
        self._warning, self._loaded = "", False
        self._known: dict[str, Tensor] = {}  # sensitivities at the start, by weight; also of weights on no path yet
        self.tau = tau

    @property
    def norm(self) -> Norm:
        """The norm of a block. It cannot be set later: rates are relative to the sensitivities at the start."""
        return self._norm

    @property
    def floor(self) -> float:
        """The lower bound on all norms. It cannot be set later."""
        return self._floor

    @property
    def tau(self) -> float:
        """The rate at the start, relative to lr."""
        return self._tau

    @tau.setter
    def tau(self, tau: float) -> None:
        validate_number("tau", tau, "the rate relative to lr")
        if tau * self._largest > FLOAT32.max:
            raise ValueError(f"tau={tau!r}: with these weights, tau * sensitivity is more than float32 can hold")
        self._tau, self._target = tau, tau * self._start

    def start(self, paths: CompiledPaths, optimizers: Sequence[Optimizer], in_groups: Stepped) -> None:
        """Measure the sensitivities that all later rates are relative to. Known weights keep theirs."""
        again = hasattr(self, "paths")
        stepped = self.stepped if again else set()
        super().start(paths, optimizers, in_groups)
        self.stepped = stepped
        _, norms = self._measure()
        sensitivity = paths.sensitivity(norms)
        validate_norms(paths, torch.cat(norms), sensitivity)
        for weight, index in paths.blocks.flat_index.items():
            if weight.name in self._known:
                sensitivity[index] = self._known[weight.name].to(sensitivity)
        self._set_start(sensitivity)
        self.rates.fill_(self.tau)
        if not again and in_groups.is_plain and any(has_stepped(optimizer) for optimizer in optimizers):
            self._warning = ATTACHED_LATE

    def _set_start(self, sensitivity: Tensor) -> None:
        self._start = sensitivity
        now = {weight.name: sensitivity[index] for weight, index in self.paths.blocks.flat_index.items()}
        self._known = {**self._known, **now}  # a new dict: copies of a rule share the old one
        self._largest = float(sensitivity.nan_to_num(0, 0).max())
        self.tau = self._tau  # sets the target too

    def _measure(self) -> tuple[Copies, list[Tensor]]:
        copies, norms = self.paths.blocks.measure(self.norm)
        return copies, [norm.clamp(min=self.floor) for norm in norms] if self.floor else norms

    def _rates(self, norms: list[Tensor], out: Tensor | None = None) -> Tensor:
        """Never NaN or inf: if a partner is exactly zero, the block moves no logit and its rate is tau."""
        now = self.paths.sensitivity(norms)
        return torch.div(self._target, now, out=out).nan_to_num_(nan=self.tau, posinf=self.tau)

    def before(self, step: Step) -> Copies:
        """Compute the rates, if an iteration begins. Norms are computed from the copies of the rows."""
        if self._warning:
            warn(self._warning)
        self._warning, self._loaded = "", False
        if not step.begins:
            return self.paths.blocks.copy(step.tensors)
        copies, norms = self._measure()
        self._rates(norms, out=self.rates)
        return copies

    def after(self, step: Step) -> Tensor:  # noqa: ARG002
        """The rates that were computed before the step."""
        return self.rates

    def next_rates(self) -> Tensor:
        """The rates of the next step. Collective for sharded weights."""
        return self._rates(self._measure()[1])

    def optimizer_loaded(self, optimizer: Optimizer) -> None:
        """Warn at the next step if the optimizer's state was loaded without QuacK's."""
        if optimizer.state and not self._loaded:
            self._warning = RESUMED_ALONE

    def start_is_known(self) -> None:
        """Do not warn that the optimizer has stepped before."""
        self._warning = ""

    def state_dict(self) -> dict[str, Any]:
        """The sensitivities at the start, the rates, and which parameters have stepped in this iteration."""
        return super().state_dict() | write_state(self.paths, self.norm, self._start, self.rates, self.stepped)

    def load_state_dict(self, state_dict: Mapping[str, Any], partial: bool = False) -> None:
        """Load a state; ValueError if it is of another model or norm. Sensitivities of unknown weights are kept."""
        start, rates, self.stepped = read_state(self.paths, self.norm, state_dict, partial)
        self._known = dict(state_dict["sensitivity"])
        self._set_start(start)
        self.rates.copy_(rates)
        self._warning, self._loaded = "", True

    def __repr__(self) -> str:
        norm = "" if self.norm is frobenius else f", norm={norm_name(self.norm)}"
        floor = f", floor={self.floor:g}" if self.floor else ""
        return f"Paper(tau={self.tau:g}{norm}{floor})"
