"""The largest norm of the inputs that weights are multiplied with, recorded in every product with a parameter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod, sqrt
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from quacklr.core.weight import Weight
from quacklr.util.products import einsum_labels

PRODUCTS = {"matmul": 0, "__matmul__": 0, "mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}  # index of the first factor


class Inputs(TorchFunctionMode):
    """While entered, keeps the largest norm of the inputs of each weight.

    A weight that is parametrised, cast or scaled before the product is not recorded.
    """

    def __init__(self, weights: Iterable[Weight]) -> None:
        super().__init__()
        self._largest: dict[int, float] = {_storage(weight.param): float("nan") for weight in weights}

    def of(self, weight: Weight) -> float:
        """The largest norm, including the 1 that a bias multiplies; 1 for a single column; NaN if none was recorded."""
        if weight.param.numel() == len(weight.block_of_row):
            return 1.0
        norm = self._largest[_storage(weight.param)]
        return sqrt(norm**2 + 1) if weight.bias is not None else norm

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record the norms of the inputs if the function is a product, and call it."""
        kwargs = kwargs or {}
        for weight, norms in _factors(getattr(func, "__name__", ""), (*args, *kwargs.values())):
            if (storage := _storage(weight)) in self._largest:
                norm = float(norms().max())
                if norm == norm:  # inputs are NaN while the order of heads is measured
                    self._largest[storage] = max(norm, self._largest[storage])  # max(x, NaN) is x
        return func(*args, **kwargs)


def _factors(name: str, operands: tuple[Any, ...]) -> Iterator[tuple[Tensor, Any]]:
    """Each factor of a product that may be a weight, and a function for the norms of the other factor.

    A weight that is added to activations, such as a bias of the queries, has inputs of norm 1.
    """
    if name == "linear":
        x, weight = operands[:2]
        yield weight, lambda: _norms(x, -1)
    elif name in PRODUCTS:
        left, right = operands[PRODUCTS[name] :][:2]
        yield right, lambda: _norms(left, -1)
        yield left, lambda: _norms(right, -2 if right.ndim > 1 else -1)
    elif name in ("conv1d", "conv2d"):  # bound on a patch's norm, as if all positions had the largest
        x, weight = operands[:2]
        yield weight, lambda: _norms(x, 1) * sqrt(prod(weight.shape[2:]))
    elif name in ("add", "__add__", "__radd__", "add_", "__iadd__"):
        left, right = operands[:2]
        sizes = [each.ndim if isinstance(each, Tensor) else -1 for each in (left, right)]
        if 0 <= min(sizes) < max(sizes):
            yield (left if sizes[0] < sizes[1] else right), lambda: torch.ones(1)
    elif name == "einsum":
        tensors = operands[1:] if isinstance(operands[1], Tensor) else operands[1]
        if len(tensors) == 2:
            left, right = tensors
            summed = einsum_labels(operands[0], left.ndim, right.ndim).summed_axes()
            yield right, lambda: _norms(left, [axis for axis, _ in summed])
            yield left, lambda: _norms(right, [axis for _, axis in summed])


def _norms(x: Tensor, dims: int | list[int]) -> Tensor:
    return torch.linalg.vector_norm(x.detach().float(), dim=dims)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
