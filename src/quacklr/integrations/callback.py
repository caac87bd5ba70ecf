"""The common part of the callbacks: attach QuacK when training begins, restore its state, detach it at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import copy
from typing import Any

import torch
from torch import nn

from quacklr.core.path import LogitPath
from quacklr.core.rule import Rule
from quacklr.quack import QuacK, chosen_rule
from quacklr.util.caller import warn


class CallbackBase:
    """The settings of a QuacK that is attached later, and the QuacK once it is attached.

    `paths` is a function of the model that returns the paths to control; the default is to let QuacK find them.
    After training the hooks of `quack` are removed, and its rates can still be read.
    """

    quack: QuacK | None = None

    def __init__(
        self,
        tau: float | None = None,
        *,
        rule: Rule | None = None,
        verify: bool = True,
        paths: Callable[[nn.Module], Iterable[LogitPath]] | None = None,
    ) -> None:
        self._rule, self._verify, self._paths = chosen_rule(tau, rule), verify, paths

    def _attach(self, model: nn.Module, optimizer: Any, state: Mapping[str, Any] | None, resumed: bool) -> QuacK:
        self._detach()  # if an earlier training raised an exception, its QuacK is still attached
        if resumed and state is None and self._rule.has_state:
            warn(
                "the checkpoint holds no state of QuacK, so all rates start again from tau, relative to the weights in "
                "it; to continue a run exactly, resume from a checkpoint written with this callback, the optimizer's "
                "state included"
            )
        given = self._paths(model) if self._paths else model
        quack = QuacK(given, optimizer, rule=copy(self._rule), verify=self._verify)
        quack.rule.start_is_known()
        if state is not None:
            try:
                quack.load_state_dict(state)
            except BaseException:
                quack.remove()
                raise
        self.quack = quack
        return quack

    def _changes(self) -> dict[str, float]:
        """By attention, the largest change of logits that the last step asked for, in nats; {} if not measured."""
        changes = self.quack.changes() if self.quack is not None and self.quack.rule.measures else {}
        asked = {name: change.asked.max() for name, change in changes.items()}
        return dict(zip(asked, torch.stack(list(asked.values())).tolist() if asked else (), strict=True))

    def _detach(self) -> None:
        if self.quack is not None:
            self.quack.remove()
