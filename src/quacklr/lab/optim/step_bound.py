"""AdamW^2 (Qi et al. 2025, arXiv 2505.21910): a step is bounded relative to the weight that it changes.

    rate = min(1, ratio * s(W) / s(D))        W: the weight before the step, D: the optimizer's step, s: spectral norm

so that no step changes the largest singular value of a weight by more than about `ratio` of it (Weyl's inequality).
D has everything that the optimizer does in a step, also weight decay. Its authors compute s by power iteration. Here it
is the bound of `largest_singular_values`, which is at most 16 % too large if the shorter side of a matrix is 128; so a
step can be that much larger than `ratio`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from quacklr.core.norms import gram, largest_singular_values


class StepBound:
    """Scales down each optimizer's steps on some matrices, by hooks. It has no state.

    A weight that is all zeros would never move, so it raises a ValueError. Costs a copy of the matrices during a step.
    """

    def __init__(self, weights: Iterable[Tensor], optimizers: Sequence[Optimizer], ratio: float) -> None:
        self.ratio, self._before = ratio, dict[Tensor, Tensor]()
        matrices = list(dict.fromkeys(weights))
        for weight in matrices:
            if not weight.any():
                raise ValueError(f"a weight of shape {tuple(weight.shape)} is all zeros, so no step could change it")
        for optimizer in optimizers:
            held = {param for group in optimizer.param_groups for param in group["params"]}
            stepped = [weight for weight in matrices if weight in held]
            optimizer.register_step_pre_hook(lambda *_, stepped=stepped: self._copy(stepped))
            optimizer.register_step_post_hook(lambda *_, stepped=stepped: self._scale(stepped))

    @torch.no_grad()
    def _copy(self, weights: list[Tensor]) -> None:
        self._before = {weight: weight.clone() for weight in weights}

    @torch.no_grad()
    def _scale(self, weights: list[Tensor]) -> None:
        before = [self._before.pop(weight) for weight in weights]
        steps = [weight - old for weight, old in zip(weights, before, strict=True)]
        for weight, step, rate in zip(weights, steps, self.rates(before, steps), strict=True):
            weight.add_((rate - 1) * step)  # exactly 0 for a rate of 1

    def rates(self, weights: Sequence[Tensor], steps: Sequence[Tensor]) -> list[Tensor]:
        """The rate of each step."""
        of_weights, of_steps = (largest_singular_values([gram(each[None]) for each in x]) for x in (weights, steps))
        tiny = torch.finfo(torch.float32).tiny  # a step of zero has rate 1
        return [
            (self.ratio * of_weight / of_step.clamp(min=tiny)).clamp(max=1.0).to(step.dtype)
            for of_weight, of_step, step in zip(of_weights, of_steps, steps, strict=True)
        ]
