"""Where the blocks of a model are: copying them out, measuring them, and moving them back.

Every block has one place in a flat vector (norms, sensitivities, rates: one number a block). Its rows are read through
a view of the parameter, and copied with the bias as a last column.

Shapes: B blocks, R rows, C columns.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from quacklr.core.local import is_sharded, local_tensor
from quacklr.core.norms import Norm
from quacklr.core.weight import Weight

Copies = list[Tensor | None]
Memory = list[Tensor | None]


class BlockRows:
    """The rows of some blocks of a weight, all of one size: which row of the tensor is which.

    Where they are a regular grid, as in every layout in common use, they are read through a view of the tensor;
    otherwise they are gathered and put back.
    """

    def __init__(self, weight: Weight, blocks: Tensor) -> None:
        block_of_row = weight.local_blocks()
        index = torch.stack([(block_of_row == block).nonzero().squeeze(1) for block in blocks])
        self.weight, self.tensor = weight, weight.param
        self.sharded = is_sharded(weight.param)
        self.index = index.to(weight.param.device)
        self.shape = tuple(weight.param.shape)
        self.size = (*index.shape, math.prod(weight.rows_first().shape[1:]))
        self.first = int(index[0, 0])
        self.block_step = int(index[1, 0]) - self.first if len(index) > 1 else 0
        self.row_step = int(index[0, 1]) - self.first if index.shape[1] > 1 else 0
        block, row = (torch.arange(size, device="cpu") for size in index.shape)
        grid = self.first + block.unsqueeze(1) * self.block_step + row * self.row_step
        negative = self.block_step < 0  # torch has no such strides
        self.is_grid = torch.equal(index, grid) and not negative
        self._view: Tensor | None = None  # made when first read
        self._made_of: object = None

    def read(self) -> Tensor:
        """(B, R, C): a view of the rows, or a copy of them where there is no regular grid.

        The view is kept for as long as the tensor has the same memory, dtype, shape and strides.
        """
        data = local_tensor(self.tensor) if self.sharded else self.tensor
        made_of = data.data_ptr(), data.dtype, data.shape, data.stride()
        if made_of != self._made_of:
            self._view, self._made_of = self._new_view(), made_of
        return self._view if self._view is not None else self._rows_first()[self.index].reshape(self.size)

    def move(self, old_BRC: Tensor, rate_B11: Tensor) -> None:
        """Rows become old + rate * (now - old); exactly `now` where the rate is 1."""
        now_BRC = self.read()
        if now_BRC.dtype in (torch.float32, torch.float64):
            torch.lerp(old_BRC.to(now_BRC.dtype), now_BRC, rate_B11.to(now_BRC.dtype), out=now_BRC)
        else:  # in fp32, since a rate in bf16 would be off by up to 0.2 %
            now_BRC.copy_(now_BRC.to(torch.float32).sub_(old_BRC).mul_(rate_B11).add_(old_BRC))
        if self._view is None:
            tensor = self._rows_first()
            tensor[self.index] = now_BRC.view(*self.index.shape, *tensor.shape[1:])

    def _new_view(self) -> Tensor | None:
        """The view, or None if strides cannot describe it."""
        if tuple(self.tensor.shape) != self.shape:
            raise ValueError(
                f"{self.weight.name}: its parameter has shape {tuple(self.tensor.shape)} now, and had {self.shape} "
                "when QuacK was attached; attach a new one"
            )
        rows = self._rows_first()
        if not self.is_grid or not _is_matrix(rows):
            return None
        matrix = rows.view(-1, self.size[2])
        row, column = matrix.stride()
        stride = self.block_step * row, self.row_step * row, column
        return matrix.as_strided(self.size, stride, matrix.storage_offset() + self.first * row)

    def _rows_first(self) -> Tensor:
        return self.weight.rows_first()


def _is_matrix(rows: Tensor) -> bool:
    """Whether everything else of a row is evenly spaced in memory, so that (rows, everything else) is a view."""
    strides = rows.stride()[1:]
    return all(outer == inner * size for outer, inner, size in zip(strides, strides[1:], rows.shape[2:], strict=False))


class Piece:
    """Blocks of one weight that have the same number of rows here; almost always all of them."""

    def __init__(self, weight: Weight, blocks: Tensor, parts: Sequence[Weight] | None = None) -> None:
        self.weight, self.blocks = weight, blocks
        self.columns = [BlockRows(part, blocks) for part in parts or weight.parts]  # [W b]
        self.widths = [rows.size[2] for rows in self.columns]
        on_cpu = weight.param.device.type == "cpu"
        self._keeps = on_cpu and (weight.rows_are_first or len(self.columns) == 1)
        self._spare: Tensor | None = None

    def holds(self, tensors: Container[int]) -> bool:
        """Whether it has a rate and is made of any of these tensors (by id)."""
        return self.weight.rated and any(id(rows.tensor) in tensors for rows in self.columns)

    def copy(self) -> Tensor:
        """(B, R, C): the rows as they are now, laid out in memory as the parameter is."""
        columns_BRC = [rows.read() for rows in self.columns]
        dtype = reduce(torch.promote_types, [column_BRC.dtype for column_BRC in columns_BRC])
        out, self._spare = self._spare, None
        if out is not None and out.dtype != dtype:
            out = None
        if out is not None and len(columns_BRC) == 1:
            return out.copy_(columns_BRC[0])
        if self.weight.rows_are_first:
            return torch.cat(columns_BRC, 2, out=out)
        return torch.cat([column_BRC.permute(2, 0, 1) for column_BRC in columns_BRC]).permute(1, 2, 0)

    def take_back(self, copy_BRC: Tensor) -> None:
        """On the CPU, keep a used copy for the next step: fresh pages cost more than the copying."""
        if self._keeps:
            self._spare = copy_BRC

    def has_moved(self, old_BRC: Tensor) -> bool:
        """Whether any row differs from its copy. Waits for the device."""
        olds = old_BRC.split_with_sizes(self.widths, 2)
        return not all(torch.equal(rows.read(), old) for rows, old in zip(self.columns, olds, strict=True))

    def move(self, old_BRC: Tensor, rate_B11: Tensor, tensors: Container[int]) -> None:
        """Every row of these tensors (by id) becomes old + rate of its block * (now - old). Takes `old_BRC` back."""
        olds = old_BRC.split_with_sizes(self.widths, 2) if len(self.widths) > 1 else (old_BRC,)
        for rows, old in zip(self.columns, olds, strict=True):
            if self.weight.rated and id(rows.tensor) in tensors:
                rows.move(old, rate_B11)
        self.take_back(old_BRC)


class BlockGroup(NamedTuple):
    """The blocks of one weight that have the same number of rows; almost always all of them."""

    weight: Weight
    blocks: Tensor

    @classmethod
    def all_of(cls, weight: Weight) -> Iterator[BlockGroup]:
        """The runs of a weight, smallest blocks first."""
        sizes = weight.rows_of_block
        for size in sorted(set(sizes.tolist())):
            yield cls(weight, (sizes == size).nonzero().squeeze(1))


class Blocks:
    """All blocks of some weights, each with its place in one flat vector: run after run."""

    def __init__(self, weights: Iterable[Weight]) -> None:
        self.runs = [run for weight in weights for run in BlockGroup.all_of(weight)]
        self.pieces = self._pieces()
        self.flat_index: dict[Weight, Tensor] = {}
        self.total = 0
        for weight, blocks in self.runs:
            place = self.flat_index.setdefault(weight, torch.empty(weight.blocks, dtype=torch.long, device="cpu"))
            place[blocks] = torch.arange(self.total, self.total + len(blocks), device="cpu")
            self.total += len(blocks)
        self.device = self.runs[0].weight.param.device
        self.one_device = all(weight.param.device == self.device for weight, _ in self.runs)
        self._split: tuple[Tensor, Sequence[Tensor]] | None = None

    def _pieces(self) -> list[Piece]:
        return [Piece(weight, blocks) for weight, blocks in self.runs]

    def nothing(self) -> Memory:
        """What a norm remembers at first."""
        return [None] * len(self.runs)

    def split(self, flat: Tensor) -> Sequence[Tensor]:
        """A flat vector as (B, 1, 1) views, one a piece."""
        if self._split is None or self._split[0] is not flat:
            self._split = flat, flat.view(-1, 1, 1).split_with_sizes([len(piece.blocks) for piece in self.pieces])
        return self._split[1]

    def copy(self, of: Container[int]) -> Copies:
        """A copy of every piece that is made of one of these tensors (by id)."""
        return [piece.copy() if piece.holds(of) else None for piece in self.pieces]

    def take_back(self, copies: Copies) -> None:
        """Keep copies that are not needed any more for the next step, where that saves time."""
        for piece, copy_BRC in zip(self.pieces, copies, strict=True):
            if copy_BRC is not None:
                piece.take_back(copy_BRC)

    def have_moved(self, copies: Copies) -> bool:
        """Whether any row differs from its copy. Waits for the device."""
        return any(p.has_moved(old) for p, old in zip(self.pieces, copies, strict=True) if old is not None)

    def measure(self, norm: Norm, memory: Memory) -> tuple[Copies, list[Tensor], Memory]:
        """A copy of every piece, the norms of all blocks, and what the norm remembers of each run.

        Each copy is measured as soon as it is made, while it is in the cache.
        """
        copies: Copies = []
        norms: list[Tensor] = []
        remembered: Memory = []
        for piece, last in zip(self.pieces, memory, strict=True):
            copy_BRC = piece.copy()
            norms_B, now = norm(copy_BRC, last)
            if norms_B.dtype != torch.float32 or not self.one_device:
                norms_B = norms_B.to(self.device, torch.float32)
            copies.append(copy_BRC)
            norms.append(norms_B)
            remembered.append(now)
        return copies, norms, remembered

    def move(self, copies: Copies, rates: Tensor, tensors: Container[int]) -> None:
        """Every row of these tensors (by id) becomes old + rate of its block * (now - old)."""
        for piece, old_BRC, rate_B11 in zip(self.pieces, copies, self.split(rates), strict=True):
            if old_BRC is not None:
                piece.move(old_BRC, rate_B11 if self.one_device else rate_B11.to(old_BRC.device), tensors)
