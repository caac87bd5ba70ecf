"""The blocks of a model's weights: copy their rows, compute their norms, and scale the step that they took.

Norms, sensitivities and rates are flat vectors with one entry for each block. A block has the same index in all of
them. Rows are read through a view of the parameter. The rows of all blocks of one size are copied into one tensor, with
the bias as a last column: the number of operations does not grow with the number of layers.

Shapes: B blocks, R rows, C columns.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from functools import cache, reduce
from typing import NamedTuple

import torch
from torch import Tensor

from quacklr.core.local import Box, is_sharded, local_boxes
from quacklr.core.norms import Norm, frobenius, gram, largest_singular_values, precision
from quacklr.core.weight import Weight


class BlockRows:
    """The rows of some blocks that are in a box of a parameter, with the same number of rows in every block.

    If the rows are at regular distances, as in every common layout, they are read and written through a view.
    Otherwise they are gathered into a copy, and `write` writes the copy back.
    """

    def __init__(self, weight: Weight, blocks: Tensor, box: Box) -> None:
        block_of_row = weight.blocks_in(box)
        index = torch.stack([(block_of_row == block).nonzero().squeeze(1) for block in blocks])
        self.weight, self.tensor, self.box = weight, weight.param, box
        self.sharded = is_sharded(weight.param)
        self.index, self.grid = index.to(weight.param.device), _grid(index)
        self.shape = tuple(weight.param.shape)
        self.size = (*index.shape, math.prod(weight.rows_first(box).shape[1:]))
        self._view: Tensor | None = None  # created on the first read
        self._view_of: object = None

    def read(self) -> Tensor:
        """(B, R, C): a view of the rows, or a copy if they are at irregular distances.

        The view is cached while the tensor has the same memory, dtype, shape and strides.
        """
        data = self.box.tensor() if self.sharded else self.tensor
        view_of = data.data_ptr(), data.dtype, data.shape, data.stride()
        if view_of != self._view_of:
            self._view, self._view_of = self._new_view(), view_of
        return self._view if self._view is not None else self.weight.rows_first(self.box)[self.index].reshape(self.size)

    def write(self, rows_BRC: Tensor) -> None:
        """Write back what `read` returned and has changed since: needed only if it was a copy."""
        if self._view is None:
            tensor = self.weight.rows_first(self.box)
            tensor[self.index] = rows_BRC.view(*self.index.shape, *tensor.shape[1:])

    def _new_view(self) -> Tensor | None:
        """The view, or None if strides cannot describe it."""
        if tuple(self.tensor.shape) != self.shape:
            raise ValueError(
                f"{self.weight.name}: its parameter has shape {tuple(self.tensor.shape)} now, and had {self.shape} "
                "when QuacK was attached; attach a new one"
            )
        rows = self.weight.rows_first(self.box)
        try:
            matrix = rows.view(len(rows), self.size[2])
        except RuntimeError:  # the entries of a row are at irregular distances
            return None
        if self.grid is None:
            return None
        first, *steps = (step * matrix.stride(0) for step in self.grid)
        return matrix.as_strided(self.size, (*steps, matrix.stride(1)), matrix.storage_offset() + first)


def _grid(index: Tensor) -> tuple[int, int, int] | None:
    """The first row, the step to the next block, and the step to the next row of a block; None if steps differ."""
    steps = [index.diff(dim=dim).unique().tolist() for dim in (0, 1)]
    if max(map(len, steps)) > 1 or min(steps[0], default=0) < 0:  # torch has no negative strides
        return None
    return int(index[0, 0]), sum(steps[0]), sum(steps[1])  # of one block or row there is no step


class LocalBlocks:
    """Blocks of one weight that have the same number of local rows; almost always all of its blocks.

    `index` has their flat indices. `parts` are the parameters whose rows it reads, each with the box that they are in:
    by default the weight and its bias, which are whole. `kind` is the same for all that are copied into one tensor.
    """

    def __init__(self, weight: Weight, blocks: Tensor, index: Tensor, parts: Sequence[tuple[Weight, Box]] = ()) -> None:
        self.weight, self.blocks, self.index = weight, blocks, index
        parts = parts or [(part, local_boxes(part.param)[0]) for part in weight.parts]
        self.parts = [BlockRows(part, blocks, box) for part, box in parts]  # the columns of [W b]
        self.tensors = [id(rows.tensor) if weight.rated else None for rows in self.parts]
        columns = tuple((rows.size[2], rows.tensor.dtype) for rows in self.parts)
        self.kind = self.parts[0].size[1], columns, weight.param.device, weight.dims[0] == 0

    def read(self) -> Tensor:
        """(B, R, C): the rows as they are now; a view if possible."""
        parts_BRC = [rows.read() for rows in self.parts]
        return torch.cat(parts_BRC, 2) if len(parts_BRC) > 1 else parts_BRC[0]


class Copy(NamedTuple):
    """The rows of a stack at some time."""

    stack: Stack
    rows: Tensor  # (B, R, C)
    parts: list[Tensor]  # views of it: one for each of `stack.parts`

    def by_weight(self) -> Iterator[tuple[LocalBlocks, Tensor]]:
        """The rows of each weight."""
        return zip(self.stack.local, self.rows.split(self.stack.counts), strict=True)


Copies = list[Copy]


class Stack:
    """Blocks of one size, of any number of weights. One operation copies, measures or scales all of them."""

    def __init__(self, local: Sequence[LocalBlocks]) -> None:
        self.local, self.counts = local, [len(each.blocks) for each in local]
        self.index = torch.cat([each.index for each in local])
        self.widths = [rows.size[2] for rows in local[0].parts]
        self.parts = [part for same in zip(*(each.parts for each in local), strict=True) for part in same]
        self.tensors = [tensor for same in zip(*(each.tensors for each in local), strict=True) for tensor in same]
        self.size = len(self.index), local[0].parts[0].size[1], sum(self.widths)
        self.order = (0, 1, 2) if local[0].weight.dims[0] == 0 else (2, 0, 1)  # of the dimensions in memory
        self._spares: defaultdict[object, list[Copy]] = defaultdict(list)  # memory for the next copies

    def copy(self, dtype: torch.dtype | None = None) -> Copy:
        """A copy of the rows, with the memory layout of the parameters."""
        parts_BRC = [part.read() for part in self.parts]
        kind = dtype or reduce(torch.promote_types, {each.dtype for each in parts_BRC}), parts_BRC[0].device
        copy = self._spares[kind].pop() if self._spares[kind] else self._new_copy(*kind)
        torch._foreach_copy_(copy.parts, parts_BRC)
        return copy

    def _new_copy(self, dtype: torch.dtype, device: torch.device) -> Copy:
        copy_BRC = torch.empty_permuted(self.size, self.order, dtype=dtype, device=device)
        columns_BRC = copy_BRC.split_with_sizes(self.widths, 2)
        return Copy(self, copy_BRC, [part for each in columns_BRC for part in each.split_with_sizes(self.counts)])

    def keep(self, copy: Copy) -> None:
        """On the CPU, keep the memory for the next copy: allocating pages costs more than copying."""
        if copy.rows.device.type == "cpu":
            self._spares[copy.rows.dtype, copy.rows.device].append(copy)

    def gram_of_step(self, old: Copy) -> Tensor:
        """(B, S, S): the Gram matrices of now - old."""
        step = self.copy(precision(old.rows))
        gram_BSS = gram(step.rows.sub_(old.rows))
        self.keep(step)
        return gram_BSS

    def scale_step(self, old: Copy, rates: Tensor, tensors: Set[int]) -> None:
        """Set the rows of these tensors (by id) to old + rate * (new - old); exactly to `new` where the rate is 1.

        The memory of `old` is used for the result.
        """
        moved = [i for i, tensor in enumerate(self.tensors) if tensor in tensors]
        if not moved:
            return
        new, scaled = [self.parts[i].read() for i in moved], old
        rate_B11 = rates[self.index].to(old.rows.device, precision(old.rows)).view(-1, 1, 1)
        if old.rows.dtype == rate_B11.dtype:
            of_parts = rate_B11.split_with_sizes(self.counts) * len(self.widths)
            ends, weights = [each.to(old.rows.dtype) for each in new], [of_parts[i] for i in moved]
            torch._foreach_lerp_([old.parts[i] for i in moved], ends, weights)
        else:  # in fp32, since a rate in bf16 would be off by up to 0.2 %
            scaled = self.copy(torch.float32)
            torch.lerp(old.rows.to(torch.float32), scaled.rows, rate_B11, out=scaled.rows)
            self.keep(scaled)
        torch._foreach_copy_(new, [scaled.parts[i] for i in moved])
        for i, each in zip(moved, new, strict=True):
            self.parts[i].write(each)


def by_size(blocks: Tensor, sizes: Tensor) -> list[Tensor]:
    """The blocks of each size, smallest first, without those of size 0."""
    return [blocks[sizes == size] for size in sizes.unique() if size]


class Blocks:
    """All blocks of some weights, in `groups` of one weight and one number of rows; in flat vectors in this order."""

    def __init__(self, weights: Iterable[Weight]) -> None:
        self.groups = [
            (weight, blocks)
            for weight in weights
            for blocks in by_size(torch.arange(weight.blocks, device="cpu"), weight.rows_of_block)
        ]
        self.flat_index: dict[Weight, Tensor] = {}
        self.total = 0
        for weight, blocks in self.groups:
            index = self.flat_index.setdefault(weight, torch.empty(weight.blocks, dtype=torch.long, device="cpu"))
            index[blocks] = torch.arange(self.total, self.total + len(blocks), device="cpu")
            self.total += len(blocks)
        self.device = self.groups[0][0].param.device
        self.zeros = torch.zeros(self.total, device=self.device, dtype=torch.float32)
        self.local = self._local_blocks()
        self._stacks = cache(self._new_stacks)

    def _local_blocks(self) -> list[LocalBlocks]:
        return [LocalBlocks(weight, b, self.flat_index[weight][b].to(self.device)) for weight, b in self.groups]

    def _new_stacks(self, tensors: frozenset[int] | None) -> list[Stack]:
        """The stacks of all blocks; or only of those that have rows of these tensors (by id)."""
        same_kind = defaultdict[object, list[LocalBlocks]](list)
        for each in self.local:
            if tensors is None or not tensors.isdisjoint(each.tensors):
                same_kind[each.kind].append(each)
        return [Stack(same) for same in same_kind.values()]

    def copy(self, tensors: Set[int] | None = None) -> Copies:
        """Copies of the rows of these tensors (by id); without `tensors`, of all."""
        return [stack.copy() for stack in self._stacks(None if tensors is None else frozenset(tensors))]

    def have_moved(self, copies: Copies) -> bool:
        """Whether any row differs from its copy. Waits for the device."""
        pairs = (pair for copy in copies for pair in zip(copy.stack.parts, copy.parts, strict=True))
        return any(not torch.equal(part.read().to(old.dtype), old) for part, old in pairs)

    def measure(self, norm: Norm) -> tuple[Copies, Tensor]:
        """Copies of all rows, and the norms of all blocks."""
        copies = self.copy()
        return copies, self._flat((copy.stack.index, norm(copy.rows)) for copy in copies)

    def measure_step(self, copies: Copies) -> tuple[Tensor, Tensor]:
        """For all blocks: Frobenius norms before a step, and upper bounds of the largest singular values of the step.

        `copies` are the rows before the step. Blocks that have none did not step, so their step is 0.
        """
        copied = {each for copy in copies for each in copy.stack.local}
        norms = [(copy.stack.index, frobenius(copy.rows)) for copy in copies]
        norms += [(each.index, frobenius(each.read())) for each in self.local if each not in copied]
        steps = largest_singular_values([copy.stack.gram_of_step(copy) for copy in copies])
        return self._flat(norms), self._flat(zip([copy.stack.index for copy in copies], steps, strict=True))

    def _flat(self, values: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
        """(total,): a flat vector from flat indices and values; 0 for all other blocks."""
        flat = self.zeros
        for index, of_blocks in values:
            flat = flat.index_copy(0, index, of_blocks.to(flat))
        return flat

    def scale_step(self, copies: Copies, rates: Tensor, tensors: Set[int]) -> None:
        """Set every row of these tensors (by id) to old + rate of its block * (new - old)."""
        for copy in copies:
            copy.stack.scale_step(copy, rates, tensors)
            copy.stack.keep(copy)
