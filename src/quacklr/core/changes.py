"""How much a step changes the logits of each head, in nats, from weights alone.

    asked(h) = scale * sum over the paths of head h, over the weights w of a path, of
                   sigma(dw[h]) sqrt(rows of w) * prod of ||v[h]|| for the other v / sqrt(prod of the inner sizes)

dw is the optimizer's step, sigma its largest singular value, and ||v|| the Frobenius norm of v before the step. The
inner sizes of a path are the numbers of features between its weights. `asked` is the change that the optimizer's own
step asks for: for a path of two weights, a first-order bound on the root mean square of the change of head h's logits,
for independent inputs of unit variance; for a longer path (MLA) an estimate of it. docs/theory.md has the proof.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from quacklr.core.path import attentions_of
from quacklr.core.sensitivity import CompiledPaths
from quacklr.core.weight import Weight


class HeadChange(NamedTuple):
    """How much the last step changes the logits of an attention module, in nats. docs/theory.md has the formulas.

    Attributes:
        asked: (heads,) the change by the optimizer's own step, to first order.
        given: (heads,) an upper bound of the change by the step as QuacK scaled it.
    """

    asked: Tensor
    given: Tensor


class LogitChanges:
    """The formula for some paths, compiled to index vectors: a few tensor operations for any number of layers.

    A term of (4) in docs/theory.md belongs to a head, a block that the head reads through a path, and the partners of
    this block: the other blocks of the path. `heads` has, by the name of each attention module, the range of its heads
    in a vector of all heads.
    """

    def __init__(self, compiled: CompiledPaths) -> None:
        self.heads: dict[str, slice] = {}
        self.total_blocks, self.total_heads = compiled.blocks.total, 0
        rows = torch.ones(self.total_blocks, device="cpu", dtype=torch.float32)
        for weight, index in compiled.blocks.flat_index.items():
            rows[index] = weight.rows_of_block.to(rows)
        terms: list[Tensor] = []
        factors: list[Tensor] = []
        for name, paths in attentions_of(compiled.paths).items():
            first, self.total_heads = self.total_heads, self.total_heads + paths[0].heads
            self.heads[name] = slice(first, self.total_heads)
            heads = torch.arange(first, self.total_heads, device="cpu")
            reads = [compiled.flat_reads(path) for path in paths]
            sizes = [rows[read[path.meeting]] for path, read in zip(paths, reads, strict=True)]
            meeting = [[compiled.canonical[w] for w in path.weights[path.meeting :][:2]] for path in paths]
            usual_scale = torch.stack([sizes[i] for i in first_of_features(meeting)]).sum(0).rsqrt()
            for path, read, size in zip(paths, reads, sizes, strict=True):
                scale = usual_scale if path.scale is None else abs(path.scale)
                inner_sizes = reduce(torch.mul, [rows[block] for block in read]) / size
                factor = scale * abs(math.prod(weight.gain for weight in path.weights)) * inner_sizes.rsqrt()
                terms.append(torch.cat([heads.repeat(1, len(read)), compiled.terms(path)]))
                factors.append(factor.repeat(len(read)))
        device = compiled.blocks.device
        self.head, self.block, *self.partners = torch.cat(terms, 1).to(device)
        self.factor, self.one = torch.cat(factors).to(device), torch.ones(1, device=device, dtype=torch.float32)
        self.sqrt_rows = rows.sqrt().to(device)

    def asked(self, norms: Tensor, steps: Tensor) -> Tensor:
        """(heads,): the change by the step as it is, to first order.

        Args:
            norms: Frobenius norms of all blocks before the step; or larger numbers, for a bound to all orders.
            steps: largest singular values of their steps; 0 for blocks that did not step.
        """
        return self._of_heads(self._terms(norms, steps * self.sqrt_rows))

    def given(self, norms: Tensor, steps: Tensor, rates: Tensor) -> Tensor:
        """(heads,): the change by the scaled step, to all orders: an upper bound where `asked` is a bound."""
        sizes = steps * self.sqrt_rows
        return self._of_heads(self._terms(norms + rates * sizes, sizes) * rates[self.block])

    def smallest_of_heads(self, of_head: Tensor) -> Tensor:
        """(blocks,): for each block, the smallest number of the heads that read it."""
        smallest = of_head.new_full((self.total_blocks,), torch.inf)
        return smallest.scatter_reduce_(0, self.block, of_head[self.head], "amin")

    def by_module(self, measured: Iterable[Sequence[Tensor]]) -> dict[str, HeadChange]:
        """The changes by some steps together, each given by (norms, steps, rates); by the name of the attention."""
        asked = given = self.factor.new_zeros(self.total_heads)
        for norms, steps, rates in measured:
            asked, given = asked + self.asked(norms, steps), given + self.given(norms, steps, rates)
        return {name: HeadChange(asked[heads], given[heads]) for name, heads in self.heads.items()}

    def _terms(self, norms: Tensor, sizes: Tensor) -> Tensor:
        """For each term, the change of its head's logits by the step of its block."""
        norm = torch.cat([norms, self.one])
        return reduce(torch.mul, [norm.take(partners) for partners in self.partners], self.factor * sizes[self.block])

    def _of_heads(self, terms: Tensor) -> Tensor:
        return terms.new_zeros(self.total_heads).index_add_(0, self.head, terms)


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
