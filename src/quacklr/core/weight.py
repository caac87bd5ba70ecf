"""A weight: some rows of a parameter, and for each row the block it belongs to.

A block is the rows that one head (or a group of heads) reads. One index vector for each parameter describes every
layout, because it gives the block of each row:

    separate     q: 0 0 1 1 2 2                     one parameter a weight
    fused        q: 0 0 1 1 . . . . . . . .         [q|k|v]; k: . . . . 0 0 1 1 . . . .
    per head     q: 0 0 . . . . 1 1 . . . .         [h, 3, d]
    gated        q: 0 0 . . 1 1 . .                 rows of a head are [q, gate]

(a dot is -1: the row is not part of the weight). `packed` makes these vectors for the common layouts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from quacklr.core.local import Box

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True, eq=False, repr=False)  # equal only to itself, so it can be the key of a dict
class Weight:
    """Some rows of a parameter, and the block each belongs to.

    Args:
        name: the module's name and the role, such as "layers.0.attn.q".
        param: the parameter.
        block_of_row: (rows,) long; -1 for rows that are not part of the weight.
        dim: the dimension of `param` along which the rows are; the other dimensions are flattened to columns. (0, 1)
            for the rows of matrices that are stacked in one parameter.
        bias: one more column of the weight, as in `[W b] [x; 1]`: part of the norms of the blocks, with their rates.
            A tensor with an entry for each row of `param`; or, if its layout is different, a Weight with as many rows
            in each block.
        rated: False for a weight that has no rate itself, but counts in its partners' rates.
        gain: a constant that the model multiplies the output of this weight by, such as LoRA's alpha / r. Only a budget
            depends on it.
    """

    name: str
    param: Tensor
    block_of_row: Tensor
    dim: int | tuple[int, ...] = 0
    bias: Tensor | Weight | None = None
    rated: bool = True
    gain: float = 1.0

    def __post_init__(self) -> None:
        param: object = self.param
        kind = param.dtype if isinstance(param, Tensor) else f"a {type(param).__name__}"
        if kind not in DTYPES:
            raise ValueError(
                f"{self.name}: its parameter is {kind}; a weight on a path is a tensor of float16, bfloat16, float32 "
                "or float64"
            )
        if self.param.numel() == 0:
            raise ValueError(f"{self.name}: its parameter has no entries, its shape is {tuple(self.param.shape)}")
        validate_factor(self.name, "gain", self.gain)
        object.__setattr__(self, "dim", self._valid_dim())
        object.__setattr__(self, "block_of_row", self._valid_block_of_row())
        if self.bias is None:
            return
        name, bias = f"{self.name}.bias", self.bias
        bias = Weight(name, bias, self.block_of_row) if isinstance(bias, Tensor) else replace(bias, name=name)
        if not torch.equal(bias.rows_of_block, self.rows_of_block):
            raise ValueError(f"{self.name}: its bias must have as many rows in each block as its parameter")
        object.__setattr__(self, "bias", bias)

    def _valid_dim(self) -> int | tuple[int, ...]:
        dim, ndim = self.dim, self.param.ndim
        if isinstance(dim, int) and -ndim <= dim < ndim:
            return dim % ndim
        if isinstance(dim, int) or dim != tuple(range(ndim))[: len(dim)] or len(dim) < 2:
            raise ValueError(
                f"{self.name}: dim={dim}, but its parameter has shape {tuple(self.param.shape)}; several dimensions "
                "are the first ones: (0, 1)"
            )
        self._validate_contiguous(self.param)
        return dim

    def _validate_contiguous(self, tensor: Tensor) -> None:
        """`flatten` of a tensor that is not contiguous makes a copy, and writing to a copy would have no effect."""
        if not tensor.is_contiguous() and any(tensor.stride()):  # strides of 0: only a shape (engines/engine.py)
            raise ValueError(f"{self.name}: dim={self.dim}, but its parameter is not contiguous")

    def _valid_block_of_row(self) -> Tensor:
        rows = math.prod(self.param.shape[dim] for dim in self.dims)
        numbers = whole_numbers(self.block_of_row)
        fits = numbers is not None and numbers.shape == (rows,) and numbers.min() >= -1 and numbers.max() >= 0
        if numbers is None or not fits or not numbers[numbers >= 0].bincount().all():
            raise ValueError(
                f"{self.name}: block_of_row must be {rows} whole numbers, one for each row, that number the blocks "
                "from 0 without gaps; -1 for rows outside the weight"
            )
        return numbers

    def __repr__(self) -> str:
        rows = int((self.block_of_row >= 0).sum())
        return f"Weight({self.name}: {rows} rows of {tuple(self.param.shape)}, {self.blocks} blocks)"

    @property
    def dims(self) -> tuple[int, ...]:
        """The dimensions of the parameter along which the rows are."""
        return self.dim if isinstance(self.dim, tuple) else (self.dim,)

    def rows_first(self, box: Box) -> Tensor:
        """A box of the parameter, detached: a view with the rows along the first dimension."""
        tensor = box.tensor()
        if not isinstance(self.dim, tuple):
            return tensor.movedim(self.dim, 0)
        self._validate_contiguous(tensor)
        return tensor.flatten(0, len(self.dim) - 1)

    def rows_in(self, box: Box) -> Tensor:
        """Global indices of the rows that are in a box."""
        return self._flat_indices(box, self.dims)

    def blocks_in(self, box: Box) -> Tensor:
        """The block of each row that is in a box."""
        return self.block_of_row[self.rows_in(box)]

    def columns_in(self, box: Box) -> Tensor:
        """Global indices of the columns that are in a box."""
        return self._flat_indices(box, tuple(d for d in range(self.param.ndim) if d not in self.dims))

    def _flat_indices(self, box: Box, dims: tuple[int, ...]) -> Tensor:
        """Global indices of a box along some dimensions, as if these dimensions were flattened."""
        index = torch.zeros(1, dtype=torch.long, device="cpu")
        for dim in dims:
            index = (index.unsqueeze(1) * self.param.shape[dim] + box.indices[dim]).flatten()
        return index

    def spread(self, of_row: Tensor) -> Tensor:
        """Reshape a vector of one number for each row, so that it broadcasts to the parameter."""
        return of_row.view([size if d in self.dims else 1 for d, size in enumerate(self.param.shape)])

    @property
    def rows_of_block(self) -> Tensor:
        """(blocks,): the number of rows in each block."""
        return torch.bincount(self.block_of_row[self.block_of_row >= 0])

    @property
    def blocks(self) -> int:
        """The number of blocks: heads, or groups of heads."""
        return int(self.block_of_row.max()) + 1

    @property
    def columns(self) -> int:
        """The number of entries in a row, without the bias."""
        return self.param.numel() // len(self.block_of_row)

    @property
    def parts(self) -> tuple[Weight, ...]:
        """The weight itself, and its bias as a weight if it has one."""
        return (self, self.bias) if isinstance(self.bias, Weight) else (self,)

    @property
    def trains(self) -> bool:
        """Whether the weight has a rate: it is `rated`, and not frozen."""
        return self.rated and any(part.param.requires_grad for part in self.parts)


def validate_factor(owner: object, name: str, factor: object) -> None:
    """A constant factor of the logit must be a number other than 0."""
    if not isinstance(factor, int | float) or not 0 < abs(factor) < math.inf:
        raise ValueError(f"{owner}: {name}={factor!r}; a constant factor is a number other than 0")


def whole_numbers(given: object) -> Tensor | None:
    """Numbers as a long tensor on the CPU; None if they are not all whole numbers."""
    try:
        numbers = torch.as_tensor(given, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        return None
    kind = numbers.dtype
    return None if kind.is_floating_point or kind.is_complex or kind == torch.bool else numbers.long()


Segment = tuple[str | None, int, int]


def packed(
    source: nn.Module | Tensor, *segments: Segment, repeat: int = 1, dim: int = 0, bias: Tensor | None = None
) -> list[Weight]:
    """The named weights of a parameter whose rows are `segments` in order, repeated `repeat` times.

    A segment is (name, blocks, rows of a block); rows of a segment with the name None are part of no weight. `source`
    is a parameter, or a module with a `weight` and perhaps a `bias`.

        q,     = packed(q_proj, ("q", heads, d))                                         separate
        q, k   = packed(qkv, ("q", heads, d), ("k", groups, d), (None, groups, d))       [q|k|v]
        q, k   = packed(qkv, ("q", 1, d), ("k", 1, d), (None, 1, d), repeat=heads)       [h, 3, d]
        q, k   = packed(qkv, ("q", r, d), ("k", 1, d), (None, 1, d), repeat=groups)      [g, r + 2, d]
        q,     = packed(q_proj, ("q", 1, d), (None, 1, d), repeat=heads)                 [q, gate] a head
        uq, qr = packed(q_b, ("uq", 1, nope), ("qr", 1, rope), repeat=heads)             MLA
        dkv, kr = packed(kv_a, ("dkv", 1, latent), ("kr", 1, rope))                      MLA
    """
    for segment in segments:
        numbers: Sequence[object] = segment[1:]
        if len(numbers) != 2 or not all(isinstance(number, int) and number > 0 for number in numbers):
            raise ValueError(f"{segment}: a segment is (name, blocks, rows of a block), two positive whole numbers")
    names = " ".join(name for name, _, _ in segments if name is not None)
    if isinstance(source, nn.Module):
        bias = getattr(source, "bias", None) if bias is None else bias
        source = _weight_of(source, names)
    period = sum(blocks * size for _, blocks, size in segments)
    if repeat * period != source.shape[dim]:
        raise ValueError(f"{names}: segments of {repeat} x {period} rows, but the parameter has {source.shape[dim]}")
    weights, start = [], 0
    for name, blocks, size in segments:
        if name is not None:
            block_of_row = torch.full((repeat, period), -1, device="cpu")
            block = torch.arange(repeat * blocks, device="cpu").view(repeat, blocks)
            block_of_row[:, start : start + blocks * size] = block.repeat_interleave(size, dim=1)
            weights.append(Weight(name, source, block_of_row.flatten(), dim, bias))
        start += blocks * size
    return weights


def _weight_of(module: nn.Module, names: str) -> Tensor:
    if is_parametrized(module, "weight"):
        originals = [name for name, _ in module.named_parameters() if name.startswith("parametrizations.weight.")]
        raise ValueError(
            f"{names}: {type(module).__name__}'s weight is parametrised; pass the parameter that gives its rows their "
            f"scale: {' or '.join(originals)}"
        )
    weight = module._parameters.get("weight")
    if weight is None:
        raise ValueError(f"{names}: {type(module).__name__} has no parameter called weight; pass the parameter itself")
    return weight


def distinct(weights: Iterable[Weight]) -> dict[Weight, Weight]:
    """Map each weight to the first one with the same rows of the same parameter: to itself, unless layers are tied.

    Raises ValueError if two different weights have the same name, or have a row in common: a row has one rate.
    """
    canonical: dict[Weight, Weight] = {}
    by_rows: dict[object, Weight] = {}
    by_name: dict[str, Weight] = {}
    by_param: dict[int, list[Weight]] = {}
    for weight in dict.fromkeys(weights):
        key = tuple((id(part.param), part.dim, tuple(part.block_of_row.tolist())) for part in weight.parts)
        canonical[weight] = by_rows.setdefault(key, weight)
        if canonical[weight] is not weight:
            continue
        if by_name.setdefault(weight.name, weight) is not weight:
            raise ValueError(f"{weight.name}: two different weights have this name; name each after its module")
        for part in weight.parts:
            for other in by_param.setdefault(id(part.param), []):
                if other.dim != part.dim or ((other.block_of_row >= 0) & (part.block_of_row >= 0)).any():
                    raise ValueError(f"{part.name} and {other.name} claim the same rows; declare them as one Weight")
            by_param[id(part.param)].append(part)
    return canonical
