"""The largest singular value of each block's step, from above, without memory and without an SVD.

    sigma_max(D)  <=  tr((D D')^n)^(1 / 2n)  <=  rows^(1 / 2n) sigma_max(D)

This is the Schatten norm of order 2n. Squaring the Gram matrix D D' six times gives n = 64, at most 3 % too large for a
block of 32 rows, and 1 % in training. The Gram matrix is that of the shorter side. No eigensolver is used, because they
wait for the device; and no power iteration, because it would need the vectors of the last step.

Shapes: B blocks, R rows, C columns, S the shorter of R and C.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quacklr.core.norms import precision

SQUARINGS = 6


def gram(step_BRC: Tensor) -> Tensor:
    """(B, S, S): the Gram matrices of blocks, in fp32 or better."""
    step_BRC = step_BRC.to(precision(step_BRC))
    wide = step_BRC.shape[1] <= step_BRC.shape[2]
    return step_BRC @ step_BRC.mT if wide else step_BRC.mT @ step_BRC


def largest_singular_values(grams: Sequence[Tensor]) -> list[Tensor]:
    """(B,) for each (B, S, S): an upper bound of the largest singular value of each block. NaN and inf stay.

    All matrices of one size are computed together, so that the number of operations does not grow with the layers.
    """
    bounds: list[Tensor | None] = [None] * len(grams)
    kinds = [(gram_BSS.shape[1], gram_BSS.dtype, gram_BSS.device) for gram_BSS in grams]
    for kind in dict.fromkeys(kinds):
        same = [i for i, each in enumerate(kinds) if each == kind]
        together = schatten(torch.cat([grams[i] for i in same]))
        for i, of_gram in zip(same, together.split([len(grams[i]) for i in same]), strict=True):
            bounds[i] = of_gram
    return [bound for bound in bounds if bound is not None]


def schatten(gram_BSS: Tensor) -> Tensor:
    """(B,): tr(G^n)^(1 / 2n) of Gram matrices G, with n = 2^SQUARINGS. Every power is divided by its trace."""
    tiny = torch.finfo(gram_BSS.dtype).tiny
    trace_B = _trace(gram_BSS)
    power_BSS = gram_BSS / trace_B.clamp(min=tiny)[:, None, None]
    log_B = torch.zeros_like(trace_B)
    for _ in range(SQUARINGS):
        power_BSS = power_BSS @ power_BSS
        factor_B = _trace(power_BSS).clamp(min=tiny)
        power_BSS /= factor_B[:, None, None]
        log_B = 2 * log_B + factor_B.log()
    return (trace_B * (log_B / 2**SQUARINGS).exp()).sqrt()


def _trace(matrices_BSS: Tensor) -> Tensor:
    return matrices_BSS.diagonal(dim1=1, dim2=2).sum(1)
