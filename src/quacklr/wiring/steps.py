"""Real steps, and what they do to each head's logits: the largest change, beside what the theorem allows.

    bound[h] = |scale| max ||x|| max ||y|| * sum over paths of (prod (||v|| + ||dv||) - prod ||v||)

with spectral norms of the blocks that head h reads, the tightest for which it is proved (docs/theory.md). What stands
between the weights of a path (rotations) is taken to keep lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from quacklr.wiring.claims import Claims, Layer
from quacklr.wiring.hearing import Hearing
from quacklr.wiring.twin import Twin, aside

ROUNDING = 1e-4  # of a bound


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """(H,) each: the largest |change| of a logit in a step, the bound on it, and whether a step went beyond."""

    measured: Tensor
    bound: Tensor
    beyond: Tensor


def changes(twin: Twin, claims: Claims, steps: int) -> list[Change]:
    """For each layer what some steps do, the largest of them."""
    taken = [_step(twin, claims) for _ in range(steps)]
    return [_worst([step[number] for step in taken]) for number in range(len(claims.layers))]


def _step(twin: Twin, claims: Claims) -> list[Change]:
    """One step, and the change of every layer that its claimed rows alone make of it."""
    hearing = Hearing(twin.model, claims.layers, twin.batch)
    pieces = claims.rule.blocks.pieces
    every = dict.fromkeys([*twin.model.parameters(), *claims.params.values()])
    old = [(param, param.detach().clone()) for param in every]
    blocks = [piece.copy() for piece in pieces]
    twin.step()
    v = torch.cat([spectral(block) for block in blocks])
    dv = torch.cat([spectral(piece.copy() - block) for piece, block in zip(pieces, blocks, strict=True)])
    with aside(every) as new:
        for param, was in old:
            param.copy_(was)
        stepped = dict(new)
        for rows in claims.rows:
            param = rows.part.param
            param.copy_(torch.where(rows.spread(rows.claimed), stepped[param], param))
        measured = hearing.change()
    return _beside(hearing, measured, v, dv)


def _beside(hearing: Hearing, measured: Sequence[Tensor], v: Tensor, dv: Tensor) -> list[Change]:
    found = []
    for number, layer in enumerate(hearing.layers):
        bound_H = hearing.scales[number] * _allowed(layer, hearing, v, dv)
        slack = ROUNDING * bound_H + hearing.rounding[number]
        found.append(Change(measured[number], bound_H, measured[number] > bound_H + slack))
    return found


def _allowed(layer: Layer, hearing: Hearing, v: Tensor, dv: Tensor) -> Tensor:
    """(H,): the bound but for the scale."""
    total_H = torch.zeros(layer.heads, dtype=torch.float64)
    for term in layer.terms:
        lengths = prod(hearing.lengths.of(weight) for weight in term.ends)
        total_H += lengths * ((v + dv)[term.reads_WH].prod(0) - v[term.reads_WH].prod(0))
    return total_H


def spectral(blocks_BRC: Tensor) -> Tensor:
    """(B,): the largest singular value of each block, exactly."""
    blocks_BRC = blocks_BRC.detach().cpu().double()
    wide = blocks_BRC.shape[1] <= blocks_BRC.shape[2]
    gram = blocks_BRC @ blocks_BRC.mT if wide else blocks_BRC.mT @ blocks_BRC
    return torch.linalg.eigvalsh(gram)[:, -1].clamp(min=0).sqrt()


def _worst(steps: Sequence[Change]) -> Change:
    measured, bound, beyond = (
        torch.stack([getattr(step, name) for step in steps]) for name in ("measured", "bound", "beyond")
    )
    return Change(measured.amax(0), bound.amax(0), beyond.any(0))
