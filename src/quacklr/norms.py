"""How large a block is. A norm takes blocks of one shape, stacked, and what it remembers of the last step.

The rule holds for any submultiplicative norm that is at least the spectral one; these are the paper's two. Both are
computed in fp32 whatever the parameter's dtype. To use your own, write a function of the same form.

Shapes: B blocks, R rows, C columns (the bias is one of them).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

Norm = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]
"""(blocks_BRC, memory) -> (norms_B, memory for the next step). A pure function; memory is None at first."""

FIRST_ITERATIONS = 100


def frobenius(blocks_BRC: Tensor, memory: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Root of the sum of squares. What the paper trains with; one pass over the weights, nothing to remember."""
    return torch.linalg.vector_norm(blocks_BRC, dim=(1, 2), dtype=torch.float32), memory


def spectral(blocks_BRC: Tensor, memory: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Largest singular value, by power iteration from the last step's singular vectors. The tight bound.

    One iteration a step follows weights that train: within 1 % of an exact SVD, from below. Without memory it starts
    from a fixed random vector and iterates longer. Costs two more passes over the weights than `frobenius`, remembers
    one vector of C numbers a block, and copies the blocks to fp32 when the parameters are of a lower precision.
    """
    blocks_BRC = blocks_BRC.to(torch.float32)
    right_BC = _random_vectors(blocks_BRC) if memory is None else memory
    for _ in range(FIRST_ITERATIONS if memory is None else 1):
        right_BC = _power_iteration(blocks_BRC, right_BC)
    return torch.linalg.vector_norm(_apply(blocks_BRC, right_BC), dim=1), right_BC


def _apply(blocks_BRC: Tensor, right_BC: Tensor) -> Tensor:
    return torch.bmm(blocks_BRC, right_BC.unsqueeze(2)).squeeze(2)


def _power_iteration(blocks_BRC: Tensor, right_BC: Tensor) -> Tensor:
    """W'W v, normed; a block that is all zeros keeps its vector, so that it can be measured once it is not."""
    next_BC = _apply(blocks_BRC.mT, _apply(blocks_BRC, right_BC))
    length_B1 = torch.linalg.vector_norm(next_BC, dim=1, keepdim=True)
    return torch.where(length_B1 > 0, next_BC / length_B1, right_BC)


def _random_vectors(blocks_BRC: Tensor) -> Tensor:
    count, _, columns = blocks_BRC.shape
    generator = torch.Generator().manual_seed(0)
    right_BC = torch.randn(count, columns, generator=generator).to(blocks_BRC.device)
    return nn.functional.normalize(right_BC, dim=1)
