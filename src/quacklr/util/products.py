"""Products of tensors, softmaxes and attentions among the calls that a TorchFunctionMode gets.

The axes of a product are einsum labels: one letter for each axis, for matmul and for einsum.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quacklr.util.torch_functions import ADDED_MATMUL, LOGSUMEXP, MATMUL, SDPA, SOFTMAX, bound, tensors_in


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


def einsum_labels(equation: str, left: int, right: int) -> ProductLabels:
    """The labels of an einsum of two factors with these numbers of dimensions; `...` becomes upper case letters."""
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    one, two = inputs.split(",")
    rest = max(left - len(one.replace("...", "")), right - len(two.replace("...", "")))
    free = "".join(c for c in string.ascii_uppercase if c not in equation)[: max(rest, 0)]
    if not arrow:
        once = [c for c in sorted(set(one + two) - {".", ","}) if (one + two).count(c) == 1]
        out = ("..." if "..." in inputs else "") + "".join(once)

    def expanded(labels: str, axes: int) -> str:
        missing = axes - len(labels.replace("...", ""))
        return labels.replace("...", free[len(free) - missing :] if missing else "")

    return ProductLabels(expanded(one, left), expanded(two, right), out.replace("...", free))


def split_einsum(equation: str, i: int, j: int) -> tuple[str, str] | None:
    """An einsum of several factors as two: one of factors i and j, and one of the other factors and that result.

    None if no label is summed over by factors i and j alone, or if the equation has `...` or no output.
    """
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    factors = inputs.split(",")
    rest = [factor for n, factor in enumerate(factors) if n not in (i, j)]
    later = set(out).union(*rest)
    if not arrow or "." in equation or not (set(factors[i]) & set(factors[j])) - later:
        return None
    kept = "".join(label for label in dict.fromkeys(factors[i] + factors[j]) if label in later)
    return f"{factors[i]},{factors[j]}->{kept}", f"{','.join([*rest, kept])}->{out}"


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """A product of matrices. `summand`: the tensor that it is added to. `labels`: None unless there are two factors."""

    factors: list[Tensor]
    labels: ProductLabels | None = None
    summand: Tensor | None = None


class AttentionCall(NamedTuple):
    """The arguments of scaled_dot_product_attention."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


def product_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Product | None:
    """The product that a function computes; None if it multiplies no matrices."""
    if func is not torch.einsum and func not in MATMUL and func not in ADDED_MATMUL:
        return None
    tensors = tensors_in((args, {name: value for name, value in kwargs.items() if name != "out"}))
    if func in ADDED_MATMUL:
        sums_batch = func in (torch.addbmm, Tensor.addbmm)
        labels = None if sums_batch else matmul_labels(tensors[1].ndim, tensors[2].ndim)
        return Product(tensors[1:], labels, tensors[0])
    if len(tensors) != 2:
        return Product(tensors)
    sizes = tensors[0].ndim, tensors[1].ndim
    if func is not torch.einsum:
        return Product(tensors, matmul_labels(*sizes))
    return Product(tensors, einsum_labels(args[0], *sizes) if isinstance(args[0], str) else None)


def softmax_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Tensor, int | None] | None:
    """The input and the dimension of a softmax or of a logsumexp; None for other functions."""
    if func not in SOFTMAX and func not in LOGSUMEXP:
        return None
    given, dim = bound(args, kwargs, "input", "dim")
    return given, dim


def attention_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> AttentionCall | None:
    """The arguments of a call of scaled_dot_product_attention; None for other functions."""
    return AttentionCall(*args, **kwargs) if func is SDPA else None
