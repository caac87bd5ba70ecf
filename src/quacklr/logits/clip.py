"""QK clip (Kimi K2, Algorithm 1): after a step, heads whose largest logit was above a threshold are scaled back to it.

    gamma[h] = min(1, threshold / largest logit of head h since the last step)

    MHA   q[h] and k[h] by sqrt(gamma[h])
    MLA   uq[h] and uk[h] by sqrt(gamma[h]), qr[h] by gamma[h]; what serves all heads (dq, dkv, kr) is left alone

In words of paths: each path's product shall shrink by gamma[h], and the weights that are the head's own share that
equally. A key block that a group of heads reads takes what all of the group must give, sqrt of their largest gamma;
each query takes the rest, so that no head shrinks by more than its own gamma.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any, Self
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from quacklr.core.path import LogitPath, as_paths
from quacklr.core.validate import validate_not_attached_twice, validate_stepped
from quacklr.core.weight import Weight, distinct
from quacklr.distributed.collectives import all_reduce_max, groups_of, is_distributed, reshard
from quacklr.distributed.validate import validate_no_tensor_parallel, validate_not_fsdp1
from quacklr.find import logit_paths
from quacklr.find.discover import by_module
from quacklr.find.finding import Finding
from quacklr.find.verify import Verification
from quacklr.logits.interceptor import SEEN
from quacklr.logits.recorder import MaxLogitRecorder
from quacklr.optimizers.attach import as_optimizers, is_idle

_attached: WeakSet[QKClip] = WeakSet()

UNSEEN = f"QK clip saw no attention logits in training mode before this step, so it cannot clip: {SEEN}"
ALONE = (
    "QK clip was given a model that is neither DistributedDataParallel nor sharded, though there are several ranks: it "
    "would take this rank's largest logits for all, and replicas would drift apart; wrap the model first, then pass it"
)
SPENT = (
    "QK clip heard no training forward since the last step, so it does not clip: is the model in eval mode, or was "
    "optimizer.step() called twice?"
)
STUCK = (
    "QK clip cannot scale all that makes the logits of {}: of some of it every weight is frozen, as under LoRA, or "
    "serves all heads"
)


class QKClip:
    """Kimi K2's QK clip on a model and the optimizer (or optimizers) that train it.

        clip = QKClip(model, optimizer, threshold=100.0)     # once; the training loop stays as it was

    The largest logit of each head is taken over all training forwards since the last step (all micro-batches, all ranks
    of DistributedDataParallel or FSDP2), which means that all logits are computed a second time, but for flex attention
    on CUDA, whose kernel tells them: that is the price of a clip on top of any attention. Heads whose largest logit is
    not above the threshold, negative ones included, are left bitwise as they were. Forwards in eval mode or without
    gradients are not counted. Where a model is compiled, its attention modules run uncompiled. Frozen weights are left
    alone. Waits for no device, but where a model writes its logits out.

    `clip=False` only watches: `max_logits()` tells what would have been clipped. For a model that is not known by
    itself, pass the `paths` that `logit_paths(model, batch)` measures. With `verify`, what rules found is measured on a
    few tokens of the first batch before the first step; if a rule is wrong, that step raises a ValueError.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Iterable[Optimizer],
        threshold: float = 100.0,
        *,
        clip: bool = True,
        paths: Iterable[LogitPath] | None = None,
        verify: bool = True,
    ) -> None:
        if not 0 < float(threshold) < float("inf"):
            raise ValueError(f"threshold={threshold!r}: the largest logit allowed must be a positive number")
        if isinstance(model, nn.DataParallel):
            raise ValueError("QK clip cannot listen to the replicas of DataParallel; use DistributedDataParallel")
        self.threshold, self.clip = threshold, clip
        self.optimizers = as_optimizers(optimizer)
        validate_not_fsdp1(model)
        reshard(model)
        found = logit_paths(model) if paths is None else paths
        weights = [weight for path in as_paths(found, "paths must be") for weight in path.weights]
        validate_no_tensor_parallel(model, "QK clip")
        validate_stepped(weights, self.optimizers)
        here = [other for other in _attached if not set(other.optimizers).isdisjoint(self.optimizers)]
        validate_not_attached_twice(weights, [weight for other in here for weight in other._stands_for], "QKClip")
        self._stands_for: dict[Weight, Weight] = distinct(weights)
        self._paths, self._groups = by_module(found), groups_of(model)
        self._device = weights[0].param.device
        self._block_of_row = {
            part: part.local_blocks().to(part.param.device) for weight in weights for part in weight.parts
        }
        if not self._groups and is_distributed():
            warnings.warn(ALONE, stacklevel=2)
        if stuck := [name for name, paths in self._paths.items() if not all(map(own_of, paths))]:
            warnings.warn(STUCK.format(", ".join(name or "the model" for name in stuck)), stacklevel=2)
        self._largest: dict[Optimizer, dict[str, Tensor]] = {each: {} for each in self.optimizers}
        self._stepping: set[Optimizer] = set()
        self._stepped: set[Optimizer] = set()
        self._warned = False
        known: Mapping[str, Finding] = getattr(found, "found", {}) if paths is None else {}
        self._verification = Verification(model, known, verify)
        self._listener = MaxLogitRecorder(
            model, {name: paths[0].heads for name, paths in self._paths.items()}, self._hear
        )
        eager: Any = torch.compiler.disable
        self._hooks = [each.register_step_pre_hook(eager(self._before)) for each in self.optimizers]
        self._hooks += [each.register_step_post_hook(eager(self._after)) for each in self.optimizers]
        _attached.add(self)

    def _hear(self, name: str, largest_H: Tensor) -> None:
        """Kept for each optimizer until it has stepped. What is not a number does not drown what is."""
        largest_H = largest_H.masked_fill(largest_H == torch.inf, torch.nan)
        for optimizer, heard in self._largest.items():
            if optimizer in self._stepped:
                self._stepped.remove(optimizer)
                heard.clear()
            heard[name] = torch.fmax(heard[name], largest_H) if name in heard else largest_H

    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        if not is_idle(optimizer):
            self._verification.before_step()
        self._stepping.add(optimizer)

    @torch.no_grad()
    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        if optimizer not in self._stepping:  # a step that calls its parent's has hooks called twice
            return
        self._stepping.remove(optimizer)
        if not is_idle(optimizer):
            self._verification.finish()
        if optimizer in self._stepped and not is_idle(optimizer):
            self._largest[optimizer].clear()
            warnings.warn(SPENT, stacklevel=4)
        if optimizer in self._stepped:  # without a forward in between: these maxima are spent
            return
        heard = self._reduced(self._largest[optimizer])
        if not heard and not is_idle(optimizer):
            raise RuntimeError(UNSEEN)
        self._stepped.add(optimizer)
        self._largest[optimizer] = heard
        self._warn(heard)
        if self.clip:
            share = {id(param) for group in optimizer.param_groups for param in group["params"]}
            for weight, factor_B in self._factors(heard).items():
                for part in weight.parts:
                    if id(part.param) in share and part.param.requires_grad:
                        scale(part, self._block_of_row[part], factor_B)

    def _factors(self, heard: Mapping[str, Tensor]) -> dict[Weight, Tensor]:
        """For each weight to scale, the (blocks,) factors; of one that several modules share, what the worst needs."""
        found: dict[Weight, Tensor] = {}
        for name, largest_H in heard.items():
            for weight, factor_B in factors(self._paths[name], gamma(largest_H, self.threshold)).items():
                first = self._stands_for[weight]
                found[first] = torch.minimum(found[first], factor_B) if first in found else factor_B
        return found

    def _reduced(self, heard: dict[str, Tensor]) -> dict[str, Tensor]:
        """The largest of all ranks; a rank that heard nothing takes part, for the others wait for it."""
        if not self._groups:
            return heard
        nothing = {n: torch.full((p[0].heads,), -torch.inf, device=self._device) for n, p in self._paths.items()}
        both = {name: of.nan_to_num(nan=-torch.inf, posinf=torch.inf) for name, of in (nothing | heard).items()}
        found = dict(zip(both, all_reduce_max(list(both.values()), self._groups), strict=True))
        return {name: of for name, of in found.items() if name in heard or bool((of > -torch.inf).any())}

    def _warn(self, heard: Mapping[str, Tensor]) -> None:
        """Once, of modules that should have been heard and were not."""
        unheard = sorted(self._paths.keys() - heard.keys())
        if unheard and not self._warned:
            self._warned = True
            warnings.warn(f"QK clip saw no logits of {', '.join(unheard)}, so they are not clipped", stacklevel=5)

    def max_logits(self) -> dict[str, Tensor]:
        """For each attention module the (heads,) largest logits since the last step; after a step, those before it."""
        return dict(self._largest[self.optimizers[0]])

    def state_dict(self) -> dict[str, Any]:
        """Nothing: between steps there is nothing to remember."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to load."""

    def remove(self) -> None:
        """Take the hooks off."""
        _attached.discard(self)
        self._verification.remove()
        self._listener.remove()
        for hook in self._hooks:
            hook.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


def gamma(largest_H: Tensor, threshold: float) -> Tensor:
    """min(1, threshold / largest), and 1 where that means nothing: largest <= 0, NaN or inf."""
    return torch.where((largest_H > threshold) & (largest_H < torch.inf), threshold / largest_H, 1.0)


def factors(paths: list[LogitPath], gamma_H: Tensor) -> dict[Weight, Tensor]:
    """For each weight to scale, the (blocks,) factors: those along a path multiply to gamma for every head."""
    found: dict[Weight, Tensor] = {}
    for path in paths:
        left_H = gamma_H
        rest = []
        for weight, read in own_of(path):
            read_H = read.to(gamma_H.device)
            if weight in found:  # of another path too, as with LoRA; no weight shall grow for what it took there
                left_H = (left_H / found[weight][read_H]).clamp(max=1)
            else:
                rest.append((weight, read_H))
        for taken, (weight, read_H) in enumerate(rest):
            common_B = torch.zeros(weight.blocks, device=gamma_H.device)
            common_B = common_B.scatter_reduce(0, read_H, left_H, "amax", include_self=False)
            found[weight] = common_B ** (1 / (len(rest) - taken))
            left_H = left_H / found[weight][read_H]
    return found


def own_of(path: LogitPath) -> list[tuple[Weight, Tensor]]:
    """The weights of a path that are a head's own, or its group's, and train, with the blocks that heads read.

    Of a single head, those next to the product: the ends of a longer chain make values too. Those of a group first.
    """
    inner = path.weights[1:-1] or path.weights
    the_heads_own = inner if path.heads == 1 else ()
    own = [
        (weight, read)
        for weight, read in zip(path.weights, path.reads, strict=True)
        if (weight.blocks > 1 or weight in the_heads_own) and any(part.param.requires_grad for part in weight.parts)
    ]
    return sorted(own, key=lambda pair: pair[0].blocks)


def scale(part: Weight, block_of_row: Tensor, factor_B: Tensor) -> None:
    """Multiply each row that is here by the factor of its block, given that: -1 is none."""
    rows = part.rows_first()
    of_row = torch.where(block_of_row >= 0, factor_B.to(rows.device)[block_of_row.clamp(min=0)], 1.0)
    rows.mul_(of_row.view(-1, *[1] * (rows.ndim - 1)).to(rows.dtype))
