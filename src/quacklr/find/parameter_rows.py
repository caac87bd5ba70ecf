"""From rows of a projection's output to rows of a parameter.

A projection's weight may be a parameter, or made of one: transposed, cut out of a larger one, put together from
several, reparametrised. Whose rows they are is found by differentiating the weight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from quacklr.core.weight import Weight
from quacklr.util.autograd import gradients, leaves_of


class NotRowsError(ValueError):
    """What a head reads is not whole rows of a parameter."""


def fingerprint(mask: Tensor) -> bytes:
    """Equal for equal masks. (torch alone has no tobytes.)"""
    return bytes(mask.flatten().tolist())


def weight_of(tensor: Tensor, masks: Sequence[Tensor], parameters: dict[int, str]) -> tuple[Weight, list[int]] | None:
    """The rows of a parameter that make these parts of a tensor, one for each head; and which block is whose.

    The weight is named after the parameter. None if the tensor does not depend on the scale of any parameter.
    """
    if id(tensor) in parameters:
        return _in_blocks(tensor, masks, parameters[id(tensor)])
    masks = [mask.expand(tensor.shape) for mask in masks]
    owned = torch.stack(masks).any(0)
    sources = [leaf for leaf in leaves_of(tensor) if id(leaf) in parameters]
    sources = [source for source in sources if _gradient(tensor, source, owned).any()]
    shares = [_share(tensor, source, owned) for source in sources]
    close = max(1e-3, 8 * torch.finfo(tensor.dtype).eps)
    if all(abs(share) < close for share in shares):
        return None
    linear = [source for source, share in zip(sources, shares, strict=True) if abs(share - 1) < close]
    if len(linear) != 1:
        names = " and ".join(parameters[id(source)] for source in sources)
        raise NotRowsError(f"its weight is made of {names} in a way that does not follow the scale of just one of them")
    masks = [_gradient(tensor, linear[0], mask).cpu() != 0 for mask in masks]
    return _in_blocks(linear[0], masks, parameters[id(linear[0])])


def _share(tensor: Tensor, source: Tensor, owned: Tensor) -> float:
    """Euler: 1 if twice the source makes twice the owned entries, 0 if it makes the same."""
    noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0)).to(tensor)
    (gradient,) = gradients(tensor, [source], noise * owned.to(tensor))
    whole = float((tensor.detach() * noise * owned.to(tensor)).sum())
    part = 0.0 if gradient is None else float((source.detach() * gradient).sum())
    return part / whole if whole else 1.0  # all zeros: as good as linear


def _gradient(tensor: Tensor, source: Tensor, mask: Tensor) -> Tensor:
    (gradient,) = gradients(tensor, [source], mask.to(tensor))
    return torch.zeros_like(source) if gradient is None else gradient


def _in_blocks(param: Tensor, masks: Sequence[Tensor], name: str) -> tuple[Weight, list[int]]:
    """Masks, one a head, as blocks of a weight, and the block of each head."""
    keys = [fingerprint(mask) for mask in masks]
    distinct = dict(zip(keys, masks, strict=True))
    ordered = sorted(distinct, key=lambda key: int(distinct[key].flatten().nonzero()[0]))
    block = torch.full(masks[0].shape, -1)
    for number, key in enumerate(ordered):
        if (block[distinct[key]] >= 0).any():
            raise NotRowsError(f"rows of {name} serve several heads, but not the same of them: its heads are mixed")
        block[distinct[key]] = number
    of_row, dim = _along_one_dim(block, param, name)
    return Weight(name, param, of_row, dim), [ordered.index(key) for key in keys]


def _along_one_dim(block: Tensor, param: Tensor, name: str) -> tuple[Tensor, int | tuple[int, ...]]:
    """The dimension that blocks change along, or the first several; and the block of each row along it.

    `block` has the parameter's shape, or size 1 where it does not change.
    """
    for dims in [(dim,) for dim in range(block.ndim)] + [tuple(range(several)) for several in range(2, block.ndim)]:
        of_row = (
            block.movedim(dims, tuple(range(len(dims))))
            .flatten(0, len(dims) - 1)
            .reshape(-1, math.prod(block.shape[d] for d in range(block.ndim) if d not in dims))
        )
        if len(of_row) == math.prod(param.shape[dim] for dim in dims) and (of_row == of_row[:, :1]).all():
            return of_row[:, 0], dims if len(dims) > 1 else dims[0]
    raise NotRowsError(f"what a head reads of {name} is not whole rows of it")
