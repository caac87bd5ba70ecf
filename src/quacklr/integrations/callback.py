"""The common part of the callbacks: attach QuacK when training begins, restore its state, detach it at the end."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from quacklr.core.norms import Norm, frobenius
from quacklr.core.path import LogitPath
from quacklr.core.validate import validate_budget, validate_settings
from quacklr.quack import QuacK

NO_STATE = (
    "the checkpoint holds no state of QuacK, so all rates start again from tau, relative to the weights in it; to "
    "continue a run exactly, resume from a checkpoint written with this callback, the optimizer's state included"
)


class CallbackBase:
    """The settings of a QuacK that is attached later, and the QuacK once it is attached.

    `paths` is a function of the model that returns the paths to control; the default is to let QuacK find them.
    `lambda model: logit_paths(model, batch)` measures them. `quack` is the attached QuacK. After training its hooks
    are removed, and its rates can still be read.
    """

    quack: QuacK | None = None

    def __init__(
        self,
        tau: float = 1.0,
        *,
        norm: Norm = frobenius,
        adapt: bool = True,
        floor: float = 0.0,
        budget: float | None = None,
        verify: bool = True,
        paths: Callable[[nn.Module], Iterable[LogitPath]] | None = None,
    ) -> None:
        validate_settings(tau, norm, floor)
        if budget is not None:
            validate_budget(budget, tau, norm, adapt, floor)
        self._settings: dict[str, Any] = {"tau": tau, "norm": norm, "adapt": adapt, "floor": floor}
        self._settings |= {"budget": budget, "verify": verify}
        self._paths = paths

    def _attach(
        self,
        model: nn.Module,
        optimizer: Optimizer | Iterable[Optimizer],
        state: Mapping[str, Any] | None,
        resumed: bool,
    ) -> QuacK:
        self._detach()  # if an earlier training raised an exception, its QuacK is still attached
        if resumed and state is None and self._settings["budget"] is None:
            warnings.warn(NO_STATE, stacklevel=3)
        quack = QuacK(self._paths(model) if self._paths else model, optimizer, **self._settings)
        quack._not_loaded = ""  # NO_STATE is the warning of the callbacks
        if state is not None:
            try:
                quack.load_state_dict(state)
            except BaseException:
                quack.remove()
                raise
        self.quack = quack
        return quack

    def _detach(self) -> None:
        if self.quack is not None:
            self.quack.remove()
