"""The result of looking for the paths of one attention module, and what two results differ in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from quacklr.core.path import LogitPath

NamedRows = tuple[str, object, tuple[int, ...]]  # parameter, dimension, rows

# reasons for having no path
QK_NORM = "QK norm: its logit does not depend on the scale of its queries and keys"
NO_SOFTMAX = "no softmax attention"
NOT_LINEAR = "comes before a norm or another nonlinear function, or is a gate"
NO_WEIGHTS = "its queries and keys are not made of weights of its own"

# how an attention was found
DECLARED, BY_TABLE, VERIFIED = "declared", "by table", "verified"
MEASURED, GIVEN, PENDING = "measured", "given", "pending"

NOT_VERIFIED = "not verified: "
CONTRADICTION = (
    "{}: {} for {} is wrong here; {}; to use what was measured, pass the paths that logit_paths(model, batch, "
    "rules=False) returns; to use the rows as they are, QuacK(model, optimizer, verify=False)"
)


@dataclass(frozen=True, slots=True)
class Finding:
    """The paths of an attention module, or the reason why it has none.

    `cut` maps roles of weights that are on no path to the reason. `unknown`: the module may have paths, but they could
    not be determined. `undecided`: unknown because of the sample, so it does not contradict another finding.
    `origin` is how the attention was found. `note` is the reason why it is not verified on the first batch, or why no
    table applies.
    """

    paths: Sequence[LogitPath] = ()
    reason: str = ""
    cut: Mapping[str, str] = field(default_factory=dict)
    unknown: bool = False
    undecided: bool = False
    origin: str = BY_TABLE
    note: str = ""

    @property
    def pending(self) -> bool:
        """Whether the module may be an attention that no table knows: it has to be measured."""
        return self.origin == PENDING


def is_inside(name: str, outer: str) -> bool:
    """Whether the module with this name is the outer one or a part of it."""
    return not outer or name == outer or name.startswith(f"{outer}.")


def innermost(name: str, outer: Iterable[str]) -> str | None:
    """The innermost of these modules that contains one."""
    return max((each for each in outer if is_inside(name, each)), key=len, default=None)


def verified(known: Finding, measured: Finding, name: str, module: nn.Module, names: Mapping[int, str]) -> Finding:
    """A finding, verified by a measurement. ValueError if it contradicts. `names` are by id.

    More may be declared than can be measured; or no path, to leave the attention alone.
    """
    declared = known.origin == DECLARED
    why = measured.reason if measured.undecided or (declared and measured.unknown) else ""
    if any(id(part.param) not in names for path in known.paths for weight in path.weights for part in weight.parts):
        why = "its parameters are not the model's any more"
    if why:
        return replace(known, note=f"{NOT_VERIFIED}{why}")
    wrong = differences(known.paths, measured.paths, names, declared) if known.paths or not declared else ""
    if measured.unknown:
        said = "that it is on a path" if known.paths else known.reason
        wrong = f"it says {said}, but the measurement says: {measured.reason}"
    if wrong:
        source = {DECLARED: "what is declared", MEASURED: "what was measured before"}.get(known.origin, "the table")
        raise ValueError(CONTRADICTION.format(name or "the model", source, type(module).__name__, wrong))
    return replace(known, origin=VERIFIED if known.origin == BY_TABLE else known.origin, note="")


def differences(
    said: Iterable[LogitPath], measured: Iterable[LogitPath], parameters: Mapping[int, str], more: bool = False
) -> str:
    """Text with given and with measured paths, if they differ; otherwise empty. `parameters` are names by id.

    With `more`, rows that were not measured do not count: of weights before a norm, or of other products.
    """
    one, other = chains(said, parameters), chains(measured, parameters)
    if more:
        read = {(name, row) for chain in other for name, _, rows in chain for row in rows}
        one = {frozenset(w for w in chain if not read.isdisjoint((w[0], row) for row in w[2])) for chain in one}
    if one == other or (more and other < one):
        return ""
    return f"it says {_described(one - other or one)}, but the measurement says {_described(other - one or other)}"


def chains(paths: Iterable[LogitPath], parameters: Mapping[int, str]) -> set[frozenset[NamedRows]]:
    """The parameter rows that each head of each path reads. Names of weights and the order of heads do not matter."""
    return {
        frozenset(
            (parameters[id(part.param)], part.dim, tuple((part.block_of_row == block).nonzero().flatten().tolist()))
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
