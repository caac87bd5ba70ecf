"""The rule of QuacK: a weight's learning rate is inversely proportional to its sensitivity.

    s(w, b) = max over paths through w, over heads h reading block b, of  prod of ||v[h]|| for the other v on the path
    rate    = tau * s_init / s

The sensitivity is how far a unit change of block b of weight w can move a logit through one path. The paper's
Algorithm 1 (MHA) and Algorithm 2 (MLA) are both this rule; their `factor` is 1 / s, their `lr` is lr * rate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import reduce

import torch
from torch import Tensor

from quacklr.core.blocks import Blocks
from quacklr.core.path import LogitPath
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
        self.one_term_each = len(self.block) == self.blocks.total
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

    def sensitivity(self, norms: list[Tensor]) -> Tensor:
        """The sensitivities of all blocks, (total,), from their norms. Does not wait for the device."""
        norm = torch.cat([*norms, self.one])
        of_term = reduce(torch.mul, [norm.take(partners) for partners in self.partners])
        if self.one_term_each:
            return of_term
        return norm.new_zeros(self.blocks.total).scatter_reduce_(0, self.block, of_term, "amax")

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
