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
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class BlockPart(NamedTuple):
    """What one rank holds of a block: the flat index of the block, and the indices of its rows and columns."""

    block: int
    rows: Tensor
    columns: Tensor

    @property
    def size(self) -> int:
        """The number of entries."""
        return len(self.rows) * len(self.columns)


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
        self._process_group, self._device = process_group, device
        size_of = [math.prod(shape) for shape in shapes]
        self._whole = [
            torch.tensor([part.block for part in each], device=device)
            if each and each[0].size == size_of[each[0].block]
            else None
            for each in parts
        ]
        cut = [each if whole is None else () for each, whole in zip(parts, self._whole, strict=True)]
        self._sizes = [sum(part.size for part in each) for each in cut]
        sent = [part for each in cut for part in each]
        of_rank: list[list[tuple[int, int]]] = [[] for _ in range(dist.get_world_size(process_group))]
        dist.all_gather_object(of_rank, [(part.block, part.size) for part in sent], group=process_group)
        self._anything_cut = any(of_rank)
        if not self._anything_cut:
            return
        owner, rank = owners(of_rank), dist.get_rank(process_group)
        owned: list[int] = []
        starts, filled = dict[int, int](), Counter[int]()  # where a block is in the memory of its owner
        for block in sorted(owner, key=lambda block: (shapes[block], block)):
            starts[block] = filled[owner[block]]
            filled[owner[block]] += size_of[block]
            owned += [block] if owner[block] == rank else []
        self._owned = [
            (torch.tensor(list(blocks), device=device), shape)
            for shape, blocks in groupby(owned, key=lambda block: shapes[block])
        ]
        none = torch.empty(0, dtype=torch.long, device="cpu")
        to = torch.cat([none, *(torch.full((part.size,), owner[part.block], device="cpu") for part in sent)])
        self._send_order = to.argsort(stable=True).to(device, torch.int32)
        self._send_sizes = torch.bincount(to, minlength=len(of_rank)).tolist()
        self._receive_sizes = [sum(size for block, size in each if owner[block] == rank) for each in of_rank]
        places = [
            (starts[block] + rows[:, None] * shapes[block][1] + columns).flatten() for block, rows, columns in sent
        ]
        self._receive_order = self._received(torch.cat([none, *places]).to(device)).argsort().to(torch.int32)

    def whole_blocks(self, rows: Sequence[Tensor | None]) -> list[tuple[Tensor, Tensor]]:
        """Flat indices and rows, (B, R, C), of the blocks that this rank owns. A collective call.

        `rows` are those of the local blocks, (B, R, C), or their steps; None for blocks that are not wanted.
        """
        pairs = zip(self._whole, rows, strict=True)
        found = [(blocks, each) for blocks, each in pairs if blocks is not None and each is not None]
        if not self._anything_cut:
            return found
        none = torch.zeros(0, device=self._device, dtype=torch.float32)
        local = [
            none.new_zeros(size) if each is None else each.flatten().to(none)
            for each, size in zip(rows, self._sizes, strict=True)
            if size
        ]
        entries = self._received(torch.cat([none, *local])).index_select(0, self._receive_order)
        of_shapes = entries.split([len(blocks) * math.prod(shape) for blocks, shape in self._owned])
        for (blocks, shape), flat in zip(self._owned, of_shapes, strict=True):
            found.append((blocks, flat.view(len(blocks), *shape)))
        return found

    def _received(self, entries: Tensor) -> Tensor:
        """What all ranks send to this one of their cut blocks."""
        sent = entries.index_select(0, self._send_order)
        received = sent.new_empty(sum(self._receive_sizes))
        dist.all_to_all_single(received, sent, self._receive_sizes, self._send_sizes, group=self._process_group)
        return received


def owners(of_rank: Sequence[Sequence[tuple[int, int]]]) -> dict[int, int]:
    """The owner of each cut block: the rank that holds most of it. If several hold equally much, the index decides.

    `of_rank` has for each rank the blocks and sizes of its parts.
    """
    held: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for rank, parts in enumerate(of_rank):
        for block, size in parts:
            held[block][rank] += size
    most = {block: [rank for rank in ranks if ranks[rank] == max(ranks.values())] for block, ranks in held.items()}
    return {block: ranks[block % len(ranks)] for block, ranks in most.items()}
