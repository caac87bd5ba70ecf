"""Watch attention logits: how large they are, how far they have moved since the last look, and what is made of them.

The mean absolute change is what the paper's method controls; the maximum is what everybody looks at. All is measured
on a probe, a fixed batch, so that only the weights can have moved it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader

from quacklr.distributed.collectives import (
    Groups,
    all_ranks_agree,
    all_reduce_max,
    all_reduce_sum,
    groups_of,
    resharded,
)
from quacklr.distributed.validate import validate_no_tensor_parallel
from quacklr.find.discover import found_by_rule
from quacklr.logits.accumulator import StatsAccumulator
from quacklr.logits.head_order import HeadOrders
from quacklr.logits.interceptor import SEEN, intercepting
from quacklr.logits.logits import Logits
from quacklr.util.modules import named_modules, own_buffers, run, undisturbed, unwrapped

HEADS = ("heads", "n_head", "n_heads", "num_heads", "num_attention_heads")
DIFFERENT = "the ranks heard different attentions, so their statistics cannot be put together; give all the same probe."


@dataclass(frozen=True, slots=True, eq=False)
class LogitStats:
    """One attention's logits on the probe, each (heads,) in float32; only what a query may look at counts.

    `max`: the largest logit. `mean_change`: mean |change| since the last kept measurement; NaN at the first.
    `entropy`: of what the softmax makes of them, in nats; mean over queries that may look at something. `sink`: the
    share of attention that the first key gets, and a learned sink if the model has one; mean over queries that may
    look at two keys or more.
    """

    max: Tensor
    mean_change: Tensor
    entropy: Tensor
    sink: Tensor


class LogitMonitor:
    """Statistics of all attention logits of a model on a probe, by attention module's name.

        monitor = LogitMonitor(model, probe)     # probe: what the model takes: a tensor, a tuple, or a dict
        monitor.measure()["layers.3.attn"].max   # (heads,)

    The model is left as it was: mode, gradients, buffers and random state, so a watched run is bitwise the unwatched
    one; what was compiled is run as it was written. Between calls it keeps the probe's logits, or of a large probe
    those of evenly spaced queries: at most a million numbers a module, in float32. Costs about a forward of the probe
    with eager attention. Under DistributedDataParallel or FSDP2 every rank must call it, with a probe of its own or the
    same; all get the statistics over all ranks. A module that attends more than once has names with #2, #3, ...
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
        """Run the probe. With `keep=False` the next call's change is still since the call before this one."""
        tallies: dict[str, StatsAccumulator] = {}

        def listen(name: str, logits: Logits) -> None:
            times = sum(seen.partition("#")[0] == name for seen in tallies)
            name = f"{name}#{times + 1}" if times else name
            tallies[name] = StatsAccumulator(logits, self._last.get(name))

        model = unwrapped(self.model)
        watched = intercepting(model, listen, self._heads, self._orders)
        with undisturbed(model), own_buffers(model), resharded(model), watched:
            run(model, self.probe)
        groups = groups_of(self.model)
        heard = [(name, len(tally.largest_H)) for name, tally in tallies.items()]
        if groups and not all_ranks_agree(heard, groups, next(model.parameters()).device):
            raise ValueError(f"{DIFFERENT} This one heard {', '.join(tallies) or 'none'}")
        if not tallies:
            raise ValueError(f"no attention was seen in a forward of {type(model).__name__}: {SEEN}")
        if keep:
            self._last = {name: tally.kept_BHIJ for name, tally in tallies.items()}
        return dict(zip(tallies, stats_of(tallies.values(), groups), strict=True))

    def state_dict(self) -> dict[str, Tensor]:
        """The kept logits, so that a resumed run measures its first change from where it was."""
        return dict(self._last)

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Continue from a `state_dict()`."""
        device = next(self.model.parameters()).device
        self._last = {name: kept.to(device) for name, kept in state_dict.items()}


def heads_of(model: nn.Module) -> dict[str, int]:
    """How many heads each attention module has, if a rule knows it, or the module says it."""
    said = {
        name: value
        for name, module in named_modules(model)
        for value in (getattr(module, word, None) for word in HEADS)
        if isinstance(value, int)
    }
    return said | {name: found.paths[0].heads for name, found in found_by_rule(model).items() if found.paths}


def stats_of(tallies: Iterable[StatsAccumulator], groups: Groups) -> list[LogitStats]:
    """The statistics of each attention, over all ranks."""
    tallies = list(tallies)
    maxima = all_reduce_max([tally.largest_H for tally in tallies], groups)
    sums = all_reduce_sum([tally.sums() for tally in tallies], groups)
    found = []
    for largest_H, (moved_H, compared_H, entropy_H, looking_H, sink_H, choosing_H) in zip(maxima, sums, strict=True):
        found.append(LogitStats(largest_H, moved_H / compared_H, entropy_H / looking_H, sink_H / choosing_H))
    return found
