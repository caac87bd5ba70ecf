"""Monitor attention logits: how large they are, how much they changed, and how the softmax distributes attention.

The mean absolute change is what the paper's method controls; the maximum is what is usually plotted. Both are measured
on a probe, a fixed batch, so that only the weights can have changed them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader

from quacklr.attention.accumulator import StatsAccumulator
from quacklr.attention.interceptor import SUPPORTED, AttentionInterceptor
from quacklr.attention.logits import HeadAxes, Logits, head_axes
from quacklr.find.discover import found_by_table
from quacklr.find.tables.facts import int_attributes
from quacklr.find.tables.naming import HEADS
from quacklr.sharded.collectives import (
    all_ranks_agree,
    all_reduce,
    groups_of,
    resharded,
    validate_no_tensor_parallel,
    warn_if_alone,
)
from quacklr.util.module_stack import module_stack
from quacklr.util.modules import named_modules, run, run_uncompiled, undisturbed, unwrapped
from quacklr.util.torch_functions import tensors_in

NO_PROBE = (
    "a probe is a batch that the model is called with, a tensor, a tuple of arguments or a dict of named ones, not "
)
UNKNOWN = (
    "{}: it cannot be seen which of its logits belong to which head{}. Give the heads an axis of their own, (batch, "
    "heads, queries, keys), and the module their number as an attribute, num_heads; or give a probe of one sequence, "
    "or of another length"
)
APART = ", and the sequences of the probe, run one by one, do not have the logits that they have together"
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

    A measurement does not change the model: mode, gradients, buffers, attributes, random state stay. A monitored run is
    bitwise equal to one without a monitor. Compiled code runs uncompiled. Between calls the monitor keeps the logits
    of the probe, or of evenly spaced queries of a large probe: at most a million numbers a module, in float32. A
    measurement costs about a forward pass of the probe with eager attention. Under DistributedDataParallel or FSDP2
    every rank must call it, with a probe of its own or the same; all get the statistics over all ranks. If a module
    has several attentions, the later ones have names with #2, #3, ...
    """

    def __init__(self, model: nn.Module, probe: Any) -> None:
        if probe is None or isinstance(probe, str | DataLoader):
            raise ValueError(NO_PROBE + type(probe).__name__)
        validate_no_tensor_parallel(model, "LogitMonitor")
        self.model, self.probe = model, probe
        self._heads = heads_of(model)
        self._last: dict[str, Tensor] = {}

    def measure(self, keep: bool = True) -> dict[str, LogitStats]:
        """Run the probe. With `keep=False`, the next call still measures changes since the call before this one."""
        found = self._run([self.probe])
        if not all(part.heads_known for (part,) in found.values()):
            whole, found = found, self._run(sequences_of(self.probe), one_sequence=True)
            validate_apart(found, whole)
        if keep:
            self._last = {name: torch.cat([part.kept_BHIJ for part in parts]) for name, parts in found.items()}
        return self._reduced(found)

    def _run(self, batches: Sequence[Any], one_sequence: bool = False) -> dict[str, list[StatsAccumulator]]:
        """Run batches one after the other; for each attention, the sums of each batch."""
        found: dict[str, list[StatsAccumulator]] = {}
        calls: dict[str, int] = {}  # of each module, in one batch
        model = unwrapped(self.model)

        def on_logits(logits: Logits) -> None:
            name = running.modules[-1]
            calls[name] = calls.get(name, 0) + 1
            name = f"{name}#{calls[name]}" if calls[name] > 1 else name
            parts = found.setdefault(name, [])
            before = self._last[name].tensor_split(len(batches))[len(parts)] if name in self._last else None
            parts.append(StatsAccumulator(logits, before, len(batches)))

        def axes_of(lead: tuple[int, ...]) -> HeadAxes:
            heads = [self._heads[name] for name in running.modules if name in self._heads]
            return head_axes(lead, heads[-1] if heads else None, one_sequence)

        for batch in batches:
            calls.clear()
            interceptor = AttentionInterceptor(on_logits, axes_of)
            with undisturbed(model), resharded(model), module_stack(model) as running, run_uncompiled(), interceptor:
                run(model, batch)
        self._validate_found(found)
        return found

    def _validate_found(self, found: Mapping[str, list[StatsAccumulator]]) -> None:
        """Raise ValueError if no attention was found, or if the ranks differ."""
        groups = groups_of(self.model)
        count = len(sequences_of(self.probe))  # if they run one by one, all ranks must have as many
        shapes = [(name, each[0].max_BH.shape[1], each[0].heads_known or count) for name, each in found.items()]
        if groups and not all_ranks_agree(shapes, groups, next(self.model.parameters()).device):
            raise ValueError(f"{DIFFERENT} This one ran {', '.join(found) or 'none'}")
        if not found:
            name = type(unwrapped(self.model)).__name__
            raise ValueError(f"no attention was seen in a forward of {name}: {SUPPORTED}")

    def _reduced(self, found: Mapping[str, list[StatsAccumulator]]) -> dict[str, LogitStats]:
        """The statistics of each attention, over all sequences and ranks."""
        groups = groups_of(self.model)
        warn_if_alone(groups, "LogitMonitor")
        maxima = [torch.cat([part.max_BH for part in parts]).amax(0) for parts in found.values()]
        sums = [torch.stack([part.sums for part in parts]).sum(0) for parts in found.values()]
        maxima, sums = all_reduce(maxima, groups, "MAX"), all_reduce(sums, groups, "SUM")
        means = [totals / counts for totals, counts in (each.chunk(2) for each in sums)]
        return {name: LogitStats(max_H, *of) for name, max_H, of in zip(found, maxima, means, strict=True)}

    def state_dict(self) -> dict[str, Tensor]:
        """The kept logits, so that a resumed run measures its first change from the last kept measurement."""
        return dict(self._last)

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Load a `state_dict()`."""
        device = next(self.model.parameters()).device
        self._last = {name: kept.to(device) for name, kept in state_dict.items()}


def heads_of(model: nn.Module) -> dict[str, int]:
    """The number of heads of each attention module, if a table has it, or an attribute of the module."""
    found = {name: int_attributes(module, HEADS) for name, module in named_modules(model)}
    attributes = {name: counts[0] for name, counts in found.items() if counts}
    return attributes | {name: found.paths[0].heads for name, found in found_by_table(model).items() if found.paths}


def sequences_of(probe: Any) -> list[Any]:
    """The probe as batches of one sequence: the tensors whose first axis is as long as that of the first are cut."""
    probe = dict(probe) if isinstance(probe, Mapping) else probe
    count = next((len(tensor) for tensor in tensors_in(probe) if tensor.ndim), 1)

    def part(number: int, tensor: Tensor) -> Tensor:
        return tensor[number : number + 1] if tensor.ndim and len(tensor) == count else tensor

    return [tree_map_only(Tensor, partial(part, number), probe) for number in range(count)]


def validate_apart(found: Mapping[str, list[StatsAccumulator]], whole: Mapping[str, list[StatsAccumulator]]) -> None:
    """Raise ValueError if heads are still not known, or if the sequences do not have the logits of the whole batch.

    The entries of the leading axes must have the same largest logits, in any order and up to rounding.
    """
    for name in {**whole, **found}:
        parts = found.get(name, [])
        if not all(part.heads_known for part in parts):
            raise ValueError(UNKNOWN.format(name or "the model", ""))
        same = name in whole and len({part.kept_BHIJ.shape for part in parts}) == 1
        if same:
            each = (torch.cat([part.max_BH.flatten() for part in of]) for of in (parts, whole[name]))
            apart, together = (maxima.sort().values for maxima in each)
            tolerance = parts[0].rounding * float(together.nan_to_num(0, 0, 0).abs().max())
            same = apart.shape == together.shape and torch.allclose(apart, together, 0, tolerance, equal_nan=True)
        if not same:
            raise ValueError(UNKNOWN.format(name or "the model", APART))
