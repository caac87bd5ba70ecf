"""The monitor's numbers in TensorBoard or Weights & Biases, under names that group well:

    logits_max/model.layers.3.self_attn                   one number an attention, over its heads
    logits_max_by_head/model.layers.3.self_attn/head_2    with heads=True also one a head

Both write wherever they are called: under torch.distributed measure on every rank, and write on the one that has the
writer. A number that is not finite, such as the first `mean_change`, is not written.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from statistics import fmean
from typing import TYPE_CHECKING, Any

from quacklr.logits.monitor import LogitStats

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

Heads = Sequence[float | None]
Tables = Mapping[str, Mapping[str, Heads]]
"""By statistic, then by attention: a number for each head, None where there is no finite one."""
STATISTICS = tuple(field.name for field in fields(LogitStats))


def to_tensorboard(writer: SummaryWriter, stats: Mapping[str, LogitStats], step: int, heads: bool = False) -> None:
    """Write what `monitor.measure()` returned as scalars: the largest `max` of an attention, and means of the rest.

    With `heads` every head has a scalar of its own too; `charts` puts those of one attention into one chart.
    """
    for name, value in scalars(tables(stats), heads):
        writer.add_scalar(name, value, step)


def to_wandb(run: Any, stats: Mapping[str, LogitStats], step: int, heads: bool = False) -> None:
    """The same for a run of wandb, or the module wandb itself, with all numbers in one `log`.

    `step` is that of your other calls of `log`: wandb never goes back to an earlier one. One chart for all heads of an
    attention is a line plot with the regular expression `logits_max_by_head/model.layers.3.self_attn/.*`.
    """
    run.log(dict(scalars(tables(stats), heads)), step=step)


def charts(stats: Mapping[str, LogitStats]) -> dict[str, dict[str, tuple[str, list[str]]]]:
    """TensorBoard's tab Custom Scalars: a chart for each attention, with a line for each head of `heads=True`.

    For `writer.add_custom_scalars(charts(stats))`, once: a writer has one layout, and the last one counts. A tag
    belongs to a chart if it begins with what the chart's regular expression matches.
    """
    return {
        f"logits {statistic}": {
            name or "model": ("Multiline", [re.escape(_head(statistic, name, ""))]) for name in stats
        }
        for statistic in STATISTICS
    }


def tables(stats: Mapping[str, LogitStats]) -> dict[str, dict[str, list[float | None]]]:
    """The numbers of all statistics, on the CPU."""
    return {
        statistic: {
            name: [value if math.isfinite(value) else None for value in getattr(each, statistic).tolist()]
            for name, each in stats.items()
        }
        for statistic in STATISTICS
    }


def scalars(numbers: Tables, heads: bool = False) -> Iterator[tuple[str, float]]:
    """A name and a number for each attention, over the heads that have one; and for each of these heads, if asked."""
    for statistic, attentions in numbers.items():
        for attention, values in attentions.items():
            seen = {head: value for head, value in enumerate(values) if value is not None}
            if seen:
                combine = max if statistic == "max" else fmean
                yield f"logits_{statistic}/{attention or 'model'}", combine(seen.values())
            if heads:
                yield from ((_head(statistic, attention, head), value) for head, value in seen.items())


def _head(statistic: str, attention: str, head: int | str) -> str:
    return f"logits_{statistic}_by_head/{attention or 'model'}/head_{head}"
