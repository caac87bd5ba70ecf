"""Write the statistics of a LogitMonitor, or the changes of a QuacK, to TensorBoard or Weights & Biases.

    logits_max/model.layers.3.self_attn                   the maximum over heads; of other statistics, the mean
    change_asked/model.layers.3.self_attn                 the maximum over heads; also change_given
    logits_max_by_head/model.layers.3.self_attn/head_2    with heads=True also one number per head

Under torch.distributed, measure on every rank, and write on the rank that has the writer. Numbers that are not finite,
such as the first `mean_change`, are not written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from quacklr.attention.monitor import LogitStats
from quacklr.core.sensitivity import HeadChange

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

STATISTICS = tuple(field.name for field in fields(LogitStats))
Watched = Mapping[str, LogitStats] | Mapping[str, HeadChange]


def to_tensorboard(writer: SummaryWriter, watched: Watched, step: int, heads: bool = False) -> None:
    """Write the result of `monitor.measure()` or of `quack.changes()` as scalars."""
    for name, value in _scalars(watched, heads):
        writer.add_scalar(name, value, step)


def to_wandb(run: Any, watched: Watched, step: int, heads: bool = False) -> None:
    """The same for a run of wandb, or the module wandb itself. `step` must not be less than that of earlier logs."""
    run.log(dict(_scalars(watched, heads)), step=step)


def _scalars(watched: Watched, heads: bool) -> Iterator[tuple[str, float]]:
    for attention, each in watched.items():
        name = attention or "model"
        kind, names = ("change", each._fields) if isinstance(each, HeadChange) else ("logits", STATISTICS)
        for statistic in names:
            values = getattr(each, statistic)
            finite = values[values.isfinite()]
            if len(finite):
                of_heads = finite.max() if kind == "change" or statistic == "max" else finite.mean()
                yield f"{kind}_{statistic}/{name}", float(of_heads)
            for head in values.isfinite().nonzero().flatten().tolist() if heads else ():
                yield f"{kind}_{statistic}_by_head/{name}/head_{head}", float(values[head])
