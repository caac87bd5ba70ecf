"""Power iteration on blocks that several processes hold together: what quacklr.spectral does, in shards.

W'W V is a sum over rows, so each process multiplies with the rows it has, and one all-reduce adds up. Where it has
parts of rows only, W V is a sum over columns, and has to be added up before: one more. The basis V is the same in all
processes, and the norms come from V'W'W V, which needs no further word between them.

Shapes: B blocks, R rows, C columns (the bias is one of them), V vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quacklr.core.blocks import BlockGroup
from quacklr.core.norms import FIRST_ITERATIONS, largest_singular_value, orthonormal, precision, random_basis
from quacklr.distributed.collectives import Groups, all_reduce_sums


class Placement(NamedTuple):
    """Where the rows of a piece stand in the whole of their run."""

    run: int
    blocks_B: Tensor
    rows_BR: Tensor
    columns_C: Tensor
    counts: bool  # of what several processes have, only one adds it to a sum over all of them


class Placements(list[Placement]):
    """Of every piece where it stands; and of every run over which groups it is cut, and over which its rows are."""

    def __init__(self, runs: Sequence[BlockGroup], groups: Sequence[Groups], of_columns: Sequence[Groups]) -> None:
        super().__init__()
        self.runs, self.groups, self.of_columns = runs, groups, of_columns


def spectral_norms(seats: Placements, pieces: list[Tensor], bases: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The norms of each run's blocks, and the bases for the next step; without bases it starts as spectral does."""
    pieces = [piece_BRC.to(precision(piece_BRC)) for piece_BRC in pieces]
    bases = [basis_BCV.to(precision(run.weight.param)) for run, basis_BCV in zip(seats.runs, bases, strict=False)]
    if not bases:
        bases = [_random_basis(run) for run in seats.runs]
        for _ in range(FIRST_ITERATIONS):
            bases = [orthonormal(applied_BCV) for applied_BCV in _applied(seats, pieces, bases)]
    applied = _applied(seats, pieces, bases)
    grams = [basis_BCV.mT @ applied_BCV for basis_BCV, applied_BCV in zip(bases, applied, strict=True)]
    return [largest_singular_value(gram_BVV) for gram_BVV in grams], [orthonormal(each) for each in applied]


def _random_basis(run: BlockGroup) -> Tensor:
    param = run.weight.param
    columns = sum(part.columns for part in run.weight.parts)
    return random_basis(*_size(run), columns).to(param.device, precision(param))


def _applied(seats: Placements, pieces: list[Tensor], bases: list[Tensor]) -> list[Tensor]:
    """W'W V of each run."""
    images = [
        piece_BRC @ bases[seat.run][seat.blocks_B][:, seat.columns_C]
        for seat, piece_BRC in zip(seats, pieces, strict=True)
    ]
    if any(seats.of_columns):
        images = _reduce_columns(seats, images, bases)
    applied = [torch.zeros_like(basis_BCV) for basis_BCV in bases]
    for seat, piece_BRC, image_BRV in zip(seats, pieces, images, strict=True):
        at = seat.blocks_B[:, None], seat.columns_C[None, :]
        if seat.counts:
            applied[seat.run].index_put_(at, piece_BRC.mT @ image_BRV, accumulate=True)
    return all_reduce_sums(applied, seats.groups)


def _reduce_columns(seats: Placements, images: list[Tensor], bases: list[Tensor]) -> list[Tensor]:
    """W V of the rows that are here, with what others have of them."""
    torn = [run for run, groups in enumerate(seats.of_columns) if groups]
    whole = {run: bases[run].new_zeros(*_size(seats.runs[run]), bases[run].shape[2]) for run in torn}
    for seat, image_BRV in zip(seats, images, strict=True):
        if seat.run in whole and seat.counts:
            whole[seat.run].index_put_((seat.blocks_B[:, None], seat.rows_BR), image_BRV, accumulate=True)
    whole = dict(zip(torn, all_reduce_sums(list(whole.values()), [seats.of_columns[run] for run in torn]), strict=True))
    return [
        whole[seat.run][seat.blocks_B[:, None], seat.rows_BR] if seat.run in whole else image_BRV
        for seat, image_BRV in zip(seats, images, strict=True)
    ]


def _size(run: BlockGroup) -> tuple[int, int]:
    """Blocks, and rows of each."""
    return len(run.blocks), int(run.weight.rows_of_block[run.blocks[0]])
