"""Whole blocks of sharded weights, for what needs all rows and columns of a block in one process: singular values.

A block is cut if no rank holds all of it. Every cut block has an owner, the rank that holds most of it, and one
all-to-all sends the parts of the block, or of its step, to the owner.
A rank sends at most its own shard. If no block is cut, nothing is sent.

    rank 0   head 0, half of head 1        sends this half
    rank 1   half of head 1, head 2        owner of head 1

Shapes: B blocks, R rows, C columns.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

Ranges = list[tuple[int, int]]


class BlockPart(NamedTuple):
    """What one rank holds of a block: the flat index of the block, and the ranges of its rows and columns."""

    block: int
    rows: Ranges
    columns: Ranges

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of rows and columns."""
        return _length(self.rows), _length(self.columns)

    @property
    def size(self) -> int:
        """The number of entries."""
        return math.prod(self.shape)

    def entries(self, width: int) -> Tensor:
        """The index of each entry in the block, whose rows have `width` entries."""
        rows, columns = (
            torch.cat([torch.arange(*each, device="cpu") for each in ranges]) for ranges in (self.rows, self.columns)
        )
        return (rows[:, None] * width + columns).flatten()


class BlockExchange:
    """The plan of the exchange. Its constructor is a collective call.

    Args:
        parts: for each of the local blocks, the parts of blocks that it holds; none if another rank sends a replica.
        shapes: for each block of the model, the number of its rows and columns.
        process_group: all ranks among which the blocks are sharded.
        device: of the result.
    """

    def __init__(
        self,
        parts: Sequence[Sequence[BlockPart]],
        shapes: Sequence[tuple[int, int]],
        process_group: Any,
        device: torch.device,
    ) -> None:
        self._process_group, self._device, self._total = process_group, device, len(shapes)
        whole = [bool(each) and each[0].shape == shapes[each[0].block] for each in parts]
        self._whole = [
            torch.tensor([part.block for part in each], device=device) if is_whole else None
            for each, is_whole in zip(parts, whole, strict=True)
        ]
        cut = [() if is_whole else each for each, is_whole in zip(parts, whole, strict=True)]
        self._sizes = [sum(part.size for part in each) for each in cut]
        sent = [part for each in cut for part in each]
        of_rank: list[list[BlockPart]] = [[] for _ in range(dist.get_world_size(process_group))]
        dist.all_gather_object(of_rank, sent, group=process_group)
        self._anything_cut = any(of_rank)
        owner, rank = owners(of_rank), dist.get_rank(process_group)
        to = _vector(owner[part.block] for part in sent).repeat_interleave(_vector(part.size for part in sent))
        self._send_order = to.argsort(stable=True).to(device, torch.int32)
        self._send_sizes = torch.bincount(to, minlength=len(of_rank)).tolist()
        received = [[part for part in each if owner[part.block] == rank] for each in of_rank]
        self._receive_sizes = [sum(part.size for part in each) for each in received]
        owned = sorted({part.block for each in received for part in each}, key=lambda block: (shapes[block], block))
        starts = accumulate((math.prod(shapes[block]) for block in owned), initial=0)
        start = dict(zip(owned, starts, strict=False))
        places = [part.entries(shapes[part.block][1]) + start[part.block] for each in received for part in each]
        self._receive_order = torch.cat([_vector(()), *places]).argsort().to(device, torch.int32)
        self._owned = [
            (torch.tensor(list(blocks), device=device), shape)
            for shape, blocks in groupby(owned, key=lambda block: shapes[block])
        ]

    def whole_blocks(self, rows: Sequence[Tensor | None]) -> list[tuple[Tensor, Tensor]]:
        """Flat indices and rows, (B, R, C), of the blocks that this rank owns. A collective call.

        `rows` are those of the local blocks, (B, R, C), or their steps; None for blocks that are not wanted.
        """
        pairs = zip(self._whole, rows, strict=True)
        found = [(blocks, each) for blocks, each in pairs if blocks is not None and each is not None]
        return [*found, *self._assembled(rows)] if self._anything_cut else found

    def flat(self, values: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
        """(total,): a flat vector from flat indices and values; 0 for blocks of other ranks, so that ranks can add."""
        flat = torch.zeros(self._total, device=self._device, dtype=torch.float32)
        for blocks, of_blocks in values:
            flat[blocks] = of_blocks.to(flat)
        return flat

    def _assembled(self, rows: Sequence[Tensor | None]) -> list[tuple[Tensor, Tensor]]:
        """The flat indices and the rows, (B, R, C), of the cut blocks that this rank owns."""
        none = torch.zeros(0, device=self._device, dtype=torch.float32)
        local = [
            none.new_zeros(size) if each is None else each.flatten().to(none)
            for each, size in zip(rows, self._sizes, strict=True)
            if size
        ]
        sent = torch.cat([none, *local]).index_select(0, self._send_order)
        received = sent.new_empty(sum(self._receive_sizes))
        dist.all_to_all_single(received, sent, self._receive_sizes, self._send_sizes, group=self._process_group)
        entries = received.index_select(0, self._receive_order)
        sizes = [len(blocks) * rows * columns for blocks, (rows, columns) in self._owned]
        return [
            (blocks, flat.view(len(blocks), *shape))
            for (blocks, shape), flat in zip(self._owned, entries.split(sizes), strict=True)
        ]


def owners(of_rank: Sequence[Sequence[BlockPart]]) -> dict[int, int]:
    """The owner of each cut block: the rank that holds most of it. If several hold equally much, the index decides."""
    held: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for rank, parts in enumerate(of_rank):
        for part in parts:
            held[part.block][rank] += part.size
    most = {block: [rank for rank in ranks if ranks[rank] == max(ranks.values())] for block, ranks in held.items()}
    return {block: ranks[block % len(ranks)] for block, ranks in most.items()}


def ranges(indices: Tensor) -> Ranges:
    """Indices as runs of consecutive numbers, (start, end), in their order."""
    numbers = indices.tolist()
    starts = [i for i in range(len(numbers)) if i == 0 or numbers[i] != numbers[i - 1] + 1]
    return [(numbers[i], numbers[j - 1] + 1) for i, j in zip(starts, [*starts[1:], len(numbers)], strict=True)]


def _length(ranges: Ranges) -> int:
    return sum(end - start for start, end in ranges)


def _vector(numbers: Iterable[int]) -> Tensor:
    return torch.tensor(list(numbers), dtype=torch.long, device="cpu")
