"""The axes of a product of two tensors, as einsum labels: one letter for each axis, for matmul and for einsum."""

from __future__ import annotations

import string
from dataclasses import dataclass


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
