"""Monitor attention logits: how large they are, how much they changed, and how the softmax distributes attention.

The mean absolute change is what the paper's method controls; the maximum is what is usually plotted. Both are measured
on a probe, a fixed batch, so that only the weights can have changed them. Shapes: B sequence, H head, I query, J key.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader

from quacklr.attention.interceptor import SUPPORTED, AttentionInterceptor
from quacklr.attention.logits import MASKED, HeadAxes, Logits, head_axes
from quacklr.find.discover import found_by_table
from quacklr.find.tables.facts import int_attributes
from quacklr.find.tables.naming import HEADS
from quacklr.sharded import collectives
from quacklr.util.modules import module_stack, named_modules, run, run_uncompiled, undisturbed, unwrapped
from quacklr.util.torch_functions import tensors_in

KEPT = 2**20  # logits of one attention that are kept for the next measurement: 4 MB
NEGLIGIBLE = -1e4  # a logit this far below the largest has probability 0 in float32
NO_PROBE = "a probe is a batch that the model is called with, a tensor, a tuple of arguments or a dict, not a "
UNKNOWN = (
    "{}: it cannot be seen which of its logits belong to which head. Give the heads an axis of their own, (batch, "
    "heads, queries, keys), and the module their number as an attribute, num_heads; or give a probe of one sequence, "
    "or of another length"
)
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


class StatsAccumulator:
    """Sums over the logits of one attention, in one pass over their chunks; and the logits to keep.

    `before_BHIJ`: the logits that the last measurement kept. Without them, or if their shape differs, the change is
    NaN. `parts`: the limit of kept logits is divided by it.
    """

    def __init__(self, logits: Logits, before_BHIJ: Tensor | None, parts: int = 1) -> None:
        batch, heads, queries, self.keys = logits.shape
        device, self.heads_known = logits.source.device, logits.heads_known
        self.rounding = torch.finfo(logits.source.dtype).eps ** 0.5  # relative, of the logits
        self.max_BH = torch.full((batch, heads), -torch.inf, device=device)
        self.sums = torch.zeros(6, heads, device=device)  # three sums, and the number of logits or queries in each
        self.change_H, self.entropy_H, self.sink_H, self.compared_H, self.see_one_H, self.see_two_H = self.sums
        self.share_BHJ = torch.zeros(batch, heads, self.keys, device=device)
        self.visible_BHJ = torch.zeros(batch, heads, self.keys, dtype=torch.bool, device=device)
        row, limit = batch * heads * self.keys, max(1, KEPT // parts)
        kept = max(1, min(queries, limit // row))  # queries, evenly spaced over the sequence
        self.sampled, self.stride = [(i + 1) * queries // kept - 1 for i in range(kept)], -(-row // limit)
        self.kept_BHIJ = torch.full((batch, heads, kept, -(-self.keys // self.stride)), MASKED, device=device)
        if before_BHIJ is None or before_BHIJ.shape != self.kept_BHIJ.shape:
            before_BHIJ, self.change_H[:] = None, torch.nan
        for sequences, part, logit_BHIJ in logits.chunks():
            self._keep(sequences, part, logit_BHIJ, before_BHIJ)
            self._add(sequences, logit_BHIJ)
        first_BH1 = self.visible_BHJ.int().argmax(-1, keepdim=True)  # the first key that is visible to any query
        self.sink_H += self.share_BHJ.gather(-1, first_BH1).sum((0, 2))

    def _keep(self, sequences: slice, queries: slice, logit_BHIJ: Tensor, before_BHIJ: Tensor | None) -> None:
        """Keep the sampled queries and keys of a chunk, and compare them with those kept before."""
        start, stop = (bisect_left(self.sampled, edge) for edge in (queries.start, queries.stop))
        rows = [query - queries.start for query in self.sampled[start:stop]]
        logit_BHIJ = logit_BHIJ if len(rows) == logit_BHIJ.shape[2] else logit_BHIJ[:, :, rows]
        logit_BHIJ = logit_BHIJ[..., : self.keys : self.stride]
        kept_BHIJ = self.kept_BHIJ[sequences, :, start:stop]
        kept_BHIJ[..., : logit_BHIJ.shape[-1]] = logit_BHIJ.clamp(min=MASKED)
        if before_BHIJ is not None:
            before_BHIJ = before_BHIJ[sequences, :, start:stop]
            masked_BHIJ = (kept_BHIJ <= MASKED).logical_or_(before_BHIJ <= MASKED)
            self.change_H += (kept_BHIJ - before_BHIJ).abs_().masked_fill_(masked_BHIJ, 0).sum((0, 2, 3))
            self.compared_H += masked_BHIJ.logical_not_().sum((0, 2, 3))

    def _add(self, sequences: slice, logit_BHIJ: Tensor) -> None:
        """Add the maxima, entropies and shares of a chunk."""
        max_BHI, width = logit_BHIJ[..., : self.keys].amax(-1), min(logit_BHIJ.shape[-1], self.keys)
        self.max_BH[sequences] = torch.maximum(self.max_BH[sequences], max_BHI.amax(2))
        visible_BHIJ = (logit_BHIJ[..., : self.keys] < MASKED).logical_not_()
        self.visible_BHJ[sequences, :, :width] |= visible_BHIJ.any(2)
        count_BHI = visible_BHIJ.sum(-1)
        see_one_BHI, see_two_BHI = count_BHI > 0, count_BHI > 1

        max_BHI = max_BHI if logit_BHIJ.shape[-1] <= self.keys else logit_BHIJ.amax(-1)
        below_BHIJ = (logit_BHIJ - max_BHI.clamp(min=MASKED)[..., None]).clamp_(min=NEGLIGIBLE)
        share_BHIJ = below_BHIJ.softmax(-1)
        entropy_BHI = -share_BHIJ.amax(-1).log() - torch.linalg.vecdot(share_BHIJ, below_BHIJ)
        share_BHJ = share_BHIJ.masked_fill_(~see_two_BHI[..., None], 0).sum(2)

        self.see_one_H += see_one_BHI.sum((0, 2))
        self.see_two_H += see_two_BHI.sum((0, 2))
        self.entropy_H += entropy_BHI.where(see_one_BHI, 0).sum((0, 2))
        self.share_BHJ[sequences, :, :width] += share_BHJ[..., :width]
        self.sink_H += share_BHJ[..., self.keys :].sum((0, 2))  # learned sinks


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
        collectives.validate_no_tensor_parallel(model, "LogitMonitor")
        self.model, self.probe = model, probe
        attributes = {name: int_attributes(module, HEADS) for name, module in named_modules(model)}
        self._heads = {name: counts[0] for name, counts in attributes.items() if counts}
        self._heads |= {name: of.paths[0].heads for name, of in found_by_table(model).items() if of.paths}
        self._last: dict[str, Tensor] = {}

    def measure(self, keep: bool = True) -> dict[str, LogitStats]:
        """Run the probe. With `keep=False`, the next call still measures changes since the call before this one."""
        found = self._run([self.probe])
        if not all(part.heads_known for (part,) in found.values()):
            whole, found = found, self._run(sequences_of(self.probe), one_sequence=True)
            validate_apart(found, whole)
        if keep:
            self._last = {name: torch.cat([part.kept_BHIJ for part in parts]) for name, parts in found.items()}
        groups = collectives.groups_of(self.model)
        collectives.warn_if_alone(groups, "LogitMonitor")
        maxima = [torch.cat([part.max_BH for part in parts]).amax(0) for parts in found.values()]
        sums = [torch.stack([part.sums for part in parts]).sum(0) for parts in found.values()]
        maxima, sums = collectives.all_reduce(maxima, groups, "MAX"), collectives.all_reduce(sums, groups, "SUM")
        means = [totals / counts for totals, counts in (each.chunk(2) for each in sums)]
        return {name: LogitStats(max_H, *of) for name, max_H, of in zip(found, maxima, means, strict=True)}

    def _run(self, batches: Sequence[Any], one_sequence: bool = False) -> dict[str, list[StatsAccumulator]]:
        """Run batches one after the other; for each attention, the sums of each batch. ValueError if there is none."""
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
            uncompiled, mode = run_uncompiled(), AttentionInterceptor(on_logits, axes_of)
            with undisturbed(model), collectives.resharded(model), module_stack(model) as running, uncompiled, mode:
                run(model, batch)
        groups, count = collectives.groups_of(self.model), len(sequences_of(self.probe))
        # if they run one by one, all ranks must have as many sequences
        shapes = [(name, each[0].max_BH.shape[1], each[0].heads_known or count) for name, each in found.items()]
        if groups and not collectives.all_ranks_agree(shapes, groups, next(self.model.parameters()).device):
            raise ValueError(f"{DIFFERENT} This one ran {', '.join(found) or 'none'}")
        if not found:
            raise ValueError(f"no attention was seen in a forward of {type(model).__name__}: {SUPPORTED}")
        return found

    def state_dict(self) -> dict[str, Tensor]:
        """The kept logits, so that a resumed run measures its first change from the last kept measurement."""
        return dict(self._last)

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Load a `state_dict()`."""
        device = next(self.model.parameters()).device
        self._last = {name: kept.to(device) for name, kept in state_dict.items()}


def sequences_of(probe: Any) -> list[Any]:
    """The probe as batches of one sequence: the tensors whose first axis is as long as that of the first are cut."""
    probe = dict(probe) if isinstance(probe, Mapping) else probe
    count = next((len(tensor) for tensor in tensors_in(probe) if tensor.ndim), 1)

    def part(number: int, tensor: Tensor) -> Tensor:
        return tensor[number : number + 1] if tensor.ndim and len(tensor) == count else tensor

    return [tree_map_only(Tensor, partial(part, number), probe) for number in range(count)]


def validate_apart(found: Mapping[str, list[StatsAccumulator]], whole: Mapping[str, list[StatsAccumulator]]) -> None:
    """Raise ValueError if heads are still not known, or if the sequences' largest logits are not those of the batch."""
    for name in {**whole, **found}:
        parts, together = found.get(name, []), whole.get(name, [])
        same = len({part.kept_BHIJ.shape for part in parts}) == 1 and all(part.heads_known for part in parts)
        if same and together:
            one, two = (torch.cat([each.max_BH.flatten() for each in of]).sort().values for of in (parts, together))
            tolerance = parts[0].rounding * float(two.nan_to_num(0, 0, 0).abs().max())
            same = one.shape == two.shape and torch.allclose(one, two, 0, tolerance, equal_nan=True)
        if not (same and together):
            raise ValueError(UNKNOWN.format(name or "the model"))
