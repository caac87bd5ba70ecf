"""Measurements besides the loss: attention logits on the probe batch, and norms and rates of query and key weights."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

from torch import Tensor, nn

from quacklr import LogitMonitor, LogitStats
from quacklr.lab.methods import Attached, rates
from quacklr.lab.model import Decoder
from quacklr.lab.train.rows import Table
from quacklr.sharded.collectives import fully_sharded, resharded
from quacklr.util.modules import undisturbed

STATISTICS = [field.name for field in fields(LogitStats) if field.name != "mean_change"]


def logit_row(before: dict[str, LogitStats], after: dict[str, LogitStats] | None) -> dict[str, Table]:
    """Logit statistics around one step, as tables of layers x heads.

    `step_change` is the change in this step, `change` the change since the previous measurement, and the others are
    measured after the step. At the start of a run, `after` is None and there is no `step_change`.
    """
    now = (after or before).values()
    row = {name: table([getattr(stats, name) for stats in now]) for name in STATISTICS}
    row["change"] = table([stats.mean_change for stats in before.values()])
    if after:
        row["step_change"] = table([stats.mean_change for stats in after.values()])
    return row


def weight_row(model: Decoder, attached: Attached | None) -> dict[str, dict[str, Table]]:
    """Frobenius norms of query and key weights by block, and their learning rates relative to the base rate."""
    norms: dict[str, list[Tensor]] = {}
    rated: dict[str, list[Tensor]] = {}
    by_name = rates(attached)
    with undisturbed(model), resharded(model):  # in eval mode: in training mode, reading updates Sigma-Reparam's state
        for module in fully_sharded(model):
            module.unshard()
        for name, attention in model.attentions().items():
            matrices = attention.matrices()
            for role in attention.logit_roles:
                linear, blocks = matrices[role]
                norms.setdefault(role, []).append(linear.weight.float().view(blocks, -1).norm(dim=1))
                if f"{name}.{role}" in by_name:
                    rated.setdefault(role, []).append(by_name[f"{name}.{role}"])
    found = {"norm": {role: table(each) for role, each in norms.items()}}
    return found | ({"rate": {role: table(each) for role, each in rated.items()}} if rated else {})


def table(rows: list[Tensor]) -> Table:
    """Tensors as lists of numbers with six digits; None for numbers that are not finite."""
    return [[rounded(value) for value in row.tolist()] for row in rows]


def rounded(value: float) -> float | None:
    """A number with six significant digits, or None if it is not finite."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def max_logit(logits: dict[str, Any]) -> float | None:
    """Maximum logit over all layers and heads; None if no logit is finite."""
    return max((value for row in logits["max"] for value in row if value is not None), default=None)


class LogitProbe:
    """A LogitMonitor, and the step at which it last stored the logits."""

    def __init__(self, model: nn.Module, tokens_BT: Tensor) -> None:
        self.monitor = LogitMonitor(model, tokens_BT)
        self.kept_at = 0
        self._before: dict[str, LogitStats] = {}

    def before_step(self, step: int) -> dict[str, Table]:
        """Measure, and store the logits, after `step` steps."""
        self._since = step - self.kept_at
        self._before = self.monitor.measure()
        self.kept_at = step
        return logit_row(self._before, None)

    def after_step(self) -> dict[str, Any]:
        """Measure again after the next step, without storing the logits."""
        return {"logits": logit_row(self._before, self.monitor.measure(keep=False)), "change_steps": self._since}

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint."""
        return {"monitor": self.monitor.state_dict(), "kept_at": self.kept_at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict()`."""
        self.monitor.load_state_dict(state["monitor"])
        self.kept_at = state["kept_at"]
