"""The ablation of the paper: all query and key weights have the rate tau, whatever their partners are."""

from __future__ import annotations

from torch import Tensor

from quacklr.core.rule import Rule, Step, validate_number


class ConstantTau(Rule):
    """rate = tau. It can be set during training, for a schedule."""

    linear = True

    def __init__(self, tau: float = 0.1) -> None:
        self.tau = tau

    @property
    def tau(self) -> float:
        """The rate of all weights on paths, relative to lr."""
        return self._tau

    @tau.setter
    def tau(self, tau: float) -> None:
        validate_number("tau", tau, "the rate relative to lr")
        self._tau = tau

    def after(self, step: Step) -> Tensor:  # noqa: ARG002
        """tau for all blocks."""
        return self.rates.fill_(self.tau)

    def next_rates(self) -> Tensor:
        """tau for all blocks."""
        return self.rates.new_full(self.rates.shape, self.tau)

    def __repr__(self) -> str:
        return f"ConstantTau({self.tau:g})"
