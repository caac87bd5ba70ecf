"""From what was seen of each attention to its paths, with weights named by their roles."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product as every
from typing import Any

import torch
from torch import Tensor, nn

from quacklr.core.path import LogitPath
from quacklr.core.weight import Weight
from quacklr.find.finding import NO_WEIGHTS, NOT_LINEAR, QK_NORM, Finding
from quacklr.find.measure.projection_rows import Rowset
from quacklr.find.measure.run import Measurement, Seen, measuring
from quacklr.find.measure.terms import NOT_FINITE, SPARSE
from quacklr.find.parameter_rows import NotRowsError, weight_of
from quacklr.util.modules import named_parameters, trainable

BOUNDED = "its logit is bounded, however large its queries and keys are"
IDLE_EXPERTS = "some experts had no token of the sample; pass a larger one"
Reads = tuple[Weight, tuple[int, ...]]  # a weight, and the block of it that each head reads


@dataclass(frozen=True, slots=True)
class Term:
    """One term of an attention's logit, for all heads that have it: both sides from the logit outwards."""

    q: tuple[Reads, ...]
    k: tuple[Reads, ...]

    def path(self, named: dict[Weight, Weight]) -> LogitPath:
        """From the query's input to the key's."""
        reads = [*self.q[::-1], *self.k]
        return LogitPath(
            tuple(named[weight] for weight, _ in reads), len(reads[0][1]), [torch.tensor(r) for _, r in reads]
        )


def measured_paths(model: nn.Module, sample: Any) -> dict[str, Finding]:
    """What a forward of the sample shows of every attention, by module name."""
    with trainable(model), measuring(model, sample) as measured:  # frozen parameters are on paths too
        return _assembled(measured, {id(parameter): name for name, parameter in named_parameters(model)})


def _assembled(measured: Measurement, parameters: dict[int, str]) -> dict[str, Finding]:
    assembly = Assembly(parameters)
    terms: dict[str, dict[Term, None]] = {}
    found: dict[str, Finding] = {}
    for seen in measured.seen:
        of_module = terms.setdefault(seen.module, {})
        if seen.problem:
            found[seen.module] = unwritable(seen.problem)
            continue
        try:
            of_module |= dict.fromkeys(assembly.terms(seen))
        except NotRowsError as error:
            found[seen.module] = unwritable(str(error))
            continue
        if any(id(weight.param) in measured.idle for term in of_module for weight, _ in (*term.q, *term.k)):
            found[seen.module] = unwritable(IDLE_EXPERTS)
            continue
        names = [parameters[id(p.weight)] for p in (*seen.cut, *seen.bounded) if id(p.weight) in parameters]
        cut = {name.removeprefix(f"{seen.module}."): NOT_LINEAR for name in names if of_module}
        reason = "" if of_module else QK_NORM if seen.cut else BOUNDED if seen.bounded else NO_WEIGHTS
        found[seen.module] = Finding(paths_of(of_module, seen.module), reason, cut)
    return found


def unwritable(why: str) -> Finding:
    """An attention that was seen, and that paths cannot describe; some reasons are the sample's."""
    of_sample = why in (IDLE_EXPERTS, NOT_FINITE, SPARSE)
    return Finding(reason=f"cannot be written as paths: {why}", unknown=True, undecided=of_sample)


class Assembly:
    """Makes one Weight of the same rows of a parameter, wherever they are met."""

    def __init__(self, parameters: dict[int, str]) -> None:
        self.parameters = parameters
        self.weights: dict[object, Weight] = {}

    def terms(self, seen: Seen) -> list[Term]:
        """The terms of one attention. NotRowsError if they cannot be written as paths."""
        kinds: dict[object, list[tuple[tuple[Rowset, ...], tuple[Rowset, ...]]]] = {}
        for q, k in seen.terms:
            kind = tuple(tuple(id(rows.projection.weight) for rows in chain) for chain in (q, k))
            kinds.setdefault(kind, []).append((q, k))
        return [
            Term(q, k)
            for heads in kinds.values()
            for q, k in every(self._side([q for q, _ in heads]), self._side([k for _, k in heads]))
            if q or k
        ]

    def _side(self, chains: Sequence[tuple[Rowset, ...]]) -> list[tuple[Reads, ...]]:
        """The chain of one side; and for each bias before its end, the chain that ends with the bias instead."""
        found: list[tuple[Reads, ...]] = []
        so_far: tuple[Reads, ...] = ()
        for i, rows in enumerate(zip(*chains, strict=True)):
            projection, masks = rows[0].projection, [row.mask for row in rows]
            reads = self._reads(projection.weight, masks)
            if reads is None:  # parametrised so that its scale does not matter, nor that of what is behind it
                break
            bias = None
            if projection.bias is not None:
                bias = self._reads(projection.bias, [mask.flatten() for mask in masks])
            last = i + 1 == len(chains[0])
            if bias is not None and last:
                reads = self._biased(reads[0], bias[0]), reads[1]
            elif bias is not None:
                found.append((*so_far, bias))
            so_far = (*so_far, reads)
        return [so_far, *found]

    def _reads(self, tensor: Tensor, masks: Sequence[Tensor]) -> Reads | None:
        found = weight_of(tensor, masks, self.parameters)
        if found is None:
            return None
        weight, read = found
        key = id(weight.param), weight.dim, tuple(weight.block_of_row.tolist())
        return self.weights.setdefault(key, weight), tuple(read)

    def _biased(self, weight: Weight, bias: Weight) -> Weight:
        return self.weights.setdefault((weight, bias), replace(weight, bias=bias))


def paths_of(terms: Iterable[Term], module: str) -> list[LogitPath]:
    """The paths of one attention, its weights named by their roles."""
    terms = list(terms)
    weights = list(dict.fromkeys(weight for term in terms for weight, _ in (*term.q[::-1], *term.k)))
    roles = _roles(terms) or _by_parameter(weights, f"{module}." if module else "")
    named = {weight: replace(weight, name=role) for weight, role in roles.items()}
    return [term.path(named) for term in terms]


def _roles(terms: Sequence[Term]) -> dict[Weight, str] | None:
    """q and k; or those of MLA, dq uq . uk dkv + dq qr . kr, where one key part serves all heads."""
    if len(terms) == 1 and len(terms[0].q) <= 1 and len(terms[0].k) <= 1:
        (term,) = terms
        return {reads[0][0]: role for reads, role in ((term.q, "q"), (term.k, "k")) if reads}
    if len(terms) != 2 or not all(term.q and term.k for term in terms):
        return None
    nope, rope = sorted(terms, key=lambda term: -term.k[0][0].blocks)
    one_key = len(rope.k) == 1 and rope.k[0][0].blocks == 1 < nope.k[0][0].blocks
    if not one_key or max(len(nope.q), len(nope.k), len(rope.q)) > 2 or nope.q[0][0] is rope.q[0][0]:
        return None
    roles = {nope.q[0][0]: "uq", nope.k[0][0]: "uk", rope.q[0][0]: "qr", rope.k[0][0]: "kr"}
    roles |= {chain[1][0]: role for chain, role in ((nope.q, "dq"), (nope.k, "dkv"), (rope.q, "dq")) if len(chain) > 1}
    return roles if len(set(roles.values())) == len(roles) else None


def _by_parameter(weights: Sequence[Weight], prefix: str) -> dict[Weight, str]:
    """Named after their parameters; numbered where one parameter holds several."""
    alike: dict[str, list[Weight]] = {}
    for weight in weights:
        name = weight.name.removeprefix(prefix).removesuffix(".weight").replace(".", "_")
        alike.setdefault(name, []).append(weight)
    return {w: name if len(of) == 1 else f"{name}_{i}" for name, of in alike.items() for i, w in enumerate(of)}
