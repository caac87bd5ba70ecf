"""Plain-text tables and lists for printed reports. Names of equal layers are one pattern: layers.{0-31}.self_attn."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

Numbers = tuple[int, ...]


def columns(rows: Iterable[Sequence[str]]) -> list[str]:
    """Rows of cells as aligned lines, indented by two spaces."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def value_range(values: Tensor) -> str:
    """`low..high`, or one number if both round to the same; `?` if a value is not finite."""
    if not values.isfinite().all():
        return "?"
    low, high = (f"{float(value):.3g}" for value in (values.min(), values.max()))
    return low if low == high else f"{low}..{high}"


def grouped(heading: str, texts: Mapping[str, str]) -> list[str]:
    """A heading, and a line `names: text` for all names with one text that differ in numbers only; or no lines."""
    lines = [f"  {name or '(model)'}: {text}" for name, text in merged(texts.items())]
    return [heading, *lines] if lines else []


def merged(rows: Iterable[Sequence[str]]) -> list[tuple[str, ...]]:
    """Rows of cells, in which rows are one if they differ only in the numbers of the name, which is the first cell."""
    names_of: dict[tuple[str, ...], list[str]] = {}
    for name, *cells in rows:
        names_of.setdefault((_shape(name), *cells), []).append(name)
    return [(pattern(names), *cells) for (_, *cells), names in names_of.items()]


def pattern(names: Sequence[str]) -> str:
    """Names that differ in numbers only, as one pattern; as several, if not all combinations of the numbers occur."""
    numbers = {tuple(int(part) for part in name.split(".") if part.isdigit()) for name in names}
    return ", ".join(_shape(names[0]).format(*map(_spelled, box)) for box in _boxes(numbers))


def _shape(name: str) -> str:
    """The name with {} for its numbers."""
    return ".".join("{}" if part.isdigit() else part for part in name.split("."))


def _boxes(tuples: Iterable[Numbers]) -> list[tuple[Numbers, ...]]:
    """The given tuples as a union of boxes: all combinations of some numbers for each position."""
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
    """Numbers as 3, {0-31} or {4,12,20-22}."""
    if len(numbers) == 1:
        return str(numbers[0])
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    runs = [str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
    return "{" + ",".join(runs) + "}"
