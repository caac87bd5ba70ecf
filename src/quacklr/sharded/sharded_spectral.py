"""The spectral norm of sharded blocks, by the same power iteration as quacklr.spectral.

W'W V is a sum over rows: each process multiplies its local rows, and one all-reduce adds the products. If rows are
sharded along their columns, W V is a sum over columns and needs another all-reduce before. The basis V is the same in
all processes, and the norms follow from V'W'W V without further communication.

Shapes: B blocks, R rows, C columns (the bias is one of them), V vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quacklr.core.blocks import BlockGroup
from quacklr.core.norms import FIRST_ITERATIONS, largest_singular_value, orthonormal, precision, random_basis
from quacklr.sharded.collectives import Groups, all_reduce_sums


class Placement(NamedTuple):
    """The indices of local rows and columns in their block group."""

    group: int  # index of the block group
    blocks_B: Tensor
    rows_BR: Tensor
    columns_C: Tensor
    is_counted: bool  # whether it is part of all-reduced sums: only one of several replicas is


class Placements(list[Placement]):
    """The placement of each of the local blocks; and for each block group the process groups it is sharded over.

    `column_groups` are the process groups over which its columns are sharded.
    """

    def __init__(
        self, groups: Sequence[BlockGroup], process_groups: Sequence[Groups], column_groups: Sequence[Groups]
    ) -> None:
        super().__init__()
        self.groups, self.process_groups, self.column_groups = groups, process_groups, column_groups


def spectral_norms(
    placements: Placements, local: list[Tensor], bases: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """The norms of each group's blocks, and the bases for the next step; `bases` is empty on the first call.

    `local` are the local rows, (B, R, C), of each placement.
    """
    local = [rows_BRC.to(precision(rows_BRC)) for rows_BRC in local]
    bases = [basis_BCV.to(precision(g.weight.param)) for g, basis_BCV in zip(placements.groups, bases, strict=False)]
    if not bases:
        bases = [_random_basis(group) for group in placements.groups]
        for _ in range(FIRST_ITERATIONS):
            bases = [orthonormal(product_BCV) for product_BCV in _products(placements, local, bases)]
    products = _products(placements, local, bases)
    grams = [basis_BCV.mT @ product_BCV for basis_BCV, product_BCV in zip(bases, products, strict=True)]
    return [largest_singular_value(gram_BVV) for gram_BVV in grams], [orthonormal(each) for each in products]


def _random_basis(group: BlockGroup) -> Tensor:
    param = group.weight.param
    columns = sum(part.columns for part in group.weight.parts)
    return random_basis(*_size(group), columns).to(param.device, precision(param))


def _products(placements: Placements, local: list[Tensor], bases: list[Tensor]) -> list[Tensor]:
    """W'W V of each group."""
    images = [
        rows_BRC @ bases[at.group][at.blocks_B][:, at.columns_C] for at, rows_BRC in zip(placements, local, strict=True)
    ]
    if any(placements.column_groups):
        images = _reduce_columns(placements, images, bases)
    products = [torch.zeros_like(basis_BCV) for basis_BCV in bases]
    for at, rows_BRC, image_BRV in zip(placements, local, images, strict=True):
        if at.is_counted:
            index = at.blocks_B[:, None], at.columns_C[None, :]
            products[at.group].index_put_(index, rows_BRC.mT @ image_BRV, accumulate=True)
    return all_reduce_sums(products, placements.process_groups)


def _reduce_columns(placements: Placements, images: list[Tensor], bases: list[Tensor]) -> list[Tensor]:
    """W V of the local rows, summed over the process groups that hold their other columns."""
    split = [i for i, process_groups in enumerate(placements.column_groups) if process_groups]
    sums = {i: bases[i].new_zeros(*_size(placements.groups[i]), bases[i].shape[2]) for i in split}
    for at, image_BRV in zip(placements, images, strict=True):
        if at.group in sums and at.is_counted:
            sums[at.group].index_put_((at.blocks_B[:, None], at.rows_BR), image_BRV, accumulate=True)
    reduced = all_reduce_sums(list(sums.values()), [placements.column_groups[i] for i in split])
    sums = dict(zip(split, reduced, strict=True))
    return [
        sums[at.group][at.blocks_B[:, None], at.rows_BR] if at.group in sums else image_BRV
        for at, image_BRV in zip(placements, images, strict=True)
    ]


def _size(group: BlockGroup) -> tuple[int, int]:
    """The number of blocks, and of rows in each."""
    return len(group.blocks), int(group.weight.rows_of_block[group.blocks[0]])
