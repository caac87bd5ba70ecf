"""Turns the measured terms of each attention into paths, with weights named by their roles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from quacklr.core.path import LogitPath
from quacklr.core.weight import Weight
from quacklr.find.finding import NO_WEIGHTS, NOT_LINEAR, QK_NORM, Finding
from quacklr.find.measure.run import Measurement, measuring
from quacklr.find.measure.terms import NOT_FINITE, SPARSE, Chain, MeasuredAttention
from quacklr.find.parameter_rows import NotRowsError, weight_of
from quacklr.util.modules import named_parameters, trainable

BOUNDED = "its logit is bounded, however large its queries and keys are"
IDLE_EXPERTS = "some experts had no token of the sample; pass a larger one"
WeightRead = tuple[Weight, tuple[int, ...]]  # a weight, and the block of it that each head reads


@dataclass(frozen=True, slots=True)
class Term:
    """One term of an attention's logit, for all heads that have it: two chains, each from the logit to the input."""

    q: tuple[WeightRead, ...]
    k: tuple[WeightRead, ...]

    @property
    def reads(self) -> tuple[WeightRead, ...]:
        """The weights and blocks of the term, from the query's input to the key's input."""
        return (*self.q[::-1], *self.k)

    def path(self, named: dict[Weight, Weight]) -> LogitPath:
        """The path of the term, with renamed weights."""
        weights, blocks = zip(*self.reads, strict=True)
        return LogitPath(tuple(named[weight] for weight in weights), len(blocks[0]), [torch.tensor(b) for b in blocks])


def measured_paths(model: nn.Module, sample: Any) -> dict[str, Finding]:
    """The finding for every attention that runs in a forward pass of the sample, by module name."""
    with trainable(model), measuring(model, sample) as measured:  # frozen parameters are on paths too
        return _findings(measured, {id(parameter): name for name, parameter in named_parameters(model)})


def _findings(measured: Measurement, parameters: dict[int, str]) -> dict[str, Finding]:
    assembly = Assembly(parameters)
    terms: dict[str, dict[Term, None]] = {}
    found: dict[str, Finding] = {}
    for attention in measured.attentions:
        module = attention.module
        of_module = terms.setdefault(module, {})
        try:
            if attention.problem:
                raise NotRowsError(attention.problem)
            of_module |= dict.fromkeys(assembly.terms(attention))
            if any(id(weight.param) in measured.idle for term in of_module for weight, _ in term.reads):
                raise NotRowsError(IDLE_EXPERTS)
        except NotRowsError as error:
            found[module] = _not_paths(str(error))
            continue
        cut = [parameters.get(id(p.weight), "") for p in (*attention.cut, *attention.bounded)] if of_module else []
        reason = "" if of_module else QK_NORM if attention.cut else BOUNDED if attention.bounded else NO_WEIGHTS
        roles = {name.removeprefix(f"{module}."): NOT_LINEAR for name in cut if name}
        found[module] = Finding(_paths(list(of_module), module), reason, roles)
    return found


def _not_paths(why: str) -> Finding:
    """The finding for a measured attention that paths cannot describe. It is undecided if the sample is the reason."""
    of_sample = why in (IDLE_EXPERTS, NOT_FINITE, SPARSE)
    return Finding(reason=f"cannot be written as paths: {why}", unknown=True, undecided=of_sample)


class Assembly:
    """Makes terms from the measured chains, with one Weight for the same rows of a parameter."""

    def __init__(self, parameters: dict[int, str]) -> None:
        self.parameters = parameters
        self.weights: dict[object, Weight] = {}

    def terms(self, attention: MeasuredAttention) -> list[Term]:
        """The terms of one attention. NotRowsError if they cannot be written as paths."""
        alike: dict[object, list[tuple[Chain, Chain]]] = {}
        for term in attention.terms:
            key = tuple(tuple(id(rows.projection.weight) for rows in chain) for chain in term)
            alike.setdefault(key, []).append(term)
        return [
            Term(q, k)
            for heads in alike.values()
            for q, k in product(self._side([q for q, _ in heads]), self._side([k for _, k in heads]))
            if q or k
        ]

    def _side(self, chains: Sequence[Chain]) -> list[tuple[WeightRead, ...]]:
        """The chain of one side for all heads; and for each bias before its end, the chain that ends with the bias."""
        found: list[tuple[WeightRead, ...]] = []
        so_far: tuple[WeightRead, ...] = ()
        for i, rows in enumerate(zip(*chains, strict=True)):
            projection, masks = rows[0].projection, [row.mask for row in rows]
            read = self._read(projection.weight, masks)
            if read is None:  # the logit does not depend on the scale of this weight, or of earlier ones
                break
            bias = None
            if projection.bias is not None:
                bias = self._read(projection.bias, [mask.flatten() for mask in masks])
            if bias is not None and i + 1 == len(chains[0]):
                weight = self.weights.setdefault((read[0], bias[0]), replace(read[0], bias=bias[0]))
                read = weight, read[1]
            elif bias is not None:
                found.append((*so_far, bias))
            so_far = (*so_far, read)
        return [so_far, *found]

    def _read(self, tensor: Tensor, masks: Sequence[Tensor]) -> WeightRead | None:
        found = weight_of(tensor, masks, self.parameters)
        if found is None:
            return None
        weight, read = found
        key = id(weight.param), weight.dim, tuple(weight.block_of_row.tolist())
        return self.weights.setdefault(key, weight), tuple(read)


def _paths(terms: Sequence[Term], module: str) -> list[LogitPath]:
    """The paths of one attention, its weights named by their roles."""
    weights = list(dict.fromkeys(weight for term in terms for weight, _ in term.reads))
    roles = _roles(terms) or _parameter_names(weights, f"{module}." if module else "")
    named = {weight: replace(weight, name=role) for weight, role in roles.items()}
    return [term.path(named) for term in terms]


def _roles(terms: Sequence[Term]) -> dict[Weight, str] | None:
    """The roles q and k, or those of MLA, dq uq . uk dkv + dq qr . kr, where all heads read kr; None for others."""
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


def _parameter_names(weights: Sequence[Weight], prefix: str) -> dict[Weight, str]:
    """The names of their parameters, with a number where one parameter holds several weights."""
    alike: dict[str, list[Weight]] = {}
    for weight in weights:
        name = weight.name.removeprefix(prefix).removesuffix(".weight").replace(".", "_")
        alike.setdefault(name, []).append(weight)
    return {w: name if len(of) == 1 else f"{name}_{i}" for name, of in alike.items() for i, w in enumerate(of)}
