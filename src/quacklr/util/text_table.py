"""Plain-text tables and lists for printed reports."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest

from torch import Tensor

from quacklr.util.layer_names import pattern, shape


def columns(rows: Iterable[Sequence[str]]) -> list[str]:
    """Rows of cells as aligned lines, indented by two spaces; a cell with line breaks takes several lines."""
    cells = [[cell.split("\n") for cell in row] for row in rows]
    widths = [max(len(line) for cell in column for line in cell) for column in zip(*cells, strict=True)]
    lines = [line for row in cells for line in zip_longest(*row, fillvalue="")]
    return ["  " + "  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]


def value_range(values: Tensor, digits: int = 3, missing: str = "?") -> str:
    """`low..high`, or one number if both round to the same; `missing` if a value is not finite."""
    if not values.isfinite().all():
        return missing
    low, high = (f"{float(value):.{digits}g}" for value in (values.min(), values.max()))
    return low if low == high else f"{low}..{high}"


def grouped(texts: Iterable[tuple[str, str]], spell: Callable[[list[str]], str] = pattern) -> list[str]:
    """One line `names: text` for all names with the same text that differ only in their numbers."""
    names_of: dict[tuple[str, str], list[str]] = {}
    for name, text in texts:
        names_of.setdefault((shape(name), text), []).append(name)
    return [f"  {spell(names) or '(model)'}: {text}" for (_, text), names in names_of.items()]
