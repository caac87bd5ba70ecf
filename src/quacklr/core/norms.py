"""Norms of blocks. A norm takes stacked blocks of one shape, and its memory of the last step.

The bound holds for any norm that is at least the spectral norm. These are the paper's two; both are accumulated in fp32
or better, whatever the parameter's dtype. To use another norm, write a function of the same form.

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
    """Square root of the sum of squares; the paper's default. One pass over the weights, no memory."""
    return torch.linalg.vector_norm(blocks_BRC, dim=(1, 2), dtype=precision(blocks_BRC)), memory


def spectral(blocks_BRC: Tensor, memory: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Largest singular value, by power iteration from the last step's singular vectors; the tight bound.

    One iteration for each step stays within 1 % of an exact SVD, from below. It iterates on eight vectors: singular
    values cross during training, and a single vector would follow the one that was largest. Without memory it starts
    from fixed random vectors and runs 30 iterations. Costs two passes over the weights, a memory of 8 C numbers for
    each block (fewer if it has fewer rows), and an fp32 copy of blocks of lower precision.
    """
    blocks_BRC = blocks_BRC.to(precision(blocks_BRC))
    basis_BCV = memory if memory is None else memory.to(blocks_BRC.dtype)  # the model may have been cast to double
    if basis_BCV is None:
        basis_BCV = random_basis(*blocks_BRC.shape).to(blocks_BRC)
        for _ in range(FIRST_ITERATIONS):
            basis_BCV = orthonormal(blocks_BRC.mT @ (blocks_BRC @ basis_BCV))
    image_BRV = blocks_BRC @ basis_BCV
    return largest_singular_value(image_BRV.mT @ image_BRV), orthonormal(blocks_BRC.mT @ image_BRV)


def precision(blocks_BRC: Tensor) -> torch.dtype:
    """The dtype in which norms are accumulated."""
    return torch.float64 if blocks_BRC.dtype == torch.float64 else torch.float32


def orthonormal(vectors_BCV: Tensor) -> Tensor:
    """An orthonormal basis of the span of the vectors. For zero vectors it is any basis; iteration can continue.

    It is contiguous, like a basis loaded from a checkpoint: products with another layout round differently.
    """
    return torch.linalg.qr(vectors_BCV).Q.contiguous()


def largest_singular_value(gram_BVV: Tensor) -> Tensor:
    """Largest singular value from a Gram matrix G, as sqrt(tr(G^(n+1)) / tr(G^n)).

    An eigensolver is not used, because it would wait for the device.
    """
    tiny = torch.finfo(gram_BVV.dtype).tiny
    power_BVV = gram_BVV
    for _ in range(SQUARINGS):
        power_BVV = power_BVV / torch.linalg.vector_norm(power_BVV, dim=(1, 2), keepdim=True).clamp(min=tiny)
        power_BVV = power_BVV @ power_BVV
    trace_B = power_BVV.diagonal(dim1=1, dim2=2).sum(1)
    return ((gram_BVV * power_BVV).sum((1, 2)) / trace_B.clamp(min=tiny)).sqrt()


def random_basis(count: int, rows: int, columns: int) -> Tensor:
    """A fixed random basis. It has at most `rows` vectors: any more would consist of rounding errors."""
    generator = torch.Generator("cpu").manual_seed(0)
    size = count, columns, min(VECTORS, rows, columns)
    return orthonormal(torch.randn(size, generator=generator, device="cpu", dtype=torch.float32))
