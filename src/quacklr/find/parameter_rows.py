"""Maps rows of a projection's output to rows of a parameter.

The weight of a projection may be a parameter, or computed from one: transposed, a slice of a larger one, joined from
several, or parametrised. Its gradient shows which rows of which parameter it is computed from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from quacklr.core.weight import Weight
from quacklr.util.autograd import batches, gradients, leaves_of


class NotRowsError(ValueError):
    """A head does not read whole rows of a parameter. The message is the reason."""


def mask_key(mask: Tensor) -> bytes:
    """Equal for equal masks."""
    return bytes(mask.flatten().tolist())


def weight_of(tensor: Tensor, masks: Sequence[Tensor], parameters: dict[int, str]) -> tuple[Weight, list[int]] | None:
    """The rows of a parameter that masked parts of a tensor are computed from, and the block of each mask.

    `masks` has one mask for each head. The weight is named after the parameter. None if the tensor does not depend on
    the scale of any parameter.
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
    """The block of each row, and the dimension of the rows: one along which blocks change, or the first several.

    `block` has the parameter's shape, or size 1 along dimensions where it does not change.
    """
    for dims in [(dim,) for dim in range(block.ndim)] + [tuple(range(several)) for several in range(2, block.ndim)]:
        rows = math.prod(block.shape[dim] for dim in dims)
        by_row = block.movedim(dims, tuple(range(len(dims)))).reshape(rows, -1)
        if rows == math.prod(param.shape[dim] for dim in dims) and (by_row == by_row[:, :1]).all():
            return by_row[:, 0], dims if len(dims) > 1 else dims[0]
    raise NotRowsError(f"what a head reads of {name} is not whole rows of it")
