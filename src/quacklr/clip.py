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
from collections.abc import Iterable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from quacklr.find import logit_paths
from quacklr.intercept import Catch, Logits
from quacklr.modules import named_modules
from quacklr.optimizers import as_optimizers, is_idle
from quacklr.path import Path
from quacklr.refuse import refuse_unstepped
from quacklr.weight import Weight

UNSEEN = (
    "QK clip saw no attention logits before this step, so it cannot clip: it sees scaled_dot_product_attention and a "
    "softmax over (batch, heads, queries, keys) in training mode with gradients, torch.nn.MultiheadAttention only with "
    "need_weights=False, and nothing inside torch.compile"
)


class QKClip:
    """Kimi K2's QK clip on a model and the optimizer (or optimizers) that train it.

        clip = QKClip(model, optimizer, threshold=100.0)     # once; the training loop stays as it was

    The largest logit of each head is taken over all training forwards since the last step (all micro-batches), which
    means that all logits are computed a second time: that is the price of a clip on top of any attention kernel. Heads
    whose largest logit is not above the threshold, negative ones included, are left bitwise as they were. Waits for no
    device. Forwards in eval mode or without gradients are not counted.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | Iterable[Optimizer], threshold: float = 100.0) -> None:
        if not 0 < threshold < float("inf"):
            raise ValueError(f"threshold={threshold!r}: the largest logit allowed must be a positive number")
        self.threshold = threshold
        self.optimizers = as_optimizers(optimizer)
        paths = logit_paths(model)
        refuse_unstepped([weight for path in paths for weight in path.weights], self.optimizers)
        self._paths = by_module(paths)
        self._largest: dict[str, Tensor] = {}
        self._clipped: set[Optimizer] = set()
        self._warned = False
        self._hooks: list[Any] = [each.register_step_post_hook(self._clip) for each in self.optimizers]
        for name, module in named_modules(model):
            if name in self._paths:
                self._hooks += self._watch(name, module)

    def _watch(self, name: str, module: nn.Module) -> list[Any]:
        """Catch the logits of one attention module while it trains."""
        catch: Any = Catch(lambda logits: self._listen(name, logits))
        entered: list[bool] = []

        def begin(module: nn.Module, _: Any) -> None:
            entered.append(module.training and torch.is_grad_enabled())
            if entered[-1]:
                catch.__enter__()

        def end(*_: Any) -> None:
            if entered.pop():
                catch.__exit__(None, None, None)

        return [module.register_forward_pre_hook(begin), module.register_forward_hook(end, always_call=True)]

    def _listen(self, name: str, logits: Logits) -> None:
        if self._clipped:
            self._clipped.clear()
            self._largest.clear()
        largest_H = torch.stack([logit_BHIJ.amax((0, 2, 3)) for logit_BHIJ in logits.chunks()]).amax(0)
        before_H = self._largest.get(name)
        self._largest[name] = largest_H if before_H is None else torch.maximum(before_H, largest_H)

    @torch.no_grad()
    def _clip(self, optimizer: Optimizer, *_: Any) -> None:
        if optimizer in self._clipped:  # it steps again without a forward in between: these maxima are spent
            return
        if not self._largest and not is_idle(optimizer):
            raise RuntimeError(UNSEEN)
        unheard = sorted(self._paths.keys() - self._largest.keys())
        if unheard and not self._warned:
            self._warned = True
            warnings.warn(f"QK clip saw no logits of {', '.join(unheard)}, so they are not clipped", stacklevel=4)
        self._clipped.add(optimizer)
        share = {id(param) for group in optimizer.param_groups for param in group["params"]}
        for name, largest_H in self._largest.items():
            for weight, factor_B in factors(self._paths[name], gamma(largest_H, self.threshold)).items():
                for part in weight.parts:
                    if id(part.param) in share:
                        scale(part, factor_B)

    def max_logits(self) -> dict[str, Tensor]:
        """For each attention module the (heads,) largest logits since the last step."""
        return dict(self._largest)

    def state_dict(self) -> dict[str, Any]:
        """Nothing: between steps there is nothing to remember."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to load."""

    def remove(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


def by_module(paths: Iterable[Path]) -> dict[str, list[Path]]:
    """The paths of each attention module; a path's weights are named after it."""
    found: dict[str, list[Path]] = {}
    for path in paths:
        found.setdefault(path.weights[0].name.rpartition(".")[0], []).append(path)
    return found


def gamma(largest_H: Tensor, threshold: float) -> Tensor:
    """min(1, threshold / largest), and 1 where that means nothing: largest <= 0, NaN or inf."""
    return torch.where((largest_H > threshold) & (largest_H < torch.inf), threshold / largest_H, 1.0)


def factors(paths: list[Path], gamma_H: Tensor) -> dict[Weight, Tensor]:
    """For each weight to scale, the (blocks,) factors: those along a path multiply to gamma for every head."""
    shared = {w for path in paths for w in path.weights if sum(w in other.weights for other in paths) > 1}
    found: dict[Weight, Tensor] = {}
    for path in paths:
        # of a single head, what is next to the product: the ends of a longer chain make values too
        inner = path.weights[1:-1] or path.weights
        the_heads_own = inner if path.heads == 1 else ()
        own = [
            (weight, read.to(gamma_H.device))
            for weight, read in zip(path.weights, path.reads, strict=True)
            if weight not in shared and (weight.blocks > 1 or weight in the_heads_own)
        ]
        left_H = gamma_H
        grouped = sorted(own, key=lambda pair: pair[0].blocks)
        for taken, (weight, read_H) in enumerate(grouped):
            common_B = torch.zeros(weight.blocks, device=gamma_H.device)
            common_B = common_B.scatter_reduce(0, read_H, left_H, "amax", include_self=False)
            found[weight] = common_B ** (1 / (len(grouped) - taken))
            left_H = left_H / found[weight][read_H]
    return found


def scale(part: Weight, factor_B: Tensor) -> None:
    """Multiply each row of a parameter that belongs to a block by the block's factor."""
    block_of_row = part.block_of_row.to(part.param.device)
    of_row = torch.where(block_of_row >= 0, factor_B.to(part.param.device)[block_of_row.clamp(min=0)], 1.0)
    part.param.mul_(part.spread(of_row).to(part.param.dtype))
