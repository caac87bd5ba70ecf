"""Names of many layers as one pattern: model.layers.{0-31}.self_attn."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

Numbers = tuple[int, ...]


def shape(name: str) -> str:
    """The name with {} for its numbers. Names of one shape can be written as one pattern."""
    return ".".join("{}" if part.isdigit() else part for part in name.split("."))


def pattern(names: Sequence[str]) -> str:
    """Names of one shape as a pattern; as several patterns, if the names are not all combinations of their numbers."""
    numbers = {tuple(int(part) for part in name.split(".") if part.isdigit()) for name in names}
    return ", ".join(shape(names[0]).format(*map(_spelled, box)) for box in _boxes(numbers))


def _boxes(tuples: Iterable[Numbers]) -> list[tuple[Numbers, ...]]:
    """The given tuples as a union of boxes. A box has a tuple of numbers for each position, and all combinations.

    First numbers that are followed by the same tuples are in one box.
    """
    rest: dict[int, set[Numbers]] = {}
    for numbers in sorted(tuples):
        if not numbers:
            return [()]
        rest.setdefault(numbers[0], set()).add(numbers[1:])
    alike: dict[frozenset[Numbers], list[int]] = {}
    for first, others in rest.items():
        alike.setdefault(frozenset(others), []).append(first)
    return [(tuple(firsts), *box) for others, firsts in alike.items() for box in _boxes(others)]


def _spelled(numbers: Numbers) -> str:
    """Numbers as 3, {0-31} or {4,12,20,28}; many runs of one length at equal steps as {0-2,4-6,...,68-70}."""
    if len(numbers) == 1:
        return str(numbers[0])
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    runs = [str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
    steps = {later - earlier for each in (starts, ends) for earlier, later in pairwise(each)}
    return "{" + ",".join([*runs[:2], "...", runs[-1]] if len(runs) > 4 and len(steps) == 1 else runs) + "}"
