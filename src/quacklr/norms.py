"""How large a block is. A norm takes blocks of one shape, stacked, and what it remembers of the last step.

The bound holds for any norm that is at least the spectral one; these are the paper's two. Both are
accumulated in fp32 or better whatever the parameter's dtype. To use your own, write a function of the same form.

Shapes: B blocks, R rows, C columns (the bias is one of them), V vectors.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Norm = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]
"""(blocks_BRC, memory) -> (norms_B, memory for the next step). A pure function; memory is None at first."""

VECTORS, FIRST_ITERATIONS, SQUARINGS = 8, 30, 6


def frobenius(blocks_BRC: Tensor, memory: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Root of the sum of squares. What the paper trains with; one pass over the weights, nothing to remember."""
    return torch.linalg.vector_norm(blocks_BRC, dim=(1, 2), dtype=_precision(blocks_BRC)), memory


def spectral(blocks_BRC: Tensor, memory: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Largest singular value, by power iteration from the last step's singular vectors. The tight bound.

    One iteration a step follows weights that train, within 1 % of an exact SVD and from below. It carries eight
    vectors, since singular values cross while training, and one vector would stay with the one that was largest.
    Without memory it starts from fixed random vectors and iterates longer. Costs two passes over the weights,
    remembers 8 C numbers a block, and copies blocks of lower precision to fp32.
    """
    blocks_BRC = blocks_BRC.to(_precision(blocks_BRC))
    basis_BCV = memory
    if basis_BCV is None:
        basis_BCV = _random_basis(blocks_BRC)
        for _ in range(FIRST_ITERATIONS):
            basis_BCV = _iterate(blocks_BRC, blocks_BRC @ basis_BCV)
    image_BRV = blocks_BRC @ basis_BCV
    return _largest_singular_value(image_BRV), _iterate(blocks_BRC, image_BRV)


def _precision(blocks_BRC: Tensor) -> torch.dtype:
    return torch.float64 if blocks_BRC.dtype == torch.float64 else torch.float32


def _iterate(blocks_BRC: Tensor, image_BRV: Tensor) -> Tensor:
    """W'W applied to the basis, and made a basis again; even of a block of zeros, so that it can be measured later.

    Contiguous, because a checkpoint is: products with another layout round differently.
    """
    return torch.linalg.qr(blocks_BRC.mT @ image_BRV).Q.contiguous()


def _largest_singular_value(image_BRV: Tensor) -> Tensor:
    """Of a few columns: tr(G^(n+1)) / tr(G^n) with G their Gram matrix. An eigensolver would wait for the device."""
    tiny = torch.finfo(image_BRV.dtype).tiny
    gram_BVV = power_BVV = image_BRV.mT @ image_BRV
    for _ in range(SQUARINGS):
        power_BVV = power_BVV / torch.linalg.vector_norm(power_BVV, dim=(1, 2), keepdim=True).clamp(min=tiny)
        power_BVV = power_BVV @ power_BVV
    trace_B = power_BVV.diagonal(dim1=1, dim2=2).sum(1)
    return ((gram_BVV * power_BVV).sum((1, 2)) / trace_B.clamp(min=tiny)).sqrt()


def _random_basis(blocks_BRC: Tensor) -> Tensor:
    count, _, columns = blocks_BRC.shape
    generator = torch.Generator("cpu").manual_seed(0)
    vectors_BCV = torch.randn(
        count, columns, min(VECTORS, columns), generator=generator, device="cpu", dtype=torch.float32
    )
    return torch.linalg.qr(vectors_BCV.to(blocks_BRC)).Q.contiguous()
