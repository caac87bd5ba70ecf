"""Watch attention logits: how large they are, and how far they have moved since the last look.

The mean absolute change is what the paper's method controls; the maximum is what everybody looks at. Both are measured
on a probe, a fixed batch, so that only the weights can have moved them.

Shapes: B batch, H head, I query, J key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quacklr.intercept import Logits, intercept
from quacklr.modules import run, undisturbed

KEPT = 2**22  # logits of one attention that are kept for the next call: 16 MB


@dataclass(frozen=True, slots=True, eq=False)
class LogitStats:
    """One attention's logits on the probe, each (heads,) in float32; only what a query may look at counts.

    `max`: the largest logit. `mean_change`: mean |change| since the last kept measurement; NaN at the first.
    `entropy`: mean over queries of the entropy of what the softmax makes of them, in nats.
    """

    max: Tensor
    mean_change: Tensor
    entropy: Tensor


class LogitMonitor:
    """Statistics of all attention logits of a model on a probe, by attention module's name.

        monitor = LogitMonitor(model, probe)     # probe: what the model takes: a tensor, a tuple, or a dict
        monitor.measure()["layers.3.attn"].max   # (heads,)

    Any model whose attention is `scaled_dot_product_attention` or a softmax written out. The model is left as it was:
    mode, gradients and random state, so a watched run is bitwise the unwatched one. Between calls it keeps the
    probe's logits, or of a large probe those of evenly spaced queries: at most 4M numbers a module, in float32.
    Costs about a forward of the probe with its logits made.
    """

    def __init__(self, model: nn.Module, probe: Any) -> None:
        self.model, self.probe = model, probe
        self._last: dict[str, Tensor] = {}

    def measure(self, keep: bool = True) -> dict[str, LogitStats]:
        """Run the probe. With `keep=False` the next call's change is still since the call before this one."""
        stats: dict[str, LogitStats] = {}
        kept: dict[str, Tensor] = {}

        def listen(name: str, logits: Logits) -> None:
            if name in stats:
                raise ValueError(f"{name or 'the model'} attends more than once in one forward; give each its module")
            sample_BHIJ = logits.rows(evenly_spaced(logits))
            largest, entropy = summarise(logits)
            stats[name] = LogitStats(largest, change(sample_BHIJ, self._last.get(name)), entropy)
            kept[name] = sample_BHIJ

        with undisturbed(self.model), intercept(self.model, listen):
            run(self.model, self.probe)
        if not stats:
            raise ValueError(
                f"no attention was seen in a forward of {type(self.model).__name__}: only scaled_dot_product_attention "
                "and a softmax over (batch, heads, queries, keys) are, torch.nn.MultiheadAttention only with "
                "need_weights=False, and nothing inside torch.compile"
            )
        if keep:
            self._last = kept
        return stats

    def state_dict(self) -> dict[str, Tensor]:
        """The kept logits, so that a resumed run measures its first change from where it was."""
        return dict(self._last)

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Continue from a `state_dict()`."""
        device = next(self.model.parameters()).device
        self._last = {name: kept.to(device) for name, kept in state_dict.items()}


def evenly_spaced(logits: Logits) -> Tensor:
    """Queries enough to keep, spread over the sequence; all of them if they fit."""
    room = KEPT // (logits.q_BHID.shape[0] * logits.heads * logits.keys)
    count = max(1, min(logits.queries, room))
    spaced = (torch.arange(count) + 1) * logits.queries // count - 1
    return spaced.to(logits.q_BHID.device)


def summarise(logits: Logits) -> tuple[Tensor, Tensor]:
    """Largest logit and mean entropy of each head; queries that may look at nothing do not count."""
    largest, entropy, queries = [], [], []
    for logit_BHIJ in logits.chunks():
        largest.append(logit_BHIJ.amax((0, 2, 3)))
        log_share_BHIJ = logit_BHIJ.log_softmax(-1)
        each_BHI = -(log_share_BHIJ.exp() * log_share_BHIJ.clamp(min=-1e30)).sum(-1)  # 0 * -1e30 is 0, 0 * -inf is not
        looking_BHI = logit_BHIJ.amax(-1) > -torch.inf
        entropy.append(each_BHI.where(looking_BHI, 0).sum((0, 2)))
        queries.append(looking_BHI.sum((0, 2)))
    return torch.stack(largest).amax(0), torch.stack(entropy).sum(0) / torch.stack(queries).sum(0)


def change(now_BHIJ: Tensor, before_BHIJ: Tensor | None) -> Tensor:
    """Mean |change| of each head's logits; NaN if there is nothing to compare with."""
    if before_BHIJ is None or before_BHIJ.shape != now_BHIJ.shape:
        return torch.full((now_BHIJ.shape[1],), torch.nan, device=now_BHIJ.device)
    open_BHIJ = now_BHIJ > -torch.inf
    moved_BHIJ = torch.where(open_BHIJ, now_BHIJ - before_BHIJ, 0).abs()
    return moved_BHIJ.sum((0, 2, 3)) / open_BHIJ.sum((0, 2, 3))
