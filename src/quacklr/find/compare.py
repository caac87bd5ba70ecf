"""Compares the paths of one attention, as a table has them and as they were measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import nn

from quacklr.core.path import LogitPath
from quacklr.find.finding import VERIFIED, Finding
from quacklr.util.modules import named_parameters

NamedRows = tuple[str, object, tuple[int, ...]]  # parameter, dimension, rows
TAKE_MEASURED = (
    "to use what was measured, pass the paths that logit_paths(model, batch, rules=False) returns; or give the module "
    "a method logit_paths(), whose paths are used as they are"
)


def verified(by_table: Finding, measured: Finding, name: str, module: nn.Module, model: nn.Module) -> Finding:
    """The finding of a table, verified by a measurement. ValueError if the measurement contradicts it."""
    if measured.undecided:
        return replace(by_table, note=f"not verified: {measured.reason}")
    if measured.unknown:
        said = "that it is on a path" if by_table.paths else by_table.reason
        wrong = f"it says {said}, but the measurement says: {measured.reason}"
    else:
        wrong = differences(by_table.paths, measured.paths, model)
    if wrong:
        raise contradiction("the table", name, module, wrong)
    return replace(by_table, origin=VERIFIED, note="")


def contradiction(source: str, name: str, module: nn.Module, wrong: str) -> ValueError:
    """The error for paths that a measurement contradicts. `source` is where the paths are from."""
    where = f"{name or 'the model'}: {source} for {type(module).__name__}"
    return ValueError(f"{where} is wrong here; {wrong}; {TAKE_MEASURED}")


def differences(by_table: Sequence[LogitPath], measured: Sequence[LogitPath], model: nn.Module) -> str:
    """Text with the paths of a table and of a measurement, if they differ; otherwise empty."""
    names = {id(parameter): name for name, parameter in named_parameters(model)}
    one, other = (chains(paths, names) for paths in (by_table, measured))
    if one == other:
        return ""
    return f"it says {_described(one - other or one)}, but the measurement says {_described(other - one or other)}"


def chains(paths: Iterable[LogitPath], names: dict[int, str]) -> set[frozenset[NamedRows]]:
    """The parameter rows that each head of each path reads. Names of weights and the order of heads do not matter."""
    return {
        frozenset(
            (names[id(part.param)], part.dim, tuple((part.block_of_row == block).nonzero().flatten().tolist()))
            for weight, block in zip(path.weights, read, strict=True)
            for part in weight.parts
        )
        for path in paths
        for read in path.reads.T.tolist()
    }


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
