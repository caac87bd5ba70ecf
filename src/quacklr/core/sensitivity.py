"""The one rule: a weight's learning rate goes with one over its sensitivity.

    s(w, b) = max over paths through w, over heads h reading block b, of  prod of ||v[h]|| for the other v on the path
    rate    = tau * s_init / s

The sensitivity is how far a unit change of the block can move a logit through any one path. The paper's Algorithm 1
(MHA) and Algorithm 2 (MLA) are both this line; their `factor` is 1 / s, their `lr` is lr * rate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import reduce

import torch
from torch import Tensor

from quacklr.core.blocks import Blocks
from quacklr.core.path import LogitPath
from quacklr.core.weight import Weight, distinct


class Rule:
    """The rule for some paths, compiled to index vectors: a few tensor operations, however many layers and heads.

    A term is one way in which a block enters a head's logit: `block` (terms,) says which block it is, and `partners`, a
    list of (terms,), which others are on the path. Where a path is short, `partners` names one more block, of norm 1.
    `blocks_of` makes the blocks: `distributed.sharded_blocks.blocks_of` also of sharded weights.
    """

    def __init__(self, paths: Iterable[LogitPath], blocks_of: Callable[[list[Weight]], Blocks] = Blocks) -> None:
        self.paths = list(paths)
        if not self.paths:
            raise ValueError("no paths given; without a path there is no weight to control")
        self.canonical = distinct(weight for path in self.paths for weight in path.weights)
        self.weights = list(dict.fromkeys(self.canonical.values()))
        self.parts = [part for weight in self.weights for part in weight.parts]
        self.blocks = blocks_of(self.weights)
        block, partners = self._terms()
        self._refuse_unread(block)
        device = self.blocks.device
        self.block, self.partners = block.to(device), [b.to(device) for b in partners]
        self.once = len(block) == self.blocks.total
        self.one = torch.ones(1, device=device, dtype=torch.float32)

    def _terms(self) -> tuple[Tensor, list[Tensor]]:
        most_beside = max(1, *(len(path.weights) - 1 for path in self.paths))
        terms = []
        for path in self.paths:
            places = [self.blocks.flat_index[self.canonical[weight]] for weight in path.weights]
            read = [place[blocks] for place, blocks in zip(places, path.reads, strict=True)]
            nothing = torch.full((path.heads,), self.blocks.total, device="cpu")
            for i, block in enumerate(read):
                others = read[:i] + read[i + 1 :]
                terms.append(torch.stack([block, *others, *[nothing] * (most_beside - len(others))]))
        block, *partners = torch.unique(torch.cat(terms, 1), dim=1)  # in the order of blocks
        return block, partners

    def _refuse_unread(self, block: Tensor) -> None:
        unread = torch.bincount(block, minlength=self.blocks.total) == 0
        for weight, place in self.blocks.flat_index.items():
            if unread[place].any():
                raise ValueError(
                    f"{weight.name}: block {int(unread[place].nonzero()[0])} is read by no head of its path"
                )

    def sensitivity(self, norms: list[Tensor]) -> Tensor:
        """(total,) sensitivities of all blocks from their norms. Nothing leaves the device."""
        norm = torch.cat([*norms, self.one])
        of_term = reduce(torch.mul, [norm.take(partners) for partners in self.partners])
        if self.once:
            return of_term
        return norm.new_zeros(self.blocks.total).scatter_reduce_(0, self.block, of_term, "amax")


def rates_from(target: Tensor, now: Tensor, tau: float, out: Tensor | None = None) -> Tensor:
    """Multipliers of lr from sensitivities: target / now, where target is tau * the sensitivity at the start.

    tau where nothing has changed, and never NaN or inf: a block whose partner has become exactly zero moves no logit,
    and steps with tau * lr until it does again.
    """
    return torch.div(target, now, out=out).nan_to_num_(nan=tau, posinf=tau)
