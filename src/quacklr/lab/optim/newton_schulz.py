"""Orthogonalise matrices: U S V' becomes about U V', in five steps of a quintic, x <- (a + b x x' + c (x x')^2) x.

A step multiplies by a polynomial of the Gram matrix x x', and so does a run of steps: of a matrix much longer than
wide it is cheaper to multiply small polynomials and touch x once a run. Rounding errors of a Gram matrix grow twelve
times a step, so a run is three steps at most: in fp32 the result is then as exact as step by step (five in a run lose
two digits). In bf16 it would not be, so there it is step by step.

Shapes: B matrices, R rows, C columns, S the smaller of R and C.
"""

from __future__ import annotations

import torch
from torch import Tensor

A, B, C = 3.4445, -4.7750, 2.0315  # Keller Jordan's, which are torch.optim.Muon's
EPS = 1e-7  # smallest norm to divide by
STEP_BY_STEP, RUNS = (1, 1, 1, 1, 1), (3, 2)


def orthogonalise(update_BRC: Tensor, *, overwrite: bool = False) -> Tensor:
    """Each matrix with its singular values moved to 0.68 to 1.21; those below 0.0015 of its norm only up to 485 fold.

    In the dtype that `precision` says. The same twice, bitwise; on a CPU a matrix also gives the same bits whatever
    the others in its batch are (tests hold that for MKL; cuBLAS may take another kernel for another batch). About
    five arrays of this size are held at once, one of them `update_BRC` itself if it may be overwritten.
    """
    x_BRC = update_BRC.to(precision(update_BRC))
    norm_B11 = torch.linalg.vector_norm(x_BRC, dim=(1, 2), keepdim=True).clamp(min=EPS)
    x_BRC = x_BRC.div_(norm_B11) if overwrite else x_BRC / norm_B11
    spare_BRC = torch.empty_like(x_BRC)  # x moves to and fro: on a CPU fresh pages cost as much as a product
    _, rows, columns = x_BRC.shape
    is_long = max(rows, columns) >= 2 * min(rows, columns) and x_BRC.dtype != torch.bfloat16
    for steps in RUNS if is_long else STEP_BY_STEP:
        gram_BSS = x_BRC @ x_BRC.mT if rows <= columns else x_BRC.mT @ x_BRC
        constant, matrix_BSS = _polynomial(gram_BSS, steps)
        pair = (matrix_BSS, x_BRC) if rows <= columns else (x_BRC, matrix_BSS)
        torch.baddbmm(x_BRC, *pair, beta=constant, out=spare_BRC)
        x_BRC, spare_BRC = spare_BRC, x_BRC
    return x_BRC


def precision(tensor: Tensor) -> torch.dtype:
    """What a matrix is orthogonalised in: bf16 on a GPU that has units for it, elsewhere fp32, and float64 if it is.

    A CPU always takes fp32, even one that is faster in bf16, so that results do not depend on the machine.
    """
    if tensor.dtype == torch.float64:
        return torch.float64
    fast = tensor.device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if fast else torch.float32


def _polynomial(gram_BSS: Tensor, steps: int) -> tuple[float, Tensor]:
    """What x is multiplied by in that many steps, given its Gram matrix: a constant, plus a matrix.

    After one step they stay apart, since a diagonal in bf16 would lose the digits of the constant.
    """
    first_BSS = torch.baddbmm(gram_BSS, gram_BSS, gram_BSS, beta=B, alpha=C)
    if steps == 1:
        return A, first_BSS
    first_BSS.diagonal(dim1=1, dim2=2).add_(A)
    constant, rest_BSS = _polynomial(first_BSS @ gram_BSS @ first_BSS, steps - 1)
    return 0.0, torch.baddbmm(first_BSS, rest_BSS, first_BSS, beta=constant)
