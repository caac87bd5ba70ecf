"""QK clip as Kimi K2 writes it, in slow plain Python: one head after another, on slices of a state dict.

The second half of Algorithm 1 (MuonClip) of "Kimi K2: Open Agentic Intelligence", arXiv 2507.20534; the first half is
the optimizer's own step, which has been taken when this runs:

    2. QK-Clip
    for each attention head h in every attention layer of the model do
        obtain S_max[h], already computed during forward
        if S_max[h] > tau then
            gamma <- tau / S_max[h]
            W_qc[h] <- W_qc[h] * sqrt(gamma)
            W_kc[h] <- W_kc[h] * sqrt(gamma)
            W_qr[h] <- W_qr[h] * gamma

qc and kc are the parts of a query and a key without rotation, qr the rotated part of a query; the rotated part of the
key, kr, belongs to all heads and is left alone. Plain multi-head attention is qc and kc only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

State = dict[str, Tensor]


@dataclass(frozen=True)
class Rows:
    """Where the rows of each head are: from `start + head * stride`, `size` of them, in each of these tensors.

    A bias is named among the tensors. `axis` is 1 for a weight that lies on its side, as GPT-2's do.
    """

    names: tuple[str, ...]
    size: int
    stride: int
    start: int = 0
    axis: int = 0

    def scale(self, state: State, head: int, factor: float) -> None:
        """Row by row, and nothing at all for a factor of one."""
        if factor == 1:
            return
        first = self.start + head * self.stride
        for name in self.names:
            for row in range(first, first + self.size):
                state[name].select(self.axis if state[name].ndim > 1 else 0, row).mul_(factor)


def gamma(largest: float, threshold: float) -> float:
    """`if S_max[h] > tau then gamma <- tau / S_max[h]`; one, which changes nothing, for all else and for no number."""
    return threshold / largest if threshold < largest < math.inf else 1.0


def mha(state: State, q: Rows, k: Rows, maxima: list[float], threshold: float) -> None:
    """`W_qc[h] <- W_qc[h] * sqrt(gamma)`, `W_kc[h] <- W_kc[h] * sqrt(gamma)`; biases are rows of them too."""
    for head, largest in enumerate(maxima):
        root = math.sqrt(gamma(largest, threshold))
        q.scale(state, head, root)
        k.scale(state, head, root)


def gqa(state: State, q: Rows, k: Rows, group: int, maxima: list[float], threshold: float) -> None:
    """Not in the paper: `group` queries share a key, which may shrink by no more than the least clipped of them asks.

    With a group of one this is mha.
    """
    gammas = [gamma(largest, threshold) for largest in maxima]
    for block in range(len(maxima) // group):
        members = range(block * group, (block + 1) * group)
        shared = math.sqrt(max(gammas[head] for head in members))
        k.scale(state, block, shared)
        for head in members:
            q.scale(state, head, gammas[head] / shared)


def mla(state: State, qc: Rows, qr: Rows, kc: Rows, maxima: list[float], threshold: float) -> None:
    """The three lines of the algorithm, for each head; kr and what stands before qc, qr and kc is not touched."""
    for head, largest in enumerate(maxima):
        shrink = gamma(largest, threshold)
        qc.scale(state, head, math.sqrt(shrink))
        kc.scale(state, head, math.sqrt(shrink))
        qr.scale(state, head, shrink)
