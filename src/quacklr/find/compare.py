"""Compares two descriptions of one attention, for example by a rule and by a measurement."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from quacklr.core.path import LogitPath
from quacklr.core.weight import Weight
from quacklr.util.modules import named_parameters

NamedRows = tuple[str, object, tuple[int, ...]]  # parameter, dimension, rows


def differences(ruled: Sequence[LogitPath], measured: Sequence[LogitPath], model: nn.Module) -> str:
    """Text with the paths of a rule and of a measurement, if they differ; otherwise empty."""
    names = {id(parameter): name for name, parameter in named_parameters(model)}
    one, other = (chains(paths, names) for paths in (ruled, measured))
    if one == other:
        return ""
    return f"it says {_described(one - other or one)}, but the measurement says {_described(other - one or other)}"


def wrong_rule(name: str, attention: nn.Module, wrong: str, way_out: str) -> ValueError:
    """The error for a rule that a measurement contradicts."""
    return ValueError(
        f"{name or 'the model'}: the rule for {type(attention).__name__} is wrong here; {wrong}; {way_out}"
    )


def chains(paths: Iterable[LogitPath], names: dict[int, str]) -> set[frozenset[NamedRows]]:
    """The parameter rows that each head of each path reads. Names of weights and the order of heads do not matter."""
    return {
        frozenset(rows for weight, b in zip(path.weights, read, strict=True) for rows in _rows(weight, b, names))
        for path in paths
        for read in path.reads.T.tolist()
    }


def _rows(weight: Weight, block: int, names: dict[int, str]) -> list[NamedRows]:
    return [
        (names[id(part.param)], part.dim, tuple((part.block_of_row == block).nonzero().flatten().tolist()))
        for part in weight.parts
    ]


def _described(chains: set[frozenset[NamedRows]]) -> str:
    """The first chain, in words."""
    if not chains:
        return "that it is on no path"
    first = min(chains, key=lambda chain: sorted((name, rows) for name, _, rows in chain))
    return "that a head reads " + " and ".join(f"{name}[{_ranges(rows)}]" for name, _, rows in sorted(first, key=str))


def _ranges(rows: Sequence[int]) -> str:
    starts = [row for row in rows if row - 1 not in rows]
    ends = [row + 1 for row in rows if row + 1 not in rows]
    return ", ".join(f"{start}:{end}" for start, end in zip(starts, ends, strict=True))
