"""Norms of sharded blocks: each process computes a sum over its local shard, and an all-reduce adds the sums.

    frobenius     sum of squares: one number for each block is sent
    other norms   need whole blocks, so the parts of cut blocks are sent too (block_exchange.py)

There is one all-reduce over all processes among which weights are sharded, whatever the number of layers. The norms,
and so the rates, are the same in all processes, and each process scales the step of its local rows.

Shapes: B blocks, R rows, C columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, compress

import torch
import torch.distributed as dist
from torch import Tensor

from quacklr.core.blocks import Blocks, Copies, LocalBlocks, by_size
from quacklr.core.local import Box, is_partial, is_sharded, local_boxes, shard_groups
from quacklr.core.norms import Norm, frobenius, gram, largest_singular_values
from quacklr.core.path import LogitPath
from quacklr.core.sensitivity import CompiledPaths
from quacklr.core.weight import Weight
from quacklr.sharded.block_exchange import BlockExchange, BlockPart
from quacklr.sharded.collectives import merged_group


def blocks_of(weights: Sequence[Weight]) -> Blocks:
    """The blocks of some weights, which may be sharded."""
    sharded = any(is_sharded(part.param) for weight in weights for part in weight.parts)
    return ShardedBlocks(weights) if sharded else Blocks(weights)


def sensitivity(paths: Iterable[LogitPath], norm: Norm = frobenius) -> dict[Weight, Tensor]:
    """How far a unit change of each block can move a logit through one path: (blocks,) for each weight on the paths."""
    compiled = CompiledPaths(paths, blocks_of)
    _, norms = compiled.blocks.measure(norm)
    flat = compiled.sensitivity(norms)
    return {weight: flat[compiled.blocks.flat_index[first]] for weight, first in compiled.canonical.items()}


class ShardedBlocks(Blocks):
    """All blocks of some weights, of which this process holds some rows and columns."""

    def __init__(self, weights: Iterable[Weight]) -> None:
        weights = list(weights)
        parts = [part for weight in weights for part in weight.parts]
        for part in parts:
            if is_partial(part.param):
                raise ValueError(
                    f"{part.name}: its parameter is a sum that has not been added up over its processes (a Partial "
                    "DTensor); redistribute it first"
                )
        self._process_groups = list(dict.fromkeys(group for part in parts for group in shard_groups(part.param)))
        self._all_ranks = merged_group(self._process_groups)
        super().__init__(weights)
        none = torch.empty(0, dtype=torch.long, device=self.device)
        self._flat_of_counted = torch.cat([none, *compress((each.index for each in self.local), self._counted)])

    def _local_blocks(self) -> list[LocalBlocks]:
        """LocalBlocks for each shard of a block group and number of local rows."""
        self._columns: list[Tensor] = []  # of each, the local columns of [W b]
        self._counted: list[bool] = []  # whether sums over ranks count it; they count only one of several replicas
        local = []
        for weight, blocks in self.groups:
            for parts, columns in shards_of(weight):
                (part, box), *_ = parts
                block_of_row, own_groups = part.blocks_in(box), shard_groups(part.param)
                sizes = torch.bincount(block_of_row[block_of_row >= 0], minlength=weight.blocks)[blocks]
                counted = all(dist.get_rank(other) == 0 for other in self._process_groups if other not in own_groups)
                for same_size in by_size(blocks, sizes) if len(columns) else ():
                    index = self.flat_index[weight][same_size].to(self.device)
                    local.append(LocalBlocks(weight, same_size, index, parts))
                    self._columns.append(columns)
                    self._counted.append(counted)
        return local

    def measure(self, norm: Norm) -> tuple[Copies, Tensor]:
        """Copies of the local rows, and the norms of all blocks. A collective call."""
        copies = self.copy()
        rows = dict(pair for copy in copies for pair in copy.by_weight())
        if norm is frobenius:
            return copies, self._sum(self._squares(rows)).sqrt_()
        whole = self._exchange.whole_blocks([rows[each] for each in self.local])
        return copies, self._sum(self._flat((blocks, norm(rows_BRC)) for blocks, rows_BRC in whole))

    def measure_step(self, copies: Copies) -> tuple[Tensor, Tensor]:
        """As for whole weights. Takes two collectives: an all-to-all (block_exchange.py) and an all-reduce."""
        old = dict(pair for copy in copies for pair in copy.by_weight())
        steps = [each.read() - old[each] if each in old else None for each in self.local]
        whole = self._exchange.whole_blocks(steps)
        largest = largest_singular_values([gram(step_BRC) for _, step_BRC in whole])
        values = self._flat(zip([blocks for blocks, _ in whole], largest, strict=True))
        sums = self._sum(torch.cat([self._squares(old), values]))
        return sums[: self.total].sqrt(), sums[self.total :]

    @cached_property
    def _exchange(self) -> BlockExchange:
        """The exchange among all ranks. Making it is a collective call."""
        parts: list[list[BlockPart]] = []
        for each, columns, counted in zip(self.local, self._columns, self._counted, strict=True):
            weight, box, index = each.parts[0].weight, each.parts[0].box, each.parts[0].index.cpu()
            parts.append([])
            held = zip(each.index.tolist(), each.blocks, weight.rows_in(box)[index], strict=True)
            for place, block, rows in held if counted else ():
                of_block = (weight.block_of_row == block).nonzero().squeeze(1)
                parts[-1].append(BlockPart(place, torch.searchsorted(of_block, rows), columns))
        shapes: list[tuple[int, int]] = []
        for weight, blocks in self.groups:
            shape = int(weight.rows_of_block[blocks[0]]), sum(part.columns for part in weight.parts)
            shapes += [shape] * len(blocks)
        return BlockExchange(parts, shapes, self._all_ranks, self.device)

    def _sum(self, flat: Tensor) -> Tensor:
        if self._process_groups:
            dist.all_reduce(flat := flat.clone(), group=self._all_ranks)
        return flat

    def _squares(self, copied: Mapping[LocalBlocks, Tensor]) -> Tensor:
        """(total,): for each block, the sum of squares of its local rows, without those that another rank counts."""
        rows = (copied[each] if each in copied else each.read() for each in compress(self.local, self._counted))
        norms = torch.cat([self.zeros[:0], *(frobenius(rows_BRC).to(self.zeros) for rows_BRC in rows)])
        return self.zeros.index_add(0, self._flat_of_counted, norms.square_())


def shards_of(weight: Weight) -> list[tuple[list[tuple[Weight, Box]], Tensor]]:
    """The boxes of a weight and its bias, each with its columns of [W b]; together, if they have the same rows."""
    boxes = [(part, box) for part in weight.parts for box in local_boxes(part.param)]
    starts = dict(zip(weight.parts, accumulate((part.columns for part in weight.parts), initial=0), strict=False))
    columns = [starts[part] + part.columns_in(box) for part, box in boxes]
    if [part for part, _ in boxes] == list(weight.parts) and all(
        shard_groups(part.param) == shard_groups(weight.param)
        and torch.equal(part.rows_in(box), weight.rows_in(boxes[0][1]))
        and torch.equal(part.block_of_row, weight.block_of_row)
        for part, box in boxes[1:]
    ):
        return [(boxes, torch.cat(columns))]
    return [([box], held) for box, held in zip(boxes, columns, strict=True)]
