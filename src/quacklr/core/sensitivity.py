"""What weights and steps mean for logits: the sensitivity of each block, and the change of each head by a step.

    s(w, b) = max over paths through w, over heads h reading block b, of  prod of ||v[h]|| for the other v on the path
    rate    = tau * s_init / s

The sensitivity is how far a unit change of block b of weight w can move a logit through one path. The paper's
Algorithm 1 (MHA) and Algorithm 2 (MLA) are both this rule; their `factor` is 1 / s, their `lr` is lr * rate.

    asked(h) = scale * sum over the paths of head h, over the weights w of a path, of
                   sigma(dw[h]) sqrt(rows of w) * prod of ||v[h]|| for the other v / sqrt(prod of the inner sizes)

dw is the optimizer's step, sigma its largest singular value, and ||v|| the Frobenius norm of v before the step. The
inner sizes of a path are the numbers of features between its weights. `asked` is the change in nats that the
optimizer's own step asks for: for a path of two weights, a first-order bound on the root mean square of the change of
head h's logits, for independent inputs of unit variance; for a longer path (MLA) an estimate of it. docs/theory.md has
the proof.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from quacklr.core.blocks import Blocks
from quacklr.core.path import LogitPath, attentions_of
from quacklr.core.weight import Weight, distinct


class CompiledPaths:
    """Some paths, compiled to index vectors: a few tensor operations for any number of layers and heads.

    A term is a block together with its partners, the other blocks on a head's path. `block`, (terms,), is the flat
    index of the block; `partners`, a list of (terms,), are those of its partners. `blocks_of` makes the blocks;
    `sharded.blocks.blocks_of` supports sharded weights.
    """

    def __init__(self, paths: Iterable[LogitPath], blocks_of: Callable[[list[Weight]], Blocks] = Blocks) -> None:
        self.paths = list(paths)
        if not self.paths:
            raise ValueError("no paths given; without a path there is no weight to control")
        self.canonical = distinct(weight for path in self.paths for weight in path.weights)
        self.weights = list(dict.fromkeys(self.canonical.values()))
        self.parts = [part for weight in self.weights for part in weight.parts]
        self.blocks = blocks_of(self.weights)
        terms = torch.cat([self.terms(path) for path in self.paths], 1).unique(dim=1)  # sorted by block
        read = torch.bincount(terms[0], minlength=self.blocks.total) > 0
        for name, of_blocks in self.by_name(read).items():
            if not of_blocks.all():
                raise ValueError(f"{name}: block {int(of_blocks.int().argmin())} is read by no head of its path")
        device = self.blocks.device
        self.block, *self.partners = terms.to(device)
        self.one = torch.ones(1, device=device, dtype=torch.float32)

    def by_name(self, flat: Tensor) -> dict[str, Tensor]:
        """A flat vector as (blocks,) for each weight, by name."""
        return {weight.name: flat[index] for weight, index in self.blocks.flat_index.items()}

    def flat(self, by_name: Mapping[str, Tensor], other: float = 0.0) -> Tensor:
        """The flat vector of (blocks,) for each weight, by name; `other` for the weights that have no entry."""
        flat = torch.full((self.blocks.total,), other, device=self.blocks.device, dtype=torch.float32)
        for weight, index in self.blocks.flat_index.items():
            if weight.name in by_name:
                flat[index] = by_name[weight.name].to(flat)
        return flat

    def flat_reads(self, path: LogitPath) -> list[Tensor]:
        """For each weight of a path, (heads,): the flat index of the block that each head reads."""
        indices = [self.blocks.flat_index[self.canonical[weight]] for weight in path.weights]
        return [index[blocks] for index, blocks in zip(indices, path.reads, strict=True)]

    def terms(self, path: LogitPath) -> Tensor:
        """(1 + partners, weights * heads): the flat index of each block that a head reads, and those of its partners.

        Short paths are padded with an extra block, whose norm is 1.
        """
        read = self.flat_reads(path)
        longest = max(2, *(len(other.weights) for other in self.paths))
        padding = [torch.full((path.heads,), self.blocks.total, device="cpu")] * (longest - len(read))
        others = [[*read[:i], *read[i + 1 :], *padding] for i in range(len(read))]
        return torch.cat([torch.stack([block, *each]) for block, each in zip(read, others, strict=True)], 1)

    def sensitivity(self, norms: Tensor) -> Tensor:
        """The sensitivities of all blocks, (total,), from their norms. Does not wait for the device."""
        norm = torch.cat([norms, self.one])
        of_term = reduce(torch.mul, [norm.take(partners) for partners in self.partners])
        return self.blocks.zeros.scatter_reduce(0, self.block, of_term, "amax")

    def validate(self, norms: Tensor, sensitivity: Tensor) -> None:
        """Norms must be finite and sensitivities positive, since Lemma 1 needs a lower bound on every norm."""
        weight_of = {int(b): weight for weight, index in self.blocks.flat_index.items() for b in index}
        for block in (~norms.isfinite()).nonzero().flatten().tolist():
            raise ValueError(
                f"{weight_of[block].name}: holds NaN or inf, or its norm is more than float32 can hold; attach QuacK "
                "to a model whose weights are finite"
            )
        valid = (sensitivity > 0) & sensitivity.isfinite()
        first = next((b for b, ok in enumerate(valid.tolist()) if weight_of[b].rated and not ok), None)
        if first is None:
            return
        partners = {b for others in self.partners for b in others[self.block == first].tolist()}
        zeros = sorted({weight_of[b].name for b in partners if b in weight_of and norms[b] == 0})
        if not zeros:
            where = "below" if sensitivity[first] == 0 else "above"
            raise ValueError(
                f"{weight_of[first].name}: the product of its partners' norms is {where} what float32 can hold; "
                "multiply the weights by a constant, and divide the logits by it"
            )
        partner = f"partner {zeros[0]} is" if len(zeros) == 1 else f"partners {' and '.join(zeros)} are"
        raise ValueError(
            f"{weight_of[first].name}: its {partner} all zeros, so its rate has no bound; initialise what is zero, or "
            "pass floor=c to bound every norm from below by c"
        )


class HeadChange(NamedTuple):
    """How much the last step changes the logits of an attention module, in nats. docs/theory.md has the formulas.

    Attributes:
        asked: (heads,) the change by the optimizer's own step, to first order.
        given: (heads,) an upper bound of the change by the step as QuacK scaled it.
    """

    asked: Tensor
    given: Tensor


class LogitChanges:
    """The changes for some paths, compiled to index vectors: a few tensor operations for any number of layers.

    A term of (4) in docs/theory.md belongs to a head, a block that the head reads through a path, and the partners of
    this block: the other blocks of the path. `heads` has, by the name of each attention module, the range of its heads
    in a vector of all heads.
    """

    def __init__(self, compiled: CompiledPaths) -> None:
        self.heads: dict[str, slice] = {}
        self.total_heads = 0
        rows = torch.ones(compiled.blocks.total, device="cpu", dtype=torch.float32)
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
        self.sqrt_rows, self.one = rows.sqrt().to(device), compiled.one
        self.factor = torch.cat(factors).to(device) * self.sqrt_rows[self.block]
        self._zeros = torch.zeros(self.total_heads, device=device, dtype=torch.float32)
        self._no_limits = torch.full_like(self.sqrt_rows, torch.inf)

    def asked(self, norms: Tensor, steps: Tensor) -> Tensor:
        """(heads,): the change by the step as it is, to first order.

        Args:
            norms: Frobenius norms of all blocks before the step; or larger numbers, for a bound to all orders.
            steps: largest singular values of their steps; 0 for blocks that did not step.
        """
        norm = torch.cat([norms, self.one])
        partners = [norm.take(each) for each in self.partners]
        return self._zeros.index_add(0, self.head, reduce(torch.mul, partners, self.factor * steps[self.block]))

    def given(self, norms: Tensor, steps: Tensor, rates: Tensor) -> Tensor:
        """(heads,): the change by the scaled step, to all orders: an upper bound where `asked` is a bound."""
        return self.asked(self.larger(norms, steps, rates), rates * steps)

    def larger(self, norms: Tensor, steps: Tensor, rates: Tensor) -> Tensor:
        """Upper bounds of the norms after the scaled step."""
        return torch.addcmul(norms, rates, steps * self.sqrt_rows)

    def smallest_of_heads(self, of_head: Tensor) -> Tensor:
        """(blocks,): for each block, the smallest number of the heads that read it."""
        return self._no_limits.scatter_reduce(0, self.block, of_head[self.head], "amin")

    def by_module(self, measured: Iterable[Sequence[Tensor]]) -> dict[str, HeadChange]:
        """The changes by some steps together, each given by (norms, steps, rates); by the name of the attention."""
        asked = given = self._zeros
        for norms, steps, rates in measured:
            asked, given = asked + self.asked(norms, steps), given + self.given(norms, steps, rates)
        return {name: HeadChange(asked[heads], given[heads]) for name, heads in self.heads.items()}


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
