"""The blocks of a model's weights: copy their rows, compute their norms, and scale the step that they took.

Norms, sensitivities and rates are flat vectors with one entry for each block. A block has the same index in all of
them. Rows are read through a view of the parameter, and copied with the bias as a last column.

Shapes: B blocks, R rows, C columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence, Set
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from quacklr.core.local import Box, is_sharded, local_boxes
from quacklr.core.norms import Norm, frobenius, gram, largest_singular_values
from quacklr.core.weight import Weight

Copies = list[Tensor | None]


class BlockRows:
    """The rows of some blocks that are in a box of a parameter, with the same number of rows in every block.

    If the rows are at regular distances, as in every common layout, they are read and written through a view.
    Otherwise they are gathered into a copy, and `scale_step` writes the copy back.
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

    def scale_step(self, old_BRC: Tensor, rate_B11: Tensor) -> None:
        """Set the rows to old + rate * (new - old); exactly to `new` where the rate is 1."""
        new_BRC = self.read()
        if new_BRC.dtype in (torch.float32, torch.float64):
            torch.lerp(old_BRC.to(new_BRC.dtype), new_BRC, rate_B11.to(new_BRC.dtype), out=new_BRC)
        else:  # in fp32, since a rate in bf16 would be off by up to 0.2 %
            new_BRC.copy_(torch.lerp(old_BRC.to(torch.float32), new_BRC.to(torch.float32), rate_B11))
        if self._view is None:
            tensor = self.weight.rows_first(self.box)
            tensor[self.index] = new_BRC.view(*self.index.shape, *tensor.shape[1:])

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

    `parts` are the parameters whose rows it reads, each with the box that they are in: by default the weight and its
    bias, which are whole.
    """

    def __init__(self, weight: Weight, blocks: Tensor, parts: Sequence[tuple[Weight, Box]] | None = None) -> None:
        self.weight, self.blocks, self.rows_are_contiguous = weight, blocks, weight.dims[0] == 0
        parts = parts or [(part, local_boxes(part.param)[0]) for part in weight.parts]
        self.parts = [BlockRows(part, blocks, box) for part, box in parts]  # the columns of [W b]
        self.tensors = {id(rows.tensor) for rows in self.parts} if weight.rated else set[int]()
        self._spare: Tensor | None = None  # memory for the next copy

    def copy(self) -> Tensor:
        """(B, R, C): a copy of the rows, with the memory layout of the parameter."""
        parts_BRC = [rows.read() for rows in self.parts]
        out, self._spare = self._spare, None
        if out is not None and out.dtype != reduce(torch.promote_types, [part_BRC.dtype for part_BRC in parts_BRC]):
            out = None
        if out is not None and len(parts_BRC) == 1:
            return out.copy_(parts_BRC[0])
        if self.rows_are_contiguous:
            return torch.cat(parts_BRC, 2, out=out)
        out_CBR = out.permute(2, 0, 1) if out is not None else None
        return torch.cat([part_BRC.permute(2, 0, 1) for part_BRC in parts_BRC], out=out_CBR).permute(1, 2, 0)

    def read(self) -> Tensor:
        """(B, R, C): the rows as they are now; a view if possible."""
        parts_BRC = [rows.read() for rows in self.parts]
        return torch.cat(parts_BRC, 2) if len(parts_BRC) > 1 else parts_BRC[0]

    def scale_step(self, old_BRC: Tensor, rate_B11: Tensor, tensors: Set[int]) -> None:
        """Set the rows of these tensors (by id) to old + rate * (new - old).

        On the CPU, keep the memory of `old_BRC` for the next copy: allocating pages costs more than copying.
        """
        widths, moved = [rows.size[2] for rows in self.parts], self.tensors & tensors
        copies = old_BRC.split_with_sizes(widths, 2) if len(widths) > 1 else (old_BRC,)
        for rows, old in zip(self.parts, copies, strict=True):
            if id(rows.tensor) in moved:
                rows.scale_step(old, rate_B11)
        if old_BRC.device.type == "cpu":
            self._spare = old_BRC


def by_size(blocks: Tensor, sizes: Tensor) -> Iterator[Tensor]:
    """The blocks of each size, smallest first, without those of size 0."""
    for size in sorted(set(sizes.tolist()) - {0}):
        yield blocks[sizes == size]


class Blocks:
    """All blocks of some weights.

    `groups` are the blocks of a weight that have the same number of rows, almost always all of them. In flat vectors
    the blocks are in this order.
    """

    def __init__(self, weights: Iterable[Weight]) -> None:
        self.groups = [
            (weight, blocks)
            for weight in weights
            for blocks in by_size(torch.arange(weight.blocks, device="cpu"), weight.rows_of_block)
        ]
        self.local = self._local_blocks()
        self.flat_index: dict[Weight, Tensor] = {}
        self.total = 0
        for weight, blocks in self.groups:
            index = self.flat_index.setdefault(weight, torch.empty(weight.blocks, dtype=torch.long, device="cpu"))
            index[blocks] = torch.arange(self.total, self.total + len(blocks), device="cpu")
            self.total += len(blocks)
        self.device = self.groups[0][0].param.device
        self._split: tuple[Tensor, Sequence[Tensor]] | None = None
        self._scratch: dict[Any, Tensor] = {}

    def _local_blocks(self) -> list[LocalBlocks]:
        return [LocalBlocks(weight, blocks) for weight, blocks in self.groups]

    def split(self, flat: Tensor) -> Sequence[Tensor]:
        """A flat vector as (B, 1, 1) views, one for each of `local`."""
        if self._split is None or self._split[0] is not flat:
            self._split = flat, flat.view(-1, 1, 1).split_with_sizes([len(each.blocks) for each in self.local])
        return self._split[1]

    def copy(self, tensors: Set[int]) -> Copies:
        """Copies of the rows of these tensors (by id), one for each of `local`; None for other tensors."""
        return [None if each.tensors.isdisjoint(tensors) else each.copy() for each in self.local]

    def have_moved(self, copies: Copies) -> bool:
        """Whether any row differs from its copy. Waits for the device."""
        pairs = zip(self.local, copies, strict=True)
        return any(not torch.equal(each.read(), old) for each, old in pairs if old is not None)

    def measure(self, norm: Norm) -> tuple[Copies, list[Tensor]]:
        """Copies of all rows, and the norms of all blocks.

        The norm of each copy is computed as soon as the copy is made, while it is in the CPU's cache.
        """
        pairs = [(copy_BRC, norm(copy_BRC)) for copy_BRC in map(LocalBlocks.copy, self.local)]
        return [copy_BRC for copy_BRC, _ in pairs], [norm_B.to(self.device, torch.float32) for _, norm_B in pairs]

    def measure_step(self, copies: Copies) -> tuple[Tensor, Tensor]:
        """For all blocks: Frobenius norms before a step, and upper bounds of the largest singular values of the step.

        `copies` are the rows before the step; None for rows that did not step, whose step is 0.
        """
        norms, grams = [], []
        for each, old_BRC in zip(self.local, copies, strict=True):
            now_BRC = each.read()
            norms.append(frobenius(now_BRC if old_BRC is None else old_BRC))
            if old_BRC is not None:
                grams.append(gram(self._difference(now_BRC, old_BRC)))
        largest = iter(largest_singular_values(grams))
        pairs = zip(norms, copies, strict=True)
        steps = [torch.zeros_like(norm_B) if old is None else next(largest) for norm_B, old in pairs]
        of_groups = ([each.to(self.device, torch.float32) for each in vectors] for vectors in (norms, steps))
        return torch.cat(next(of_groups)), torch.cat(next(of_groups))

    def _difference(self, now_BRC: Tensor, old_BRC: Tensor) -> Tensor:
        """now - old. On the CPU it is valid until the next call: its memory is kept."""
        if now_BRC.device.type != "cpu" or now_BRC.dtype != old_BRC.dtype:
            return now_BRC - old_BRC
        key = old_BRC.shape, old_BRC.stride(), old_BRC.dtype
        if key not in self._scratch:
            self._scratch[key] = torch.empty_like(old_BRC)
        return torch.sub(now_BRC, old_BRC, out=self._scratch[key])

    def scale_step(self, copies: Copies, rates: Tensor, tensors: Set[int]) -> None:
        """Set every row of these tensors (by id) to old + rate of its block * (new - old)."""
        for each, old_BRC, rate_B11 in zip(self.local, copies, self.split(rates), strict=True):
            if old_BRC is not None:
                each.scale_step(old_BRC, rate_B11.to(old_BRC.device), tensors)
