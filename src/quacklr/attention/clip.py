"""QK clip (Kimi K2, Algorithm 1): after a step, heads whose largest logit was above a threshold are scaled back to it.

    gamma[h] = min(1, threshold / largest logit of head h since the last step)

    MHA   q[h] and k[h] by sqrt(gamma[h])
    MLA   uq[h] and uk[h] by sqrt(gamma[h]), qr[h] by gamma[h]; weights that all heads read (dq, dkv, kr) do not change

In terms of logit paths: the product of each path is scaled by gamma[h], in equal parts by the weights that belong to
head h alone. A key block that a group of heads shares is scaled by the square root of the group's largest gamma, and
each query by the remaining factor, so that no head shrinks by more than its own gamma.
"""

from __future__ import annotations

import warnings
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, Self
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from quacklr.attach.optimizers import as_optimizers
from quacklr.attention.interceptor import SUPPORTED
from quacklr.attention.recorder import MaxLogitRecorder
from quacklr.core.flat_tensor import original
from quacklr.core.local import local_boxes
from quacklr.core.path import LogitPath, as_paths
from quacklr.core.stepped import is_idle
from quacklr.core.validate import validate_not_attached_twice, validate_stepped
from quacklr.core.weight import Weight, distinct
from quacklr.find import logit_paths
from quacklr.find.discover import by_module
from quacklr.find.finding import Finding
from quacklr.find.first_batch import FirstBatch
from quacklr.sharded.collectives import all_reduce_max, groups_of, is_distributed, reshard
from quacklr.sharded.engines.read import as_module, engine_of
from quacklr.sharded.validate import validate_no_tensor_parallel

_attached: WeakSet[QKClip] = WeakSet()

UNSEEN = f"QK clip saw no attention logits in training mode before this step, so it cannot clip: {SUPPORTED}"
ALONE = (
    "QK clip was given a model that is neither DistributedDataParallel nor sharded, but there are several ranks: each "
    "rank would clip by its own largest logits, and replicas would become different; wrap the model first, then pass it"
)
SPENT = (
    "QK clip saw no training forward since the last step, so it does not clip: is the model in eval mode, or was "
    "optimizer.step() called twice?"
)
STUCK = (
    "QK clip cannot scale all terms of the logits of {}: every weight of some term is frozen, as under LoRA, or is "
    "shared by all heads"
)


class QKClip:
    """Kimi K2's QK clip on a model and the optimizer (or optimizers) that train it.

        clip = QKClip(model, optimizer, threshold=100.0)     # once; the training loop stays as it was

    The largest logit of each head is taken over all training forwards since the last step: all micro-batches, all ranks
    of DistributedDataParallel or FSDP2. For this, all logits are computed a second time. Heads whose largest logit is
    not above the threshold (it may be negative) stay bitwise as they are. Forwards in eval mode or without gradients do
    not count. The attention modules of a compiled model run uncompiled. Frozen weights are not scaled. There is no
    device synchronisation, unless a model computes its logits without a fused kernel.

    `clip=False` only records: `max_logits()` shows what would have been clipped. For a model that no rule recognises,
    pass the `paths` that `logit_paths(model, batch)` measures. With `verify`, the paths that rules found are measured
    on a few tokens of the first batch before the first step; if a rule is wrong, that step raises a ValueError.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Optimizer | Iterable[Optimizer],
        threshold: float = 100.0,
        *,
        clip: bool = True,
        paths: Iterable[LogitPath] | None = None,
        verify: bool = True,
    ) -> None:
        if not 0 < float(threshold) < float("inf"):
            raise ValueError(f"threshold={threshold!r}: the largest logit allowed must be a positive number")
        module = as_module(model)
        if module is None:
            raise TypeError(f"QK clip needs a model, an nn.Module, and got a {type(model).__name__}")
        model = module
        if isinstance(model, nn.DataParallel):
            raise ValueError(
                "QK clip cannot record the logits of the replicas of DataParallel; use DistributedDataParallel"
            )
        self.threshold, self.clip = threshold, clip
        engine = engine_of(model, optimizer)
        self.optimizers, self._in_groups = as_optimizers(engine.optimizers or optimizer, linear=False), engine.stepped
        reshard(model)
        with engine.whole_shapes():
            found = logit_paths(model) if paths is None else paths
        as_paths(found, "paths must be")
        self._paths = {name: engine.located(each) for name, each in by_module(found).items()}
        weights = [weight for paths in self._paths.values() for path in paths for weight in path.weights]
        validate_no_tensor_parallel(model, "QK clip", engine.tensor_parallel)
        with engine.filled_groups():
            validate_stepped(weights, self.optimizers, self._in_groups)
        others = [other for other in _attached if not set(other.optimizers).isdisjoint(self.optimizers)]
        validate_not_attached_twice(weights, [weight for other in others for weight in other._canonical], "QKClip")
        self._canonical: dict[Weight, Weight] = distinct(weights)
        self._groups = engine.data_groups if engine.data_groups and is_distributed() else groups_of(model)
        self._device = original(weights[0].param).device
        self._boxes = {
            part: [
                (box._replace(indices=()), part.blocks_in(box).to(part.param.device)) for box in local_boxes(part.param)
            ]
            for weight in weights
            for part in weight.parts
        }
        if not self._groups and is_distributed():
            warnings.warn(ALONE, stacklevel=2)
        if stuck := [name for name, each in self._paths.items() if not all(map(scalable, each))]:
            warnings.warn(STUCK.format(", ".join(name or "the model" for name in stuck)), stacklevel=2)
        self._maxima: dict[Optimizer, dict[str, Tensor]] = {each: {} for each in self.optimizers}
        self._stepping: set[Optimizer] = set()
        self._stepped: dict[Optimizer, set[int]] = {}  # ids of the parameters that stepped since the last forward
        self._warned = False
        known: Mapping[str, Finding] = getattr(found, "found", {}) if paths is None else {}
        self._first_batch = FirstBatch(model, known, engine.gathers, verify) if known else None
        heads = {name: each[0].heads for name, each in self._paths.items()}
        self._recorder = MaxLogitRecorder(model, heads, self._record)
        eager: Any = torch.compiler.disable
        self._hooks = [each.register_step_pre_hook(eager(self._before)) for each in self.optimizers]
        self._hooks += [each.register_step_post_hook(eager(self._after)) for each in self.optimizers]
        _attached.add(self)

    def _record(self, name: str, max_H: Tensor) -> None:
        """Update the maxima of each optimizer since its last step. NaNs and infinities are ignored."""
        max_H = max_H.masked_fill(max_H == torch.inf, torch.nan)
        for optimizer, maxima in self._maxima.items():
            if optimizer in self._stepped:
                del self._stepped[optimizer]
                maxima.clear()
            maxima[name] = torch.fmax(maxima[name], max_H) if name in maxima else max_H

    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        if self._first_batch is not None and self._first_batch.has_batch and not is_idle(optimizer):
            self._first_batch.measure()
        self._stepping.add(optimizer)

    @torch.no_grad()
    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        if optimizer not in self._stepping:  # a step that calls the step of its parent class runs the hooks twice
            return
        self._stepping.remove(optimizer)
        if self._first_batch is not None and not is_idle(optimizer):
            self._first_batch.measure()
        params = self._in_groups.by(optimizer)
        if not self._stepped.get(optimizer, set()).isdisjoint(params):  # the maxima were used by an earlier step
            if not is_idle(optimizer):
                self._maxima[optimizer].clear()
                warnings.warn(SPENT, stacklevel=4)
            return
        if optimizer not in self._stepped:  # else an engine steps the next part of the parameters
            maxima = self._reduced(self._maxima[optimizer])
            if not maxima and not is_idle(optimizer):
                raise RuntimeError(UNSEEN)
            self._maxima[optimizer] = maxima
            self._warn(maxima)
        self._stepped[optimizer] = self._stepped.get(optimizer, set()) | params
        if self.clip:
            self._scale(params, self._factors(self._maxima[optimizer]))

    def _scale(self, params: Container[int], factors: Mapping[Weight, Tensor]) -> None:
        """Multiply the rows of these parameters (by id) by the factors of their blocks."""
        trained = [(part, factor_B) for weight, factor_B in factors.items() for part in weight.parts]
        for part, factor_B in trained:
            if id(part.param) in params and part.param.requires_grad:
                for box, block_of_row in self._boxes[part]:
                    scale(part.rows_first(box), block_of_row, factor_B)

    def _factors(self, maxima: Mapping[str, Tensor]) -> dict[Weight, Tensor]:
        """For each weight to scale, the (blocks,) factors; the least one, if several modules share the weight."""
        found: dict[Weight, Tensor] = {}
        for name, max_H in maxima.items():
            for weight, factor_B in factors(self._paths[name], gamma(max_H, self.threshold)).items():
                first = self._canonical[weight]
                found[first] = torch.minimum(found[first], factor_B) if first in found else factor_B
        return found

    def _reduced(self, maxima: dict[str, Tensor]) -> dict[str, Tensor]:
        """The maxima over all ranks. A rank without any takes part in the all-reduce, because the others wait."""
        if not self._groups:
            return maxima
        none = {n: torch.full((p[0].heads,), -torch.inf, device=self._device) for n, p in self._paths.items()}
        local = {name: of.nan_to_num(nan=-torch.inf, posinf=torch.inf) for name, of in (none | maxima).items()}
        found = dict(zip(local, all_reduce_max(list(local.values()), self._groups), strict=True))
        return {name: of for name, of in found.items() if name in maxima or bool((of > -torch.inf).any())}

    def _warn(self, maxima: Mapping[str, Tensor]) -> None:
        """Warn once of modules whose logits were not recorded."""
        missing = sorted(self._paths.keys() - maxima.keys())
        if missing and not self._warned:
            self._warned = True
            warnings.warn(f"QK clip saw no logits of {', '.join(missing)}, so they are not clipped", stacklevel=5)

    def max_logits(self) -> dict[str, Tensor]:
        """For each attention module, (heads,): the largest logits since the last step.

        Between a step and the next training forward, these are the logits that the step used.
        """
        return dict(self._maxima[self.optimizers[0]])

    def state_dict(self) -> dict[str, Any]:
        """Empty: QK clip has no state between steps."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Does nothing: QK clip has no state."""

    def remove(self) -> None:
        """Remove the hooks, and unwrap the forwards."""
        _attached.discard(self)
        if self._first_batch is not None:
            self._first_batch.remove()
        self._recorder.remove()
        for hook in self._hooks:
            hook.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


def gamma(max_H: Tensor, threshold: float) -> Tensor:
    """min(1, threshold / max), and 1 where that is undefined: max <= 0, NaN or inf."""
    return torch.where((max_H > threshold) & (max_H < torch.inf), threshold / max_H, 1.0)


def factors(paths: list[LogitPath], gamma_H: Tensor) -> dict[Weight, Tensor]:
    """For each weight to scale, the (blocks,) factors: those along a path multiply to gamma for every head."""
    found: dict[Weight, Tensor] = {}
    for path in paths:
        left_H = gamma_H
        rest = []
        for weight, read in scalable(path):
            read_H = read.to(gamma_H.device)
            if weight in found:  # scaled for another path already, as with LoRA; no other weight may grow to compensate
                left_H = (left_H / found[weight][read_H]).clamp(max=1)
            else:
                rest.append((weight, read_H))
        for done, (weight, read_H) in enumerate(rest):
            common_B = torch.zeros(weight.blocks, device=gamma_H.device)
            common_B = common_B.scatter_reduce(0, read_H, left_H, "amax", include_self=False)
            found[weight] = common_B ** (1 / (len(rest) - done))
            left_H = left_H / found[weight][read_H]
    return found


def scalable(path: LogitPath) -> list[tuple[Weight, Tensor]]:
    """The trained weights of a path that belong to one head, or to a group of heads, and the block each head reads.

    Weights of a group come first. If there is only one head, a chain of more than two weights is scaled without its
    first and last weight, because these make values too.
    """
    inner = path.weights[1:-1] or path.weights
    single_head = inner if path.heads == 1 else ()
    found = [
        (weight, read)
        for weight, read in zip(path.weights, path.reads, strict=True)
        if (weight.blocks > 1 or weight in single_head) and any(part.param.requires_grad for part in weight.parts)
    ]
    return sorted(found, key=lambda pair: pair[0].blocks)


def scale(rows: Tensor, block_of_row: Tensor, factor_B: Tensor) -> None:
    """Multiply each row by the factor of its block; rows of block -1 are not scaled."""
    factor = torch.where(block_of_row >= 0, factor_B.to(rows.device)[block_of_row.clamp(min=0)], 1.0)
    rows.mul_(factor.view(-1, *[1] * (rows.ndim - 1)).to(rows.dtype))
