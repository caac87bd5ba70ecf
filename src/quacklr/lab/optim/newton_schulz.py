"""Newton-Schulz orthogonalisation: U S V' becomes about U V', in five steps x <- (a + b x x' + c (x x')^2) x.

Each step multiplies x by a polynomial of its Gram matrix x x', and several steps multiply it by a product of such
polynomials. If x is much longer than wide, it is cheaper to multiply these small matrices first and then x once. The
rounding error of a Gram matrix grows twelvefold in a step, so at most three steps are merged: in fp32 the result is
then as exact as that of single steps (five merged steps lose two digits). In bf16 steps are never merged.

Shapes: B matrices, R rows, C columns, S the smaller of R and C.
"""

from __future__ import annotations

import torch
from torch import Tensor

A, B, C = 3.4445, -4.7750, 2.0315  # Keller Jordan's, which are torch.optim.Muon's
EPS = 1e-7  # smallest norm to divide by
SINGLE, MERGED = (1, 1, 1, 1, 1), (3, 2)  # steps per multiplication of x


def orthogonalise(update_BRC: Tensor, *, overwrite: bool = False) -> Tensor:
    """Orthogonalise each matrix: singular values become 0.68 to 1.21, but those below 0.0015 of the norm grow 485 fold.

    The result has the dtype given by `precision`. It is deterministic. On a CPU it does not depend on the other
    matrices of the batch (tested with MKL; cuBLAS may select another kernel for another batch). About five tensors of
    this size are allocated at once; with `overwrite` one of them is `update_BRC` itself.
    """
    x_BRC = update_BRC.to(precision(update_BRC))
    norm_B11 = torch.linalg.vector_norm(x_BRC, dim=(1, 2), keepdim=True).clamp(min=EPS)
    x_BRC = x_BRC.div_(norm_B11) if overwrite else x_BRC / norm_B11
    spare_BRC = torch.empty_like(x_BRC)  # two buffers: on a CPU a new allocation costs as much as a product
    _, rows, columns = x_BRC.shape
    is_long = max(rows, columns) >= 2 * min(rows, columns) and x_BRC.dtype != torch.bfloat16
    for steps in MERGED if is_long else SINGLE:
        gram_BSS = x_BRC @ x_BRC.mT if rows <= columns else x_BRC.mT @ x_BRC
        constant, matrix_BSS = _polynomial(gram_BSS, steps)
        pair = (matrix_BSS, x_BRC) if rows <= columns else (x_BRC, matrix_BSS)
        torch.baddbmm(x_BRC, *pair, beta=constant, out=spare_BRC)
        x_BRC, spare_BRC = spare_BRC, x_BRC
    return x_BRC


def precision(tensor: Tensor) -> torch.dtype:
    """The dtype for orthogonalising a tensor: float64 for float64; else bf16 on GPUs with bf16 units, else fp32.

    On a CPU it is fp32 even where bf16 would be faster, so that results do not depend on the machine.
    """
    if tensor.dtype == torch.float64:
        return torch.float64
    fast = tensor.device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if fast else torch.float32


def _polynomial(gram_BSS: Tensor, steps: int) -> tuple[float, Tensor]:
    """The factor of x after that many steps, as (constant, matrix), given the Gram matrix of x.

    For a single step the constant is not added to the diagonal, because bf16 would round it.
    """
    first_BSS = torch.baddbmm(gram_BSS, gram_BSS, gram_BSS, beta=B, alpha=C)
    if steps == 1:
        return A, first_BSS
    first_BSS.diagonal(dim1=1, dim2=2).add_(A)
    constant, rest_BSS = _polynomial(first_BSS @ gram_BSS @ first_BSS, steps - 1)
    return 0.0, torch.baddbmm(first_BSS, rest_BSS, first_BSS, beta=constant)
