"""Functions of torch, as a TorchFunctionMode gets them: sets of equivalent functions, their arguments and products.

Some names here are internal to torch: tests/util/test_torch_contract.py fails if a version of torch changes them. The
axes of a product are einsum labels: one letter for each axis, for matmul and for einsum.
"""

from __future__ import annotations

import string
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import combinations
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

SDPA: Any = F.scaled_dot_product_attention
MULTIHEAD: Any = F.multi_head_attention_forward
SOFTMAX: set[Any] = {F.softmax, torch.softmax, torch.special.softmax, Tensor.softmax}
LOGSUMEXP: set[Any] = {torch.logsumexp, Tensor.logsumexp}  # some models compute a softmax with it
MATMUL: set[Any] = {torch.matmul, torch.mm, torch.bmm, Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.__matmul__}
ADDED_MATMUL: set[Any] = {torch.baddbmm, Tensor.baddbmm, torch.addmm, Tensor.addmm, Tensor.addbmm, torch.addbmm}
CONVOLUTION: set[Any] = {F.conv1d, F.conv2d, F.conv3d}
ADD: set[Any] = {torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__iadd__, Tensor.__radd__}
SUBTRACT: set[Any] = {torch.sub, Tensor.sub, Tensor.sub_, Tensor.__sub__, Tensor.__isub__}
CAT: set[Any] = {torch.cat, torch.concat}
CONCATENATE: set[Any] = {*CAT, torch.stack}
FILL: set[Any] = {torch.masked_fill, Tensor.masked_fill, Tensor.masked_fill_}
WHERE: set[Any] = {torch.where, Tensor.where}
SET_ITEM: Any = Tensor.__setitem__
MATRIX_T: Any = vars(torch._C.TensorBase)["mT"].__get__
LAYOUT: set[Any] = {
    *(Tensor.view, Tensor.reshape, Tensor.transpose, Tensor.permute, Tensor.flatten, Tensor.unflatten, Tensor.movedim),
    *(Tensor.unsqueeze, Tensor.squeeze, Tensor.swapaxes, Tensor.__getitem__, MATRIX_T),
    *(torch.reshape, torch.transpose, torch.permute, torch.flatten, torch.unflatten, torch.movedim, torch.unsqueeze),
    *(torch.squeeze, torch.swapaxes),
}

# multi_head_attention_forward without its first check, `if has_torch_function(...)`: with that check, a function mode
# gets one call of the whole function, and not the calls inside it
multihead_opened: Any = FunctionType(
    MULTIHEAD.__code__,
    {**MULTIHEAD.__globals__, "has_torch_function": lambda _: False},
    MULTIHEAD.__name__,
    MULTIHEAD.__defaults__,
)
multihead_opened.__kwdefaults__ = MULTIHEAD.__kwdefaults__


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in a value: itself, or those in lists, tuples and dicts, in order."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def bound(args: Sequence[Any], kwargs: dict[str, Any], *names: str) -> list[Any]:
    """The first arguments of a call, positional or named; None for those that were not given."""
    return [args[i] if i < len(args) else kwargs.get(name) for i, name in enumerate(names)]


@dataclass(frozen=True, slots=True)
class ProductLabels:
    """The labels of two factors and of their product. Axes with the same label are the same."""

    left: str
    right: str
    out: str

    def kept_axes(self, of_right: bool) -> tuple[tuple[int, int], ...]:
        """(axis of the product, axis of the factor) for every axis of one factor that the product has."""
        factor = self.right if of_right else self.left
        return tuple((self.out.index(label), axis) for axis, label in enumerate(factor) if label in self.out)

    def rows_axis(self) -> int:
        """The axis of the product, counted from its end, that only one factor has and that is not the last axis.

        If q . k has one key in each column, these are the queries. -2 if there is no such axis, or several.
        """
        labels = [label for label in self.out[:-1] if (label in self.left) != (label in self.right)]
        return self.out.index(labels[0]) - len(self.out) if len(labels) == 1 else -2

    def summed_axes(self) -> list[tuple[int, int]]:
        """(axis of the left factor, axis of the right factor) for every label that the product sums over."""
        summed = [label for label in self.left if label in self.right and label not in self.out]
        return [(self.left.index(label), self.right.index(label)) for label in summed]


def matmul_labels(left: int, right: int) -> ProductLabels:
    """The labels of `left @ right` for factors with these numbers of dimensions."""
    batch = string.ascii_uppercase[: max(left, right, 2) - 2]
    of_left = batch[len(batch) - max(left - 2, 0) :] + ("id" if left > 1 else "d")
    of_right = batch[len(batch) - max(right - 2, 0) :] + ("dj" if right > 1 else "d")
    return ProductLabels(of_left, of_right, batch + ("i" if left > 1 else "") + ("j" if right > 1 else ""))


def explicit_labels(equation: str, dimensions: Sequence[int]) -> tuple[list[str], str]:
    """The labels of each factor and of the result of an einsum. `...` becomes upper case letters.

    `dimensions` has the number of dimensions of each factor. An equation without `->` keeps the labels that occur once.
    """
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    factors = inputs.split(",")
    missing = [axes - len(f.replace("...", "")) for f, axes in zip(factors, dimensions, strict=True)]
    free = "".join(c for c in string.ascii_uppercase if c not in equation)[: max(0, *missing)]
    if not arrow:
        once = [c for c in sorted(set(inputs) - {".", ","}) if inputs.count(c) == 1]
        out = ("..." if "..." in inputs else "") + "".join(once)
    factors = [f.replace("...", free[len(free) - axes :]) for f, axes in zip(factors, missing, strict=True)]
    return factors, out.replace("...", free)


def first_pair(factors: Sequence[str], out: str, weights: Collection[int]) -> tuple[int, int, str] | None:
    """Which two factors of an einsum of several to multiply first, and the labels of their product. None if none fit.

    Best are two activations that share a label that is summed over; `weights` are the positions of weights. Then a
    weight and an activation that do; then two factors of which one has all labels of the other.
    """
    found = []
    for i, j in combinations(range(len(factors)), 2):
        one, two = set(factors[i]), set(factors[j])
        later = set(out).union(*(factor for n, factor in enumerate(factors) if n not in (i, j)))
        sums = bool((one & two) - later)
        if sums or one <= two or two <= one:
            kept = "".join(label for label in dict.fromkeys(factors[i] + factors[j]) if label in later)
            found.append((not sums, i in weights or j in weights, i, j, kept))
    return min(found)[2:] if found else None


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """A product of matrices. `summand`: the tensor that it is added to. `labels`: None unless there are two factors."""

    factors: list[Tensor]
    labels: ProductLabels | None = None
    summand: Tensor | None = None


def product_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Product | None:
    """The product that a function computes; None if it multiplies no matrices."""
    if func is F.linear:
        x, weight, bias = bound(args, kwargs, "input", "weight", "bias")
        batch, row = string.ascii_uppercase[: x.ndim - 1], "j" * (weight.ndim - 1)
        return Product([x, weight], ProductLabels(f"{batch}d", f"{row}d", batch + row), bias)
    if func is not torch.einsum and func not in MATMUL and func not in ADDED_MATMUL:
        return None
    tensors = tensors_in((args, {name: value for name, value in kwargs.items() if name != "out"}))
    if func in ADDED_MATMUL:
        sums_batch = func in (torch.addbmm, Tensor.addbmm)
        labels = None if sums_batch else matmul_labels(tensors[1].ndim, tensors[2].ndim)
        return Product(tensors[1:], labels, tensors[0])
    if len(tensors) != 2 or (func is torch.einsum and not isinstance(args[0], str)):
        return Product(tensors)
    sizes = tensors[0].ndim, tensors[1].ndim
    if func is not torch.einsum:
        return Product(tensors, matmul_labels(*sizes))
    (left, right), out = explicit_labels(args[0], sizes)
    return Product(tensors, ProductLabels(left, right, out))
