"""Norms of blocks of weights, and the largest singular values of their steps.

The bound of the paper holds for any norm that is at least the spectral norm. Two norms are given here. To use another
one, write a function of the same form. Norms are accumulated in fp32 or better, whatever the parameter's dtype.

The largest singular value is bounded from above by a Schatten norm, without an SVD and without a state:

    sigma_max(D)  <=  tr((D D')^n)^(1 / 2n)  <=  S^(1 / 2n) sigma_max(D)

It needs the Gram matrix of D (D D' or D' D, the smaller one), squared a few times. It is exact for D of rank one. An
eigensolver would wait for the device, and a power iteration would need the vectors of the last step.

Shapes: B blocks, R rows, C columns (the bias is one of them), S the shorter of R and C.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Norm = Callable[[Tensor], Tensor]
"""(B, R, C) -> (B,)"""

STEP_SQUARINGS = 3  # order 32: at most 11 % too large for S = 32, 16 % for S = 128
WEIGHT_SQUARINGS = 7  # order 512: at most 1 % too large for S = 128


def frobenius(blocks_BRC: Tensor) -> Tensor:
    """Square root of the sum of squares; the paper's default. One pass over the weights."""
    return torch.linalg.vector_norm(blocks_BRC, dim=(1, 2), dtype=precision(blocks_BRC))


def spectral(blocks_BRC: Tensor) -> Tensor:
    """Largest singular value, from above; the tight bound. At most 1 % too large for 128 rows.

    Costs one product of the weights with themselves, and eight of S x S matrices.
    """
    return schatten(gram(blocks_BRC), WEIGHT_SQUARINGS)


def precision(blocks_BRC: Tensor) -> torch.dtype:
    """The dtype in which norms are accumulated."""
    return torch.float64 if blocks_BRC.dtype == torch.float64 else torch.float32


def gram(blocks_BRC: Tensor) -> Tensor:
    """(B, S, S): the Gram matrices of blocks, in fp32 or better."""
    blocks_BRC = blocks_BRC.to(precision(blocks_BRC))
    wide = blocks_BRC.shape[1] <= blocks_BRC.shape[2]
    return torch.bmm(blocks_BRC, blocks_BRC.mT) if wide else torch.bmm(blocks_BRC.mT, blocks_BRC)  # faster than @


def largest_singular_values(grams: Sequence[Tensor]) -> list[Tensor]:
    """(B,) for each (B, S, S): an upper bound of the largest singular value of each block's step.

    It is not finite for a step with NaN or inf. All matrices of one size are computed together, so that the number of
    operations does not grow with the number of layers.
    """
    bounds: dict[int, Tensor] = {}
    kinds = [(gram_BSS.shape[1], gram_BSS.dtype, gram_BSS.device) for gram_BSS in grams]
    for kind in dict.fromkeys(kinds):
        same = [i for i, each in enumerate(kinds) if each == kind]
        together = schatten(torch.cat([grams[i] for i in same]) if same[1:] else grams[same[0]], STEP_SQUARINGS)
        bounds.update(zip(same, together.split([len(grams[i]) for i in same]), strict=True))
    return [bounds[i] for i in range(len(grams))]


def schatten(gram_BSS: Tensor, squarings: int) -> Tensor:
    """(B,): tr(G^n)^(1 / 2n) of Gram matrices G, where n = 2^(squarings + 1)."""
    tiny = torch.finfo(gram_BSS.dtype).tiny
    peak_B11 = gram_BSS.amax((1, 2), True).clamp(min=tiny)  # the norm of small entries would be 0, of large ones inf
    power_BSS, bound_B11 = gram_BSS / peak_B11, peak_B11
    for done in range(squarings):
        if done % 3 == 0:  # three squarings of a matrix of norm 1 have a norm of at least S^-4
            norm_B11 = torch.linalg.vector_norm(power_BSS, dim=(1, 2), keepdim=True)
            bound_B11 = bound_B11 * norm_B11.pow(2.0**-done)
            power_BSS = power_BSS / norm_B11.clamp(min=tiny)
        power_BSS = torch.bmm(power_BSS, power_BSS)
    norm_B11 = torch.linalg.vector_norm(power_BSS, dim=(1, 2), keepdim=True)
    return (bound_B11 * norm_B11.pow(2.0**-squarings)).sqrt().view(-1)
