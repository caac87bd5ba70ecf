"""Compositional Muon (Tilde Research 2026): the step of each weight of a product depends on the other weight.

An attention reads two products of weights: queries times keys, and values times the output projection. For a head with
rows W and partner P of the same number of features, Muon's step orthogonalise(U) of an update U becomes

    step = 1/2 C^-1 orthogonalise(C^-1 U)        C = (P P' + damping)^(1/2)

so that the product changes by a matrix whose singular values are about equal, however large the partner is. The output
projection is orthogonalised as one matrix, all others by head. A key or value block that several query heads share has
the sum of their Gram matrices as partner, and its step is divided by their number. With `isotropic`, C is a number for
each head: the root of the mean eigenvalue.

Unlike Muon, the method has no factor that depends on the shape of a matrix.

Shapes: H blocks of a weight, D features, C columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quacklr.lab.optim.newton_schulz import orthogonalise, precision


class Factor(NamedTuple):
    """A weight of a product, and the number of blocks (heads) of its rows, or of its columns."""

    param: Tensor
    blocks: int
    by_columns: bool = False

    def split(self, matrix: Tensor) -> Tensor:
        """(H, D, C): the blocks of a matrix of the shape of the weight; D are the features of the product."""
        rows = matrix.mT if self.by_columns else matrix
        return rows.unflatten(0, (self.blocks, -1))

    def join(self, blocks_HDC: Tensor) -> Tensor:
        """The matrix of these blocks."""
        rows = blocks_HDC.flatten(0, 1)
        return rows.mT if self.by_columns else rows


@dataclass(frozen=True)
class Composition:
    """The products of a model, and the settings of the method."""

    products: list[tuple[Factor, Factor]]
    """The second weight of a product may have fewer blocks than the first: each is shared by equally many."""
    multiplier: float = 1.0
    """Factor of the learning rate."""
    damping: float = 0.01
    isotropic: bool = False

    def params(self) -> set[Tensor]:
        """All weights of the products."""
        return {factor.param for product in self.products for factor in product}

    def steps(self, update_of: Callable[[Tensor], Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Each weight with its step, before the learning rate. `update_of` gives the update of a weight (momentum).

        All steps are computed from the weights as they are before the first step.
        """
        found = []
        for many, few in self.products:
            shared = many.blocks // few.blocks
            of_many, of_few = (self._gram(factor) for factor in (many, few))
            roots_of_few = self._inverse_roots(of_few).repeat_interleave(shared, 0)
            roots_of_many = self._inverse_roots(of_many.unflatten(0, (few.blocks, shared)).sum(1))
            for factor, roots_HDD, part in ((many, roots_of_few, 1), (few, roots_of_many, shared)):
                step = self._step(factor, update_of(factor.param), roots_HDD)
                found.append((factor.param, step * (self.multiplier / (2 * part))))
        return iter(found)

    def _gram(self, factor: Factor) -> Tensor:
        """(H, D, D): the Gram matrices of the blocks of a weight."""
        blocks_HDC = factor.split(factor.param.detach()).to(precision(factor.param))
        return blocks_HDC @ blocks_HDC.mT

    def _inverse_roots(self, gram_HDD: Tensor) -> Tensor:
        """(H, D, D): (gram + damping)^(-1/2)."""
        if self.isotropic:
            mean_H = gram_HDD.diagonal(dim1=1, dim2=2).mean(1)
            eye_DD = torch.eye(gram_HDD.shape[1], dtype=gram_HDD.dtype, device=gram_HDD.device)
            return (mean_H + self.damping).rsqrt()[:, None, None] * eye_DD
        values_HD, vectors_HDD = torch.linalg.eigh(gram_HDD.float() if gram_HDD.dtype != torch.float64 else gram_HDD)
        roots_HD = (values_HD.clamp(min=0) + self.damping).rsqrt()
        return (vectors_HDD * roots_HD.unsqueeze(1)) @ vectors_HDD.mT

    @staticmethod
    def _step(factor: Factor, update: Tensor, roots_HDD: Tensor) -> Tensor:
        """The step of one weight; that of an output projection is orthogonalised as one matrix."""
        whitened_HDC = roots_HDD @ factor.split(update).to(roots_HDD.dtype)
        if factor.by_columns:
            blocks_HDC = orthogonalise(whitened_HDC.flatten(0, 1)[None])[0].unflatten(0, (factor.blocks, -1))
        else:
            blocks_HDC = orthogonalise(whitened_HDC)
        return factor.join(roots_HDD @ blocks_HDC.to(roots_HDD.dtype))
