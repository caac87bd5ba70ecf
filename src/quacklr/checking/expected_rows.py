"""What paths claim, in a form that can be tested: which block each head reads, and where every row is.

Shapes: W weights of a path, H heads. A block is named by its place in the flat vector of all blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quacklr.core.path import LogitPath
from quacklr.core.sensitivity import Rule
from quacklr.core.weight import Weight
from quacklr.find.discover import by_module
from quacklr.util.modules import named_modules


@dataclass(frozen=True, slots=True, eq=False)
class PathBlocks:
    """One path: the block that each head reads of each weight, and the weights that read its two inputs."""

    reads_WH: Tensor
    ends: tuple[Weight, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ExpectedLayer:
    """The heads of one attention module, and the terms of their logit; `weights` are the roles, each once."""

    module: str
    heads: int
    terms: tuple[PathBlocks, ...]
    weights: tuple[Weight, ...]

    def readers(self, touched: Tensor) -> Tensor:
        """(H,): whether a head reads any of the touched blocks, given as a flat vector of bools."""
        return torch.cat([touched[term.reads_WH] for term in self.terms]).any(0)

    def role(self, weight: Weight) -> str:
        """The weight's name within the module."""
        return weight.name.removeprefix(f"{self.module}.")


@dataclass(frozen=True, slots=True, eq=False)
class WeightRows:
    """The rows of a parameter that a weight, or its bias, claims: whose, and the how-manieth of its block each is.

    `layer` and `role` number the attention that claims them first and the weight in it; `place` are its flat blocks.
    """

    part: Weight
    layer: int
    role: int
    place: Tensor
    block: Tensor
    rank: Tensor

    @property
    def claimed(self) -> Tensor:
        """(rows,): those that are part of the weight."""
        return self.block >= 0

    def spread(self, of_row: Tensor) -> Tensor:
        """Something of each row, in a shape that broadcasts to the parameter, and on its device."""
        return self.part.spread(of_row.to(self.part.param.device))


class ExpectedRows:
    """All that some paths say of a model."""

    def __init__(self, paths: Iterable[LogitPath], model: nn.Module) -> None:
        paths = paths if isinstance(paths, list) else list(paths)  # a list that knows its modules stays what it is
        self.rule = Rule(paths)
        self.layers = [self._layer(*group) for group in _grouped(by_module(paths).items(), model)]
        self.rows = list(self._rows())
        self.params: dict[int, Tensor] = {id(rows.part.param): rows.part.param for rows in self.rows}

    def _layer(self, module: str, paths: Sequence[LogitPath]) -> ExpectedLayer:
        place, canonical = self.rule.blocks.flat_index, self.rule.canonical
        terms = []
        for path in paths:
            reads = [place[canonical[w]][read] for w, read in zip(path.weights, path.reads, strict=True)]
            terms.append(PathBlocks(torch.stack(reads), tuple(dict.fromkeys((path.weights[0], path.weights[-1])))))
        weights = dict.fromkeys(canonical[weight] for path in paths for weight in path.weights)
        return ExpectedLayer(module, paths[0].heads, tuple(terms), tuple(weights))

    def _rows(self) -> Iterator[WeightRows]:
        seen: set[Weight] = set()
        for number, layer in enumerate(self.layers):
            for role, weight in enumerate(layer.weights):
                if weight not in seen:
                    seen.add(weight)
                    place = self.rule.blocks.flat_index[weight]
                    for part in weight.parts:
                        yield WeightRows(part, number, role, place, part.block_of_row, _rank(part))

    def unclaimed(self) -> Iterator[tuple[Weight, Tensor]]:
        """For each parameter with rows that nobody claims a weight of it, for its layout, and a mask of those rows."""
        free: dict[int, tuple[Weight, Tensor]] = {}
        for rows in self.rows:
            part, before = free.get(id(rows.part.param), (rows.part, torch.ones_like(rows.claimed)))
            free[id(rows.part.param)] = part, before & ~rows.claimed
        yield from ((part, mask) for part, mask in free.values() if mask.any())


def _grouped(found: Iterable[tuple[str, list[LogitPath]]], model: nn.Module) -> Iterator[tuple[str, list[LogitPath]]]:
    """The paths of each module and number of heads; of a module with several inside, those as their weights are named.

    ValueError if a name is no module's: what it attends to would not be known.
    """
    modules = {name for name, _ in named_modules(model)}
    groups: dict[tuple[str, int], list[LogitPath]] = {}
    for outer, paths in found:
        for path in paths:
            inner = path.weights[0].name.rpartition(".")[0]
            name = inner if inner in modules and f"{inner}.".startswith(f"{outer}." if outer else "") else outer
            if name not in modules:
                raise ValueError(
                    f"{path.weights[0].name}: {name!r} is no module of the model; name a weight after the module that "
                    "attends with it, <module>.<role>"
                )
            groups.setdefault((name, path.heads), []).append(path)
    yield from ((name, paths) for (name, _), paths in groups.items())


def _rank(part: Weight) -> Tensor:
    """(rows,): 0, 1, 2, ... within each block."""
    order = part.block_of_row.argsort(stable=True)
    sizes = torch.bincount(part.block_of_row + 1)
    starts = sizes.cumsum(0) - sizes
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order)) - starts.repeat_interleave(sizes)
    return rank
