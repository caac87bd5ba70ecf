"""Norms of blocks that several processes hold together: each adds up what it has, and an all-reduce does the rest.

    frobenius   the squares of what is here, by block: a number a block is sent
    spectral    W'W V of the rows that are here: 8 C numbers a block are sent (power.py)

One all-reduce for each dimension of the mesh along which something is cut, whatever the number of layers. What comes
out is the same in all processes, so rates are, and each moves its own rows by them.

Shapes: B blocks, R rows, C columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from quacklr.core.blocks import BlockGroup, Blocks, Copies, Memory, Piece
from quacklr.core.local import is_partial, is_sharded, shard_specs
from quacklr.core.norms import Norm, frobenius, spectral
from quacklr.core.path import LogitPath
from quacklr.core.sensitivity import Rule
from quacklr.core.weight import Weight
from quacklr.distributed.collectives import Groups, all_reduce_sums, union
from quacklr.distributed.sharded_spectral import Placement, Placements, spectral_norms


def blocks_of(weights: Sequence[Weight]) -> Blocks:
    """The blocks of some weights, whether all of them is here or not."""
    if any(is_sharded(part.param) for weight in weights for part in weight.parts):
        return ShardedBlocks(weights)
    return Blocks(weights)


def sensitivity(paths: Iterable[LogitPath], norm: Norm = frobenius) -> dict[Weight, Tensor]:
    """How far a unit change of each block can move a logit through one path: (blocks,) for each weight on the paths."""
    rule = Rule(paths, blocks_of)
    _, norms, _ = rule.blocks.measure(norm, rule.blocks.nothing())
    flat = rule.sensitivity(norms)
    return {weight: flat[rule.blocks.flat_index[first]] for weight, first in rule.canonical.items()}


class RunShard(NamedTuple):
    """Parts of a run that are cut alike: the weight and its bias, or one of the two."""

    run: int
    parts: tuple[Weight, ...]
    groups: Groups
    columns: Tensor  # which entries of [W b] are here


class ShardedBlocks(Blocks):
    """All blocks of some weights, of which this process may have some rows and columns only."""

    def __init__(self, weights: Iterable[Weight]) -> None:
        weights = list(weights)
        _validate_not_partial(weights)
        super().__init__(weights)
        sizes = [len(self.runs[share.run].blocks) for share in self.shares]
        places = [self.flat_index[run.weight][run.blocks] for run in (self.runs[share.run] for share in self.shares)]
        slots = torch.arange(sum(sizes), device="cpu").split(sizes)
        of_piece = [
            slots[share][seat.blocks_B.cpu()] for share, seat in zip(self._share_of_piece, self._seats, strict=True)
        ]
        self._sizes, self._place_of_slot = sizes, torch.cat(places).to(self.device)
        self._slot_of_norm = torch.cat([slots[0][:0], *of_piece]).to(self.device)
        self._place_of_norm = self._place_of_slot[self._slot_of_norm]

    def _pieces(self) -> list[Piece]:
        self.shares = [share for number, run in enumerate(self.runs) for share in shares_of(number, run)]
        groups = [union(share.groups for share in self.shares if share.run == run) for run in range(len(self.runs))]
        self._seats = Placements(self.runs, groups, [groups_of_columns(run.weight) for run in self.runs])
        self._share_of_piece: list[int] = []
        pieces = []
        for number, (run, parts, mine, columns) in enumerate(self.shares):
            weight, blocks = self.runs[run]
            counts = all(dist.get_rank(group) == 0 for group in groups[run] if group not in mine)
            for alike in alike_here(parts[0], blocks) if len(columns) else ():
                piece = Piece(weight, alike, parts)
                pieces.append(piece)
                self._share_of_piece.append(number)
                to, where = weight.param.device, torch.searchsorted(blocks, alike)
                self._seats.append(Placement(run, where.to(to), rows_of(piece).to(to), columns.to(to), counts))
        return pieces

    def split(self, flat: Tensor) -> Sequence[Tensor]:
        """What a flat vector has for each block of a piece, as (B, 1, 1)."""
        return flat[self._place_of_norm].view(-1, 1, 1).split([len(piece.blocks) for piece in self.pieces])

    def measure(self, norm: Norm, memory: Memory) -> tuple[Copies, list[Tensor], Memory]:
        """A copy of every piece, the norms of all blocks, and what the norm remembers. Every process must call it."""
        copies = [piece.copy() for piece in self.pieces]
        if norm is frobenius:
            return list(copies), [self._frobenius(copies)], memory
        if norm is spectral:
            known = [last for last in memory if last is not None]
            norms, bases = spectral_norms(self._seats, copies, known if len(known) == len(memory) else [])
            return list(copies), [norms_B.to(self.device, torch.float32) for norms_B in norms], list(bases)
        name = getattr(norm, "__name__", norm)
        raise ValueError(
            f"{self.runs[0].weight.name}: its parameter is sharded, and the norm {name} needs whole blocks; use "
            "quacklr.frobenius or quacklr.spectral"
        )

    def _frobenius(self, copies: list[Tensor]) -> Tensor:
        zeros = torch.zeros(len(self._place_of_slot), device=self.device, dtype=torch.float32)
        here = torch.cat([zeros[:0], *(frobenius(copy_BRC)[0].to(zeros) for copy_BRC in copies)])
        squares = zeros.index_add(0, self._slot_of_norm, here.square_())
        whole = torch.cat(all_reduce_sums(squares.split(self._sizes), [share.groups for share in self.shares]))
        return zeros[: self.total].index_add(0, self._place_of_slot, whole).sqrt_()


def shares_of(number: int, run: BlockGroup) -> Iterator[RunShard]:
    """The weight and its bias together if they are cut alike, otherwise one by one."""
    parts = run.weight.parts
    starts = [sum(part.columns for part in parts[:i]) for i in range(len(parts))]
    columns = [start + part.local_columns() for start, part in zip(starts, parts, strict=True)]
    groups = [tuple(cut.group for cut in shard_specs(part.param)) for part in parts]
    if are_alike(parts):
        yield RunShard(number, parts, groups[0], torch.cat(columns))
    else:
        yield from (RunShard(number, (part,), g, c) for part, g, c in zip(parts, groups, columns, strict=True))


def are_alike(parts: Sequence[Weight]) -> bool:
    """Whether every process has the same rows of all of them; by how they are cut, so that all say the same."""
    if not any(shard_specs(part.param) for part in parts) or len(parts) == 1:
        return True
    first, rest = parts[0], parts[1:]
    lie = [[(cut.group, part.dims == (cut.dim,), cut.factor) for cut in shard_specs(part.param)] for part in parts]
    same_rows = all(torch.equal(part.block_of_row, first.block_of_row) for part in rest)
    return same_rows and all(each == lie[0] for each in lie) and all(by_row for _, by_row, _ in lie[0])


def groups_of_columns(weight: Weight) -> Groups:
    """The groups that have parts of rows, or rows and their biases apart; none if every process has whole rows."""
    apart = not are_alike(weight.parts)
    return union(
        [[cut.group] for part in weight.parts for cut in shard_specs(part.param) if apart or cut.dim not in part.dims]
    )


def alike_here(part: Weight, blocks: Tensor) -> Iterator[Tensor]:
    """Of these blocks those that have a row here, by how many they have."""
    block_of_row = part.local_blocks()
    sizes = torch.bincount(block_of_row[block_of_row >= 0], minlength=part.blocks)[blocks]
    for size in sorted(set(sizes.tolist()) - {0}):
        yield blocks[sizes == size]


def rows_of(piece: Piece) -> Tensor:
    """(B, R): which rows of its blocks a piece has."""
    part = piece.columns[0].weight
    row_of_block = torch.empty(len(part.block_of_row), dtype=torch.long, device="cpu")
    for block in range(part.blocks):
        rows = (part.block_of_row == block).nonzero().squeeze(1)
        row_of_block[rows] = torch.arange(len(rows), device="cpu")
    return row_of_block[part.local_rows()][piece.columns[0].index.cpu()]


def _validate_not_partial(weights: Iterable[Weight]) -> None:
    for weight in weights:
        for part in weight.parts:
            if is_partial(part.param):
                raise ValueError(
                    f"{part.name}: its parameter is a sum that has not been added up over its processes (a Partial "
                    "DTensor); redistribute it first"
                )
