"""What a run measures beside its loss: the attention logits on the probe, and the weights that make them.

Shapes: B block of a weight (a head, a group of heads, or all of them).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from quacklr import LogitMonitor, LogitStats
from quacklr.distributed.collectives import gathered
from quacklr.integrations.writers import STATISTICS, Heads
from quacklr.lab.methods import Attached, rates
from quacklr.lab.model import Decoder
from quacklr.util.modules import undisturbed

Table = list[list[float | None]]  # layers x heads


def logit_row(before: dict[str, LogitStats], after: dict[str, LogitStats] | None) -> dict[str, Table]:
    """The logits around one step, layer by layer, head by head.

    `change` is since the measurement before this one, `step_change` is what this step did, and the others are after
    it. Without a step, as at the start, `step_change` is missing.
    """
    now = (after or before).values()
    row = {name: table([getattr(stats, name) for stats in now]) for name in STATISTICS if name != "mean_change"}
    row["change"] = table([stats.mean_change for stats in before.values()])
    if after:
        row["step_change"] = table([stats.mean_change for stats in after.values()])
    return row


def weight_row(model: Decoder, attached: Attached | None) -> dict[str, dict[str, Table]]:
    """Frobenius norms of the weights that make queries and keys, and their learning rates relative to the base rate."""
    norms: dict[str, list[Tensor]] = {}
    rated: dict[str, list[Tensor]] = {}
    by_name = rates(attached)
    with (
        undisturbed(model),
        gathered(model),
    ):  # a weight that is reparametrised moves on when it is read in training mode
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
    """Numbers for a file: six digits, and null for what is not a finite number."""
    return [[number(value) for value in row.tolist()] for row in rows]


def number(value: float) -> float | None:
    """Six digits of a number, or None if it is not finite."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def by_layer(row: Mapping[str, Any]) -> dict[str, dict[str, Heads]]:
    """The logits of a row by statistic and layer, as writers and heatmaps want them; nothing if none were measured."""
    return {
        name: {f"layers.{layer}": heads for layer, heads in enumerate(layers)}
        for name, layers in row.get("logits", {}).items()
    }


def largest(logits: dict[str, Any]) -> float | None:
    """The largest logit of all layers and heads."""
    return max((value for row in logits["max"] for value in row if value is not None), default=None)


class LogitProbe:
    """The logit statistics of a run: a monitor, and the step at which it last kept the logits."""

    def __init__(self, model: Decoder, tokens_BT: Tensor) -> None:
        self.monitor = LogitMonitor(model, tokens_BT)
        self.kept_at = 0
        self._before: dict[str, LogitStats] = {}

    def before_step(self, step: int) -> dict[str, Table]:
        """Measure the weights that have taken `step` steps."""
        self._since = step - self.kept_at
        self._before = self.monitor.measure()
        self.kept_at = step
        return logit_row(self._before, None)

    def after_step(self) -> dict[str, Any]:
        """Measure again, one step later."""
        return {"logits": logit_row(self._before, self.monitor.measure(keep=False)), "change_steps": self._since}

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"monitor": self.monitor.state_dict(), "kept_at": self.kept_at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.monitor.load_state_dict(state["monitor"])
        self.kept_at = state["kept_at"]
