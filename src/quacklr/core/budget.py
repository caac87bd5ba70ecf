"""A budget for the change of logits: each head's step is scaled so that its logits change by a given amount, in nats.

    asked(h) = scale * sum over the paths of head h, over the weights w of a path, of
                   sigma(dw[h]) sqrt(rows of w) * prod of ||v[h]|| for the other v / sqrt(prod of the inner sizes)
    rate     = budget * (lr now / initial lr) / asked(h);   a block takes the smallest rate of the heads that read it

dw is the optimizer's step, sigma its largest singular value, and ||v|| the Frobenius norm of v before the step. The
inner sizes of a path are the numbers of features between its weights. `asked` is the change that the optimizer's own
step asks for: for a path of two weights, a first-order bound on the root mean square of the change of head h's logits,
for independent inputs of unit variance; for a longer path (MLA) an estimate of it. docs/theory.md has the proof.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from quacklr.core.path import LogitPath
from quacklr.core.sensitivity import Rule
from quacklr.core.weight import Weight

MAX_RATE = 100.0  # a head with almost no gradient has a step of rounding errors, which must not become a large step


class ScaledStep(NamedTuple):
    """The rates of one step.

    Attributes:
        rates: (blocks,)
        asked: (heads,) `asked` as defined at the top of this file, for the optimizer's own step.
        given: (heads,) the same for the scaled step, to all orders: an upper bound where `asked` is a bound.
    """

    rates: Tensor
    asked: Tensor
    given: Tensor


class BudgetRule:
    """The budget for some paths, compiled to index vectors: a few tensor operations for any number of layers and heads.

    A term of (4) in docs/theory.md belongs to a head, a block that the head reads through a path, and the partners of
    this block: the other blocks of the path. `heads` has, by the name of each attention module, the range of its heads
    in a vector of all heads.
    """

    def __init__(self, rule: Rule) -> None:
        self.heads: dict[str, slice] = {}
        self.total_blocks, self.total_heads = rule.blocks.total, 0
        rows = torch.ones(self.total_blocks, device="cpu", dtype=torch.float32)
        for weight, index in rule.blocks.flat_index.items():
            rows[index] = weight.rows_of_block.to(rows)
        terms: list[Tensor] = []
        factors: list[Tensor] = []
        most_weights = max(len(path.weights) for path in rule.paths)
        for name, paths in attentions_of(rule.paths).items():
            first, self.total_heads = self.total_heads, self.total_heads + paths[0].heads
            self.heads[name] = slice(first, self.total_heads)
            reads = [rule.flat_reads(path) for path in paths]
            sizes = [rows[read[path.meeting]] for path, read in zip(paths, reads, strict=True)]
            parts = first_of_features([[rule.canonical[weight] for weight in _meeting(path)] for path in paths])
            usual_scale = torch.stack([sizes[i] for i in parts]).sum(0).rsqrt()
            for path, read, size in zip(paths, reads, sizes, strict=True):
                scale = usual_scale if path.scale is None else torch.full_like(size, abs(path.scale))
                scale = scale * abs(math.prod(weight.gain for weight in path.weights))
                inner_sizes = reduce(torch.mul, [rows[block] for block in read]) / size
                heads = torch.arange(first, self.total_heads, device="cpu")
                padding = [torch.full_like(heads, self.total_blocks)] * (most_weights - len(read))
                for i, block in enumerate(read):
                    terms.append(torch.stack([heads, block, *read[:i], *read[i + 1 :], *padding]))
                    factors.append(scale * inner_sizes.rsqrt())
        device = rule.blocks.device
        self.head, self.block, *self.partners = torch.cat(terms, 1).to(device)
        self.factor, self.one = torch.cat(factors).to(device), torch.ones(1, device=device, dtype=torch.float32)
        self.sqrt_rows = rows.sqrt().to(device)

    def scale_step(self, norms: Tensor, steps: Tensor, allowed: Tensor, share: Tensor) -> ScaledStep:
        """The rates of one step.

        Args:
            norms: Frobenius norms of all blocks before the step.
            steps: largest singular values of their steps; 0 for blocks that did not step.
            allowed: by block, the budget in nats, times lr / initial lr.
            share: by head, the part of the budget that this step may use, from 0 to 1.

        The first rates assume that the partners of a block do not change. They give an upper bound on all norms after
        the step. The second rates use these larger norms, so they are not larger than the first. All rates are finite.
        A block has rate 1, so its step is not scaled, if it changes no logit, or if the change of every head that reads
        it is NaN or inf.
        """
        sizes = steps * self.sqrt_rows
        terms = self._terms(norms, sizes)
        asked = self._of_heads(terms)
        first = self._rates(asked, share, allowed)
        terms = self._terms(norms + first * sizes, sizes)
        rates = torch.minimum(first, self._rates(self._of_heads(terms), share, allowed))
        return ScaledStep(rates, asked, self._of_heads(terms * rates[self.block]))

    def _terms(self, norms: Tensor, sizes: Tensor) -> Tensor:
        """For each term, the change of its head's logits by the step of its block."""
        norm = torch.cat([norms, self.one])
        return reduce(torch.mul, [norm.take(partners) for partners in self.partners], self.factor * sizes[self.block])

    def _of_heads(self, terms: Tensor) -> Tensor:
        return terms.new_zeros(self.total_heads).index_add_(0, self.head, terms)

    def _rates(self, changes: Tensor, share: Tensor, allowed: Tensor) -> Tensor:
        """The rates of all blocks from the changes of heads; a block takes the smallest rate of its heads."""
        limits = (share / changes).where((changes > 0) & changes.isfinite(), torch.inf)
        smallest = limits.new_full((self.total_blocks,), torch.inf)
        smallest.scatter_reduce_(0, self.block, limits[self.head], "amin")
        return (allowed * smallest).clamp(max=MAX_RATE).where(smallest.isfinite(), 1)


def _meeting(path: LogitPath) -> Sequence[Weight]:
    """The query weight and the key weight whose rows are multiplied."""
    return path.weights[path.meeting : path.meeting + 2]


def first_of_features(meetings: Sequence[Sequence[Weight]]) -> list[int]:
    """The indices of one path for each part of a head's features. The sizes of the parts add up to the head size.

    `meetings` has, for each path, the query weight and the key weight whose rows are multiplied. Two paths that share
    one of these weights use the same features, as the paths of LoRA do. The two paths of MLA share none of them, and
    use different parts.
    """
    parts: list[tuple[int, set[Weight]]] = []
    for i, weights in enumerate(meetings):
        same = [part for part in parts if part[1].intersection(weights)]
        first = min([i, *(index for index, _ in same)])
        parts = [part for part in parts if part not in same]
        parts.append((first, set(weights).union(*(each for _, each in same))))
    return sorted(index for index, _ in parts)


def attentions_of(paths: Iterable[LogitPath]) -> dict[str, list[LogitPath]]:
    """The paths of each attention, by the name of its module: the paths whose terms add up to one logit.

    A weight is named after its module, "<module>.<role>". Paths of weights without a module belong to one attention if
    they share a weight and have the same number of heads; this attention is named after its first weight.
    """
    attentions: dict[str, list[LogitPath]] = {}
    for path in paths:
        attentions.setdefault(_attention_name(path, attentions), []).append(path)
    return attentions


def _attention_name(path: LogitPath, known: Mapping[str, Sequence[LogitPath]]) -> str:
    module, dot, _ = path.weights[0].name.rpartition(".")
    if dot:
        same = module
    else:
        sharing = (
            name
            for name, others in known.items()
            if any(weight in other.weights for other in others for weight in path.weights)
        )
        same = next(sharing, path.weights[0].name)
    return same if all(other.heads == path.heads for other in known.get(same, ())) else str(path)
