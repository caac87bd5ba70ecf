"""Assemble sharded matrices on owner ranks and scatter them back, with two all-to-all calls for any number of matrices.

Every rank has a shard of every matrix. Rank (first + i) % ranks owns matrix i, so ownership needs no communication.
One all-to-all sends the shards to the owners, and a second one returns them:

    rank 0   a0 b0 c0 d0   <->   a0 a1   c0 c1
    rank 1   a1 b1 c1 d1   <->   b0 b1   d0 d1

No element is sent to more than one rank, and each rank processes 1/ranks of the matrices.

Shapes: R rows, C columns, of a matrix, a shard or a stack.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from quacklr.core.local import is_partial, is_sharded, local_tensor, sharded_dims

RowsColumns = tuple[int, ...]


class ShardSpec(NamedTuple):
    """One sharding of a tensor.

    Attributes:
        group: the process group that the tensor is sharded over.
        dim: the dimension that is sharded.
        factor: torch's split_factor, of a strided shard; else 1.
    """

    group: Any
    dim: int
    factor: int


def shard_specs(tensor: Any) -> tuple[ShardSpec, ...]:
    """How a tensor is sharded, in the order of the mesh's dimensions; without groups of a single process."""
    return tuple(
        ShardSpec(tensor.device_mesh.get_group(i), placement.dim, getattr(placement, "split_factor", 1))
        for i, placement in sharded_dims(tensor)
        if tensor.device_mesh.size(i) > 1
    )


def shard_spec(param: Tensor) -> ShardSpec | None:
    """How a validated parameter is sharded; None for a plain tensor or a replicated DTensor."""
    return next(iter(shard_specs(param)), None)


def shard_shapes(shape: RowsColumns, spec: ShardSpec) -> list[RowsColumns]:
    """The shape of each rank's shard, by torch.chunk's rule: equal sizes, except that the last can be smaller or 0."""
    length, ranks = shape[spec.dim], dist.get_world_size(spec.group)
    ends = [min(length, -(-length // ranks) * rank) for rank in range(ranks + 1)]
    return [(*shape[: spec.dim], end - start, *shape[spec.dim + 1 :]) for start, end in pairwise(ends)]


def local_gradient(param: Tensor) -> Tensor:
    """This rank's shard of the gradient, which is first redistributed if its placements are not the parameter's."""
    sharded: Any = param
    assert sharded.grad is not None
    if is_sharded(param) and is_sharded(sharded.grad) and sharded.grad.placements != sharded.placements:
        return local_tensor(sharded.grad.redistribute(placements=sharded.placements))
    return local_tensor(sharded.grad)


def validate_sharding(name: str, param: Tensor) -> None:
    """ValueError for a DTensor that is not sharded along at most one mesh dimension by torch.chunk's rule."""
    specs, shape, local_shape = shard_specs(param), tuple(param.shape), tuple(local_tensor(param).shape)
    if len(specs) > 1 or is_partial(param) or any(spec.factor > 1 for spec in specs):
        placements = getattr(param, "placements", None)
        raise ValueError(
            f"Muon steps matrices sharded over one mesh dimension, but {name} is placed as {placements}; shard it by "
            "fully_shard without tensor parallelism, or give it to AdamW"
        )
    expected = shard_shapes(shape, specs[0])[dist.get_rank(specs[0].group)] if specs else shape
    if local_shape != expected:
        raise ValueError(
            f"this rank has {local_shape} of {name} of shape {shape}, but torch.chunk would give it {expected}; shard "
            "it by fully_shard or distribute_tensor"
        )


class ShardExchange:
    """Buffers for this rank's shards of some matrices, and for the whole matrices that this rank owns.

    Write this rank's shard of each matrix into `shards`, call `run_at_owners`, and read the results from `shards`. All
    ranks of the process group must do this with the same matrices in the same order, otherwise the collective hangs.
    """

    def __init__(
        self, shapes: Sequence[RowsColumns], spec: ShardSpec, first: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._spec, self._max_numel = spec, max(map(prod, shapes))
        ranks, this_rank = dist.get_world_size(spec.group), dist.get_rank(spec.group)
        by_shape = {shape: shard_shapes(shape, spec) for shape in set(shapes)}
        owned = [range((rank - first) % ranks, len(shapes), ranks) for rank in range(ranks)]  # matrices of each rank
        outgoing = [[by_shape[shapes[i]][this_rank] for i in matrices] for matrices in owned]
        incoming = [[by_shape[shapes[i]][rank] for i in owned[this_rank]] for rank in range(ranks)]
        self._local, self._owned = (_RankBuffers(each, dtype, device) for each in (outgoing, incoming))
        shard_of = dict(zip(chain(*owned), chain(*self._local.shards), strict=True))
        self.shards: list[Tensor] = [shard_of[i] for i in range(len(shapes))]
        """This rank's shard of each matrix, in the order of `shapes`."""

    def run_at_owners(self, function: Callable[[Tensor], Tensor], max_numel: int) -> None:
        """Apply `function` to stacks of whole matrices at their owners.

        A stack has at most `max_numel` elements, or it is a single matrix.
        """
        self._send(self._local, self._owned)
        matrices = list(zip(*self._owned.shards, strict=True))
        size = max(1, max_numel // self._max_numel)
        for start in range(0, len(matrices), size):
            self._run(matrices[start : start + size], function)
        self._send(self._owned, self._local)

    def _run(self, matrices: list[tuple[Tensor, ...]], function: Callable[[Tensor], Tensor]) -> None:
        """Apply `function` to one stack of matrices, each given as its shards, and write the result to the shards."""
        dim = self._spec.dim
        stack_RC = function(torch.cat([torch.cat(shards, dim) for shards in matrices]))
        heights = [sum(shard_RC.numel() for shard_RC in shards) // stack_RC.shape[1] for shards in matrices]
        for shards, matrix_RC in zip(matrices, stack_RC.split(heights), strict=True):
            parts = matrix_RC.split([shard_RC.shape[dim] for shard_RC in shards], dim)
            for shard_RC, part_RC in zip(shards, parts, strict=True):
                shard_RC.copy_(part_RC)

    def _send(self, source: _RankBuffers, target: _RankBuffers) -> None:
        dist.all_to_all_single(target.flat, source.flat, target.sizes, source.sizes, group=self._spec.group)


class _RankBuffers:
    """One flat tensor with a contiguous section for each rank, and views of it as shards."""

    def __init__(self, shapes: list[list[RowsColumns]], dtype: torch.dtype, device: torch.device) -> None:
        self.sizes = [sum(map(prod, section)) for section in shapes]
        self.flat = torch.empty(sum(self.sizes), dtype=dtype, device=device)
        views = iter(self.flat.split([prod(shape) for shape in chain(*shapes)]))
        self.shards: list[list[Tensor]] = [[next(views).view(shape) for shape in section] for section in shapes]
