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
    return torch.linalg.vector_norm(blocks_BRC, dim=(1, 2), dtype=precision(blocks_BRC)), memory


def spectral(blocks_BRC: Tensor, memory: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Largest singular value, by power iteration from the last step's singular vectors. The tight bound.

    One iteration a step follows weights that train, within 1 % of an exact SVD and from below. It carries eight
    vectors, since singular values cross while training, and one vector would stay with the one that was largest.
    Without memory it starts from fixed random vectors and iterates longer. Costs two passes over the weights,
    remembers 8 C numbers a block (fewer if it has fewer rows), and copies blocks of lower precision to fp32.
    """
    blocks_BRC = blocks_BRC.to(precision(blocks_BRC))
    basis_BCV = memory if memory is None else memory.to(blocks_BRC.dtype)  # a model may have become double
    if basis_BCV is None:
        basis_BCV = random_basis(*blocks_BRC.shape).to(blocks_BRC)
        for _ in range(FIRST_ITERATIONS):
            basis_BCV = orthonormal(blocks_BRC.mT @ (blocks_BRC @ basis_BCV))
    image_BRV = blocks_BRC @ basis_BCV
    return largest_singular_value(image_BRV.mT @ image_BRV), orthonormal(blocks_BRC.mT @ image_BRV)


def precision(blocks_BRC: Tensor) -> torch.dtype:
    """What norms are accumulated in."""
    return torch.float64 if blocks_BRC.dtype == torch.float64 else torch.float32


def orthonormal(vectors_BCV: Tensor) -> Tensor:
    """A basis of what they span; of zeros some basis, so that a block of zeros can be measured later.

    Contiguous, because a checkpoint is: products with another layout round differently.
    """
    return torch.linalg.qr(vectors_BCV).Q.contiguous()


def largest_singular_value(gram_BVV: Tensor) -> Tensor:
    """Of some columns with Gram matrix G: tr(G^(n+1)) / tr(G^n). An eigensolver would wait for the device."""
    tiny = torch.finfo(gram_BVV.dtype).tiny
    power_BVV = gram_BVV
    for _ in range(SQUARINGS):
        power_BVV = power_BVV / torch.linalg.vector_norm(power_BVV, dim=(1, 2), keepdim=True).clamp(min=tiny)
        power_BVV = power_BVV @ power_BVV
    trace_B = power_BVV.diagonal(dim1=1, dim2=2).sum(1)
    return ((gram_BVV * power_BVV).sum((1, 2)) / trace_B.clamp(min=tiny)).sqrt()


def random_basis(count: int, rows: int, columns: int) -> Tensor:
    """For blocks of this size; always the same. More vectors than rows would be made of rounding errors."""
    generator = torch.Generator("cpu").manual_seed(0)
    size = count, columns, min(VECTORS, rows, columns)
    return orthonormal(torch.randn(size, generator=generator, device="cpu", dtype=torch.float32))
