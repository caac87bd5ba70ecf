"""Monitor attention logits: how large they are, how much they changed, and how the softmax distributes attention.

The mean absolute change is what the paper's method controls; the maximum is what is usually plotted. Both are measured
on a probe, a fixed batch, so that only the weights can have changed them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader

from quacklr.attention.accumulator import StatsAccumulator
from quacklr.attention.capture import capture_logits
from quacklr.attention.head_order import HeadOrders
from quacklr.attention.interceptor import SUPPORTED
from quacklr.attention.logits import Logits
from quacklr.find.discover import found_by_rule
from quacklr.sharded.collectives import (
    Groups,
    all_ranks_agree,
    all_reduce_max,
    all_reduce_sum,
    groups_of,
    resharded,
)
from quacklr.sharded.validate import validate_no_tensor_parallel
from quacklr.util.modules import named_modules, run, undisturbed, unwrapped

HEAD_COUNTS = ("heads", "n_head", "n_heads", "num_heads", "num_attention_heads")
DIFFERENT = "the ranks ran different attentions, so their statistics cannot be combined; give all the same probe."


@dataclass(frozen=True, slots=True, eq=False)
class LogitStats:
    """Statistics of one attention's logits on the probe, each (heads,) in float32. Masked logits do not count.

    `max`: the largest logit. `mean_change`: mean |change| since the last kept measurement; NaN at the first.
    `entropy`: of the softmax, in nats; mean over queries that see at least one key. `sink`: the share of attention of
    the first key, and of a learned sink if the model has one; mean over queries that see at least two keys.
    """

    max: Tensor
    mean_change: Tensor
    entropy: Tensor
    sink: Tensor


class LogitMonitor:
    """Statistics of all attention logits of a model on a probe, by the name of the attention module.

        monitor = LogitMonitor(model, probe)     # probe: a batch for the model: a tensor, a tuple, or a dict
        monitor.measure()["layers.3.attn"].max   # (heads,)

    A measurement does not change the model: its mode, gradients, buffers and random state stay, so a monitored run is
    bitwise equal to one without a monitor. Compiled code runs uncompiled. Between calls the monitor keeps the logits
    of the probe, or of evenly spaced queries of a large probe: at most a million numbers a module, in float32. A
    measurement costs about a forward pass of the probe with eager attention. Under DistributedDataParallel or FSDP2
    every rank must call it, with a probe of its own or the same; all get the statistics over all ranks. If a module
    has several attentions, the later ones have names with #2, #3, ...
    """

    def __init__(self, model: nn.Module, probe: Any) -> None:
        if probe is None or isinstance(probe, str | DataLoader):
            raise ValueError(
                "a probe is a batch that the model is called with, a tensor, a tuple of arguments or a dict of named "
                f"ones, not {type(probe).__name__}"
            )
        validate_no_tensor_parallel(model, "LogitMonitor")
        self.model, self.probe = model, probe
        self._heads, self._orders = heads_of(model), HeadOrders()
        self._last: dict[str, Tensor] = {}

    def measure(self, keep: bool = True) -> dict[str, LogitStats]:
        """Run the probe. With `keep=False`, the next call still measures changes since the call before this one."""
        found: dict[str, StatsAccumulator] = {}

        def on_logits(name: str, logits: Logits) -> None:
            earlier = sum(other.partition("#")[0] == name for other in found)
            name = f"{name}#{earlier + 1}" if earlier else name
            found[name] = StatsAccumulator(logits, self._last.get(name))

        model = unwrapped(self.model)
        capturing = capture_logits(model, on_logits, self._heads, self._orders)
        with undisturbed(model), resharded(model), capturing:
            run(model, self.probe)
        groups = groups_of(self.model)
        shapes = [(name, len(stats.max_H)) for name, stats in found.items()]
        if groups and not all_ranks_agree(shapes, groups, next(model.parameters()).device):
            raise ValueError(f"{DIFFERENT} This one ran {', '.join(found) or 'none'}")
        if not found:
            raise ValueError(f"no attention was seen in a forward of {type(model).__name__}: {SUPPORTED}")
        if keep:
            self._last = {name: stats.kept_BHIJ for name, stats in found.items()}
        return dict(zip(found, reduced(list(found.values()), groups), strict=True))

    def state_dict(self) -> dict[str, Tensor]:
        """The kept logits, so that a resumed run measures its first change from the last kept measurement."""
        return dict(self._last)

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Load a `state_dict()`."""
        device = next(self.model.parameters()).device
        self._last = {name: kept.to(device) for name, kept in state_dict.items()}


def heads_of(model: nn.Module) -> dict[str, int]:
    """The number of heads of each attention module, if a rule finds it, or an attribute of the module has it."""
    attributes = {
        name: value
        for name, module in named_modules(model)
        for value in (getattr(module, attribute, None) for attribute in HEAD_COUNTS)
        if isinstance(value, int)
    }
    return attributes | {name: found.paths[0].heads for name, found in found_by_rule(model).items() if found.paths}


def reduced(found: list[StatsAccumulator], groups: Groups) -> list[LogitStats]:
    """The statistics of each attention, over all ranks."""
    maxima = all_reduce_max([stats.max_H for stats in found], groups)
    sums = all_reduce_sum([stats.sums() for stats in found], groups)
    return [
        LogitStats(max_H, change_H / compared_H, entropy_H / see_one_H, sink_H / see_two_H)
        for max_H, (change_H, compared_H, entropy_H, see_one_H, sink_H, see_two_H) in zip(maxima, sums, strict=True)
    ]
