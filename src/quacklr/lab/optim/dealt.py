"""Matrices dealt out to owners: from shards to whole matrices and back, in two collectives however many there are.

Every rank has a shard of every matrix. They are dealt like cards, matrix i to rank (first + i) % ranks, so each rank
knows who owns what without asking. One all-to-all brings the shards to the owners, and its mirror image back:

    rank 0   a0 b0 c0 d0   <->   a0 a1   c0 c1
    rank 1   a1 b1 c1 d1   <->   b0 b1   d0 d1

No number travels to more than one rank, and each rank works on 1/ranks of the matrices.

Shapes: R rows, C columns, of a matrix, a shard or a stack.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from quacklr.core.local import ShardSpec, is_partial, is_sharded, local_tensor, shard_specs

RowsColumns = tuple[int, ...]


def cut_of(param: Tensor) -> ShardSpec | None:
    """How a parameter is cut; None where each rank has all of it, as of a plain tensor."""
    found = shard_specs(param)
    return found[0] if found else None


def shards_of(shape: RowsColumns, cut: ShardSpec) -> list[RowsColumns]:
    """The shapes of all shards, by torch.chunk's rule: equal, but for the last ones, which are smaller or empty."""
    whole, ranks = shape[cut.dim], dist.get_world_size(cut.group)
    ends = [min(whole, -(-whole // ranks) * rank) for rank in range(ranks + 1)]
    return [(*shape[: cut.dim], end - start, *shape[cut.dim + 1 :]) for start, end in pairwise(ends)]


def gradient_here(param: Tensor) -> Tensor:
    """What this rank has of the gradient. One that is not cut as its parameter is, unlike FSDP's, is first made so."""
    whole: Any = param
    assert whole.grad is not None
    if is_sharded(param) and is_sharded(whole.grad) and whole.grad.placements != whole.placements:
        return local_tensor(whole.grad.redistribute(placements=whole.placements))
    return local_tensor(whole.grad)


def refuse_unless_one_cut(name: str, param: Tensor) -> None:
    """ValueError for a DTensor that is cut otherwise than along one mesh dimension, by torch.chunk's rule."""
    found, shape, mine = shard_specs(param), tuple(param.shape), tuple(local_tensor(param).shape)
    if len(found) > 1 or is_partial(param) or any(cut.factor > 1 for cut in found):
        placements = getattr(param, "placements", None)
        raise ValueError(
            f"Muon steps matrices sharded over one mesh dimension, but {name} is placed as {placements}; shard it by "
            "fully_shard without tensor parallelism, or give it to AdamW"
        )
    expected = shards_of(shape, found[0])[dist.get_rank(found[0].group)] if found else shape
    if mine != expected:
        raise ValueError(
            f"this rank has {mine} of {name} of shape {shape}, but torch.chunk would give it {expected}; shard it by "
            "fully_shard or distribute_tensor"
        )


class ShardExchange:
    """Matrices of one cut, and their owners. While it lives it holds what this rank has of them, and what it owns.

    Write this rank's part of each matrix into `shards`, and after `at_owners` read it there. All ranks of the cut
    must do so with the same matrices in the same order, or they wait for each other for ever.
    """

    def __init__(
        self, shapes: Sequence[RowsColumns], cut: ShardSpec, first: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._cut, self._largest = cut, max(map(prod, shapes))
        ranks, mine = dist.get_world_size(cut.group), dist.get_rank(cut.group)
        shards = {shape: shards_of(shape, cut) for shape in set(shapes)}
        hands = [range((rank - first) % ranks, len(shapes), ranks) for rank in range(ranks)]
        held = [[shards[shapes[i]][mine] for i in hand] for hand in hands]
        owned = [[shards[shapes[i]][rank] for i in hands[mine]] for rank in range(ranks)]
        self._held, self._owned = _Parcels(held, dtype, device), _Parcels(owned, dtype, device)
        dealt = dict(zip(chain(*hands), chain(*self._held.shards), strict=True))
        self.shards: list[Tensor] = [dealt[i] for i in range(len(shapes))]
        """This rank's part of each matrix, in the order they were given."""

    def at_owners(self, work: Callable[[Tensor], Tensor], most: int) -> None:
        """Put whole matrices through `work`, each at its owner, stacked to at most `most` numbers or one matrix."""
        self._send(self._held, self._owned)
        matrices = list(zip(*self._owned.shards, strict=True))
        each = max(1, most // self._largest)
        for start in range(0, len(matrices), each):
            self._work_on(matrices[start : start + each], work)
        self._send(self._owned, self._held)

    def _work_on(self, matrices: list[tuple[Tensor, ...]], work: Callable[[Tensor], Tensor]) -> None:
        """A matrix comes as its shards, which take the result."""
        dim = self._cut.dim
        stack_RC = work(torch.cat([torch.cat(shards, dim) for shards in matrices]))
        heights = [sum(shard_RC.numel() for shard_RC in shards) // stack_RC.shape[1] for shards in matrices]
        for shards, matrix_RC in zip(matrices, stack_RC.split(heights), strict=True):
            parts = matrix_RC.split([shard_RC.shape[dim] for shard_RC in shards], dim)
            for shard_RC, part_RC in zip(shards, parts, strict=True):
                shard_RC.copy_(part_RC)

    def _send(self, parcels: _Parcels, to: _Parcels) -> None:
        dist.all_to_all_single(to.flat, parcels.flat, to.sizes, parcels.sizes, group=self._cut.group)


class _Parcels:
    """A parcel for each rank, or from each: shards that lie one after another in memory."""

    def __init__(self, shapes: list[list[RowsColumns]], dtype: torch.dtype, device: torch.device) -> None:
        self.sizes = [sum(map(prod, parcel)) for parcel in shapes]
        self.flat = torch.empty(sum(self.sizes), dtype=dtype, device=device)
        pieces = iter(self.flat.split([prod(shape) for shape in chain(*shapes)]))
        self.shards: list[list[Tensor]] = [[next(pieces).view(shape) for shape in parcel] for parcel in shapes]
