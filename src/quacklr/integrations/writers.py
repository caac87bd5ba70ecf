"""Write the statistics of a LogitMonitor to TensorBoard or Weights & Biases, under names that group well:

    logits_max/model.layers.3.self_attn                   one number per attention, over its heads
    logits_max_by_head/model.layers.3.self_attn/head_2    with heads=True also one per head

Under torch.distributed, measure on every rank, and write on the rank that has the writer. Numbers that are not finite,
such as the first `mean_change`, are not written.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from statistics import fmean
from typing import TYPE_CHECKING, Any

from quacklr.attention.monitor import LogitStats

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

Heads = Sequence[float | None]
Tables = Mapping[str, Mapping[str, Heads]]
"""By statistic, then by attention: a number for each head, None if it is not finite."""
STATISTICS = tuple(field.name for field in fields(LogitStats))


def to_tensorboard(writer: SummaryWriter, stats: Mapping[str, LogitStats], step: int, heads: bool = False) -> None:
    """Write the result of `monitor.measure()` as scalars: the maximum of `max` over heads, the mean of the others.

    With `heads` also write one scalar per head; `charts` puts those of one attention into one chart.
    """
    for name, value in scalars(tables(stats), heads):
        writer.add_scalar(name, value, step)


def to_wandb(run: Any, stats: Mapping[str, LogitStats], step: int, heads: bool = False) -> None:
    """The same for a run of wandb, or the module wandb itself, in one call of `log`.

    `step` must be that of your other calls of `log`: wandb ignores earlier steps. For one chart of all heads of an
    attention, make a line plot with the regular expression `logits_max_by_head/model.layers.3.self_attn/.*`.
    """
    run.log(dict(scalars(tables(stats), heads)), step=step)


def charts(stats: Mapping[str, LogitStats]) -> dict[str, dict[str, tuple[str, list[str]]]]:
    """A layout for TensorBoard's tab Custom Scalars: one chart per attention, with a line per head of `heads=True`.

    Call `writer.add_custom_scalars(charts(stats))` once: a writer has one layout, the last one. A tag belongs to a
    chart if the chart's regular expression matches its beginning.
    """
    return {
        f"logits {statistic}": {
            name or "model": ("Multiline", [re.escape(_head(statistic, name, ""))]) for name in stats
        }
        for statistic in STATISTICS
    }


def tables(stats: Mapping[str, LogitStats]) -> dict[str, dict[str, list[float | None]]]:
    """All statistics as Python numbers."""
    return {
        statistic: {
            name: [value if math.isfinite(value) else None for value in getattr(each, statistic).tolist()]
            for name, each in stats.items()
        }
        for statistic in STATISTICS
    }


def scalars(numbers: Tables, heads: bool = False) -> Iterator[tuple[str, float]]:
    """A name and a number for each attention, over the heads with a number; with `heads` also for each such head."""
    for statistic, attentions in numbers.items():
        for attention, values in attentions.items():
            finite = {head: value for head, value in enumerate(values) if value is not None}
            if finite:
                combine = max if statistic == "max" else fmean
                yield f"logits_{statistic}/{attention or 'model'}", combine(finite.values())
            if heads:
                yield from ((_head(statistic, attention, head), value) for head, value in finite.items())


def _head(statistic: str, attention: str, head: int | str) -> str:
    return f"logits_{statistic}_by_head/{attention or 'model'}/head_{head}"
