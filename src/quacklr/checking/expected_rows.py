"""The parameter rows that paths assign to each layer, head and block, indexed for the check.

Shapes: W weights of a path, H heads. A block is identified by its index in the flat vector of all blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quacklr.core.path import LogitPath
from quacklr.core.sensitivity import CompiledPaths
from quacklr.core.weight import Weight
from quacklr.find.discover import by_module
from quacklr.util.modules import named_modules


@dataclass(frozen=True, slots=True, eq=False)
class PathBlocks:
    """One path: the block of each weight that each head reads, and the first and the last weight."""

    reads_WH: Tensor
    ends: tuple[Weight, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ExpectedLayer:
    """One attention module: its number of heads, its paths, and the weights on them, each once."""

    module: str
    heads: int
    paths: tuple[PathBlocks, ...]
    weights: tuple[Weight, ...]

    def heads_reading(self, blocks: Tensor) -> Tensor:
        """(H,): whether a head reads any of the blocks, which are given as a flat mask."""
        return torch.cat([blocks[path.reads_WH] for path in self.paths]).any(0)

    def role(self, weight: Weight) -> str:
        """The weight's name within the module."""
        return weight.name.removeprefix(f"{self.module}.")


@dataclass(frozen=True, slots=True, eq=False)
class WeightRows:
    """The rows of one parameter that belong to a weight or to its bias.

    `layer` and `role` are the indices of the first layer that has the weight and of the weight in that layer;
    `flat_index` (blocks,) are its blocks; `index_in_block` (rows,) counts the rows of each block from 0.
    """

    part: Weight
    layer: int
    role: int
    flat_index: Tensor
    index_in_block: Tensor

    @property
    def block(self) -> Tensor:
        """(rows,): the block of each row; -1 for rows that are not part of the weight."""
        return self.part.block_of_row

    @property
    def on_path(self) -> Tensor:
        """(rows,): whether a row is part of the weight."""
        return self.part.block_of_row >= 0

    def spread(self, of_row: Tensor) -> Tensor:
        """One value per row, in a shape that broadcasts to the parameter, on its device."""
        return self.part.spread(of_row.to(self.part.param.device))


class ExpectedRows:
    """The layers of a model and the rows of its parameters, as some paths describe them."""

    def __init__(self, paths: Iterable[LogitPath], model: nn.Module) -> None:
        paths = paths if isinstance(paths, list) else list(paths)  # a LogitPaths also has the modules of its paths
        self.rule = CompiledPaths(paths)
        self.flat_index = self.rule.blocks.flat_index
        self.layers = [self._layer(*group) for group in _by_module_and_heads(paths, model)]
        self.rows = list(self._rows())
        self.params = list(dict.fromkeys(rows.part.param for rows in self.rows))

    def _layer(self, module: str, paths: Sequence[LogitPath]) -> ExpectedLayer:
        canonical, blocks = self.rule.canonical, []
        for path in paths:
            reads = [self.flat_index[canonical[w]][read] for w, read in zip(path.weights, path.reads, strict=True)]
            blocks.append(PathBlocks(torch.stack(reads), tuple(dict.fromkeys((path.weights[0], path.weights[-1])))))
        weights = dict.fromkeys(canonical[weight] for path in paths for weight in path.weights)
        return ExpectedLayer(module, paths[0].heads, tuple(blocks), tuple(weights))

    def _rows(self) -> Iterator[WeightRows]:
        first: dict[Weight, tuple[int, int]] = {}
        for number, layer in enumerate(self.layers):
            for role, weight in enumerate(layer.weights):
                first.setdefault(weight, (number, role))
        for weight, (layer_number, role) in first.items():
            for part in weight.parts:
                yield WeightRows(part, layer_number, role, self.flat_index[weight], _index_in_block(part))

    def rows_on_no_path(self) -> Iterator[tuple[Weight, Tensor]]:
        """For each parameter that also has rows on no path: a weight with its layout, and a mask of these rows."""
        free: dict[Tensor, tuple[Weight, Tensor]] = {}
        for rows in self.rows:
            part, mask = free.get(rows.part.param, (rows.part, torch.ones_like(rows.on_path)))
            free[rows.part.param] = part, mask & ~rows.on_path
        yield from ((part, mask) for part, mask in free.values() if mask.any())


def _by_module_and_heads(paths: Iterable[LogitPath], model: nn.Module) -> Iterator[tuple[str, list[LogitPath]]]:
    """The paths of each module and number of heads; paths of a submodule are listed under the submodule.

    ValueError if a weight is not named after a module of the model.
    """
    modules = {name for name, _ in named_modules(model)}
    groups: dict[tuple[str, int], list[LogitPath]] = {}
    for outer, path in ((outer, path) for outer, found in by_module(paths).items() for path in found):
        inner = path.weights[0].name.rpartition(".")[0]
        name = inner if inner in modules and f"{inner}.".startswith(f"{outer}." if outer else "") else outer
        if name not in modules:
            raise ValueError(
                f"{path.weights[0].name}: {name!r} is no module of the model; name a weight after the module that "
                "attends with it, <module>.<role>"
            )
        groups.setdefault((name, path.heads), []).append(path)
    yield from ((name, group) for (name, _), group in groups.items())


def _index_in_block(part: Weight) -> Tensor:
    """(rows,): each row's index within its block; 0 for rows of no block."""
    index = torch.zeros_like(part.block_of_row)
    for block, rows in enumerate(part.rows_of_block.tolist()):
        index[part.block_of_row == block] = torch.arange(rows)
    return index
