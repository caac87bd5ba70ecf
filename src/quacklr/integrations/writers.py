"""Write the statistics of a LogitMonitor to TensorBoard or Weights & Biases.

    logits_max/model.layers.3.self_attn                   the maximum over heads; of other statistics, the mean
    logits_max_by_head/model.layers.3.self_attn/head_2    with heads=True also one number per head

Under torch.distributed, measure on every rank, and write on the rank that has the writer. Numbers that are not finite,
such as the first `mean_change`, are not written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from quacklr.attention.monitor import LogitStats

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


def to_tensorboard(writer: SummaryWriter, stats: Mapping[str, LogitStats], step: int, heads: bool = False) -> None:
    """Write the result of `monitor.measure()` as scalars."""
    for name, value in _scalars(stats, heads):
        writer.add_scalar(name, value, step)


def to_wandb(run: Any, stats: Mapping[str, LogitStats], step: int, heads: bool = False) -> None:
    """The same for a run of wandb, or the module wandb itself. `step` must not be less than that of earlier logs."""
    run.log(dict(_scalars(stats, heads)), step=step)


def _scalars(stats: Mapping[str, LogitStats], heads: bool) -> Iterator[tuple[str, float]]:
    for statistic in (field.name for field in fields(LogitStats)):
        for attention, each in stats.items():
            values = getattr(each, statistic)
            finite, name = values[values.isfinite()], attention or "model"
            if len(finite):
                yield f"logits_{statistic}/{name}", float(finite.max() if statistic == "max" else finite.mean())
            for head in values.isfinite().nonzero().flatten().tolist() if heads else ():
                yield f"logits_{statistic}_by_head/{name}/head_{head}", float(values[head])
