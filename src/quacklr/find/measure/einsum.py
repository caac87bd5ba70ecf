"""Which axis of a product is which axis of its factors: matmul and einsum in one notation, a letter an axis."""

from __future__ import annotations

import string
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Labels:
    """The axes of two factors and of their product; equal labels are the same axis."""

    left: str
    right: str
    out: str

    def kept(self, of_right: bool) -> tuple[tuple[int, int], ...]:
        """(axis of the product, axis of the factor), for every axis of the factor that the product still has."""
        factor = self.right if of_right else self.left
        return tuple((self.out.index(label), axis) for axis, label in enumerate(factor) if label in self.out)

    def summed(self) -> tuple[int, int] | None:
        """The axis of each factor that the product is a sum over; None if there is not exactly one."""
        both = [label for label in self.left if label in self.right and label not in self.out]
        return (self.left.index(both[0]), self.right.index(both[0])) if len(both) == 1 else None


def labels_of_matmul(left: int, right: int) -> Labels:
    """`left @ right`, of factors with so many dimensions: batch axes are aligned at their ends."""
    batch = string.ascii_uppercase[: max(left, right, 2) - 2]
    left_label = batch[len(batch) - max(left - 2, 0) :] + ("id" if left > 1 else "d")
    right_label = batch[len(batch) - max(right - 2, 0) :] + ("dj" if right > 1 else "d")
    return Labels(left_label, right_label, batch + ("i" if left > 1 else "") + ("j" if right > 1 else ""))


def labels_of_einsum(equation: str, left: int, right: int) -> Labels:
    """The labels of an einsum of two factors with so many dimensions; `...` stands for upper case letters."""
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    one, two = inputs.split(",")
    rest = max(left - len(one.replace("...", "")), right - len(two.replace("...", "")))
    free = "".join(c for c in string.ascii_uppercase if c not in equation)[: max(rest, 0)]
    if not arrow:
        once = [c for c in sorted(set(one + two) - {".", ","}) if (one + two).count(c) == 1]
        out = ("..." if "..." in inputs else "") + "".join(once)

    def spelled(labels: str, axes: int) -> str:
        missing = axes - len(labels.replace("...", ""))
        return labels.replace("...", free[len(free) - missing :] if missing else "")

    return Labels(spelled(one, left), spelled(two, right), out.replace("...", free))


def contracted(equation: str, i: int, j: int) -> tuple[str, str] | None:
    """An einsum of several factors in two steps: factors i and j first, then the others and what these two gave.

    None if no axis of these two is summed over before the others come, or if axes are not all named.
    """
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    factors = inputs.split(",")
    rest = [factor for n, factor in enumerate(factors) if n not in (i, j)]
    later = set(out).union(*rest)
    if not arrow or "." in equation or not (set(factors[i]) & set(factors[j])) - later:
        return None
    kept = "".join(label for label in dict.fromkeys(factors[i] + factors[j]) if label in later)
    return f"{factors[i]},{factors[j]}->{kept}", f"{','.join([*rest, kept])}->{out}"
