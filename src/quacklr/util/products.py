"""The axes of a product of two tensors, as einsum labels: one letter for each axis, for matmul and for einsum."""

from __future__ import annotations

import string
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import combinations


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
    """The labels of an einsum of two factors with these numbers of dimensions."""
    (one, two), out = explicit_labels(equation, [left, right])
    return ProductLabels(one, two, out)


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
