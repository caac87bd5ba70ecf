"""Turns the measured terms of each attention into paths, with weights named by their roles.

The weight of a projection may be a parameter, or computed from one: transposed, a slice of a larger one, joined from
several, or parametrised. Its gradient shows which rows of which parameter it is computed from.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, product
from typing import Any

import torch
from torch import Tensor, nn

from quacklr.core.path import LogitPath
from quacklr.core.weight import Weight
from quacklr.find.finding import NO_WEIGHTS, NOT_LINEAR, QK_NORM, Finding
from quacklr.find.measure.records import mask_key
from quacklr.find.measure.run import measuring
from quacklr.find.measure.terms import NOT_FINITE, SPARSE, Chain, MeasuredAttention
from quacklr.util.autograd import batches, gradients, leaves_of
from quacklr.util.modules import named_parameters, trainable

BOUNDED = "its logit is bounded, however large its queries and keys are"
IDLE_EXPERTS = "some experts had no token of the sample; pass a larger one"
Read = tuple[Weight, tuple[int, ...]]  # a weight, and the block of it that each head reads
Term = tuple[tuple[Read, ...], tuple[Read, ...]]  # of all heads that have it: two chains, from the logit to the inputs


class NotRowsError(ValueError):
    """A head does not read whole rows of a parameter. The message is the reason."""


def measured_paths(model: nn.Module, sample: Any) -> dict[str, Finding]:
    """The finding for every attention that runs in a forward pass of the sample, by module name."""
    parameters = {id(parameter): name for name, parameter in named_parameters(model)}
    with trainable(model), measuring(model, sample) as (attentions, idle):  # frozen parameters are on paths too
        assembly = Assembly(parameters, idle)
        return {attention.module: assembly.finding(attention) for attention in attentions}


class Assembly:
    """Makes findings from measured attentions, with one Weight for the same rows of a parameter."""

    def __init__(self, parameters: dict[int, str], idle: set[int]) -> None:
        self.parameters, self.idle = parameters, idle
        self.weights: dict[object, Weight] = {}
        self.terms: dict[str, dict[Term, None]] = {}  # of each module, which may attend several times

    def finding(self, attention: MeasuredAttention) -> Finding:
        """The finding for a module, after one more attention in it."""
        module = attention.module
        terms = self.terms.setdefault(module, {})
        try:
            if attention.problem:
                raise NotRowsError(attention.problem)
            terms |= dict.fromkeys(self._terms(attention))
            if any(id(weight.param) in self.idle for term in terms for weight, _ in chain(*term)):
                raise NotRowsError(IDLE_EXPERTS)
        except NotRowsError as error:
            of_sample = str(error) in (IDLE_EXPERTS, NOT_FINITE, SPARSE)
            return Finding(reason=f"cannot be written as paths: {error}", unknown=True, undecided=of_sample)
        if not terms:
            return Finding(reason=QK_NORM if attention.cut else BOUNDED if attention.bounded else NO_WEIGHTS)
        cut = [self.parameters.get(id(each.weight)) for each in (*attention.cut, *attention.bounded)]
        return Finding(_paths(terms, module), cut={name.removeprefix(f"{module}."): NOT_LINEAR for name in cut if name})

    def _terms(self, attention: MeasuredAttention) -> Iterator[Term]:
        alike: dict[object, list[tuple[Chain, Chain]]] = {}
        for term in attention.terms:
            key = tuple(tuple(id(rows.projection.weight) for rows in side) for side in term)
            alike.setdefault(key, []).append(term)
        for heads in alike.values():
            q, k = (self._side(side) for side in zip(*heads, strict=True))
            yield from (term for term in product(q, k) if any(term))

    def _side(self, chains: Sequence[Chain]) -> list[tuple[Read, ...]]:
        """The chain of one side for all heads; and for each bias before its end, the chain that ends with the bias."""
        found: list[tuple[Read, ...]] = []
        so_far: tuple[Read, ...] = ()
        for i, rows in enumerate(zip(*chains, strict=True)):
            projection, masks = rows[0].projection, [row.mask for row in rows]
            read = self._read(projection.weight, masks)
            if read is None:  # the logit does not depend on the scale of this weight, or of earlier ones
                break
            flat = [mask.flatten() for mask in masks]
            bias = None if projection.bias is None else self._read(projection.bias, flat)
            if bias is not None and i + 1 == len(chains[0]):
                read = self.weights.setdefault((read[0], bias[0]), replace(read[0], bias=bias[0])), read[1]
            elif bias is not None:
                found.append((*so_far, bias))
            so_far = (*so_far, read)
        return [so_far, *found]

    def _read(self, tensor: Tensor, masks: Sequence[Tensor]) -> Read | None:
        if (found := weight_of(tensor, masks, self.parameters)) is None:
            return None
        weight, read = found
        key = id(weight.param), weight.dim, tuple(weight.block_of_row.tolist())
        return self.weights.setdefault(key, weight), tuple(read)


def _paths(terms: Collection[Term], module: str) -> list[LogitPath]:
    """The paths of one attention, its weights named by their roles."""
    chains = [(*q[::-1], *k) for q, k in terms]
    weights = dict.fromkeys(weight for each in chains for weight, _ in each)
    roles = _roles(terms) or _parameter_names(weights, f"{module}." if module else "")
    named = {weight: replace(weight, name=role) for weight, role in roles.items()}
    return [
        LogitPath(tuple(named[weight] for weight, _ in each), len(each[0][1]), [torch.tensor(read) for _, read in each])
        for each in chains
    ]


def _roles(terms: Collection[Term]) -> dict[Weight, str] | None:
    """The roles q and k, or those of MLA, dq uq . uk dkv + dq qr . kr, where all heads read kr; None for others."""
    if len(terms) == 1 and all(len(side) <= 1 for term in terms for side in term):
        return {side[0][0]: role for term in terms for side, role in zip(term, "qk", strict=True) if side}
    if len(terms) != 2 or not all(q and k for q, k in terms):
        return None
    (q, k), (q_rope, k_rope) = sorted(terms, key=lambda term: -term[1][0][0].blocks)
    one_key = len(k_rope) == 1 and k_rope[0][0].blocks == 1 < k[0][0].blocks
    if not one_key or max(len(q), len(k), len(q_rope)) > 2 or q[0][0] is q_rope[0][0]:
        return None
    roles = {q[0][0]: "uq", k[0][0]: "uk", q_rope[0][0]: "qr", k_rope[0][0]: "kr"}
    roles |= {side[1][0]: role for side, role in ((q, "dq"), (k, "dkv"), (q_rope, "dq")) if len(side) > 1}
    return roles if len(set(roles.values())) == len(roles) else None


def _parameter_names(weights: Iterable[Weight], prefix: str) -> dict[Weight, str]:
    """The names of their parameters, with a number where one parameter holds several weights."""
    alike: dict[str, list[Weight]] = {}
    for weight in weights:
        name = weight.name.removeprefix(prefix).removesuffix(".weight").replace(".", "_")
        alike.setdefault(name, []).append(weight)
    return {w: name if len(of) == 1 else f"{name}_{i}" for name, of in alike.items() for i, w in enumerate(of)}


def weight_of(tensor: Tensor, masks: Sequence[Tensor], parameters: dict[int, str]) -> tuple[Weight, list[int]] | None:
    """The rows of a parameter that masked parts of a tensor are computed from, and the block of each mask.

    `masks` has one mask for each head. None if the tensor does not depend on the scale of any parameter.
    """
    if id(tensor) in parameters:
        return _in_blocks(tensor, masks, parameters[id(tensor)])
    masks = [mask.expand(tensor.shape) for mask in masks]
    masked = torch.stack(masks).any(0)
    sources = [leaf for leaf in leaves_of(tensor) if id(leaf) in parameters]
    sources = [source for source in sources if _gradient(tensor, source, masked[None]).any()]
    shares = [_share(tensor, source, masked) for source in sources]
    close = max(1e-3, 8 * torch.finfo(tensor.dtype).eps)
    if all(abs(share) < close for share in shares):
        return None
    linear = [source for source, share in zip(sources, shares, strict=True) if abs(share - 1) < close]
    if len(linear) != 1:
        names = " and ".join(parameters[id(source)] for source in sources)
        raise NotRowsError(f"its weight is made of {names} in a way that does not follow the scale of just one of them")
    each = [_gradient(tensor, linear[0], some) for some in batches(torch.stack(masks), tensor)]
    return _in_blocks(linear[0], list((torch.cat(each) != 0).cpu()), parameters[id(linear[0])])


def _share(tensor: Tensor, source: Tensor, masked: Tensor) -> float:
    """1 if the masked entries are linear in the source, 0 if they do not depend on its scale (Euler's theorem)."""
    noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0)).to(tensor) * masked.to(tensor)
    total = float((tensor.detach() * noise).sum())
    part = float((source.detach() * _gradient(tensor, source, noise[None])).sum())
    return part / total if total else 1.0  # all zeros count as linear


def _gradient(tensor: Tensor, source: Tensor, cotangents: Tensor) -> Tensor:
    """The gradient for each cotangent."""
    (found,) = gradients(tensor, [source], cotangents.to(tensor))
    return source.new_zeros(len(cotangents), *source.shape) if found is None else found


def _in_blocks(param: Tensor, masks: Sequence[Tensor], name: str) -> tuple[Weight, list[int]]:
    """The weight whose blocks are the distinct masks, and the block of each mask."""
    keys = [mask_key(mask) for mask in masks]
    distinct = dict(zip(keys, masks, strict=True))
    blocks = torch.stack(list(distinct.values())).byte()
    by_first_row = blocks.flatten(1).argmax(1).argsort()
    blocks = blocks[by_first_row]
    if (blocks.sum(0) > 1).any():
        raise NotRowsError(f"heads share some rows of {name}, but not all that they read: its heads are mixed")
    block_of_row, dim = _along_one_dim(torch.where(blocks.sum(0) > 0, blocks.argmax(0), -1), param, name)
    number = dict(zip(distinct, by_first_row.argsort().tolist(), strict=True))
    return Weight(name, param, block_of_row, dim), [number[key] for key in keys]


def _along_one_dim(block: Tensor, param: Tensor, name: str) -> tuple[Tensor, int | tuple[int, ...]]:
    """The block of each row, and the dimension of the rows: one along which blocks change, or the first several."""
    for dims in [(dim,) for dim in range(block.ndim)] + [tuple(range(several)) for several in range(2, block.ndim)]:
        rows = math.prod(block.shape[dim] for dim in dims)
        by_row = block.movedim(dims, tuple(range(len(dims)))).reshape(rows, -1)
        if rows == math.prod(param.shape[dim] for dim in dims) and (by_row == by_row[:, :1]).all():
            return by_row[:, 0], dims if len(dims) > 1 else dims[0]
    raise NotRowsError(f"what a head reads of {name} is not whole rows of it")
