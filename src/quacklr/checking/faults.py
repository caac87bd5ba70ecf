"""What can be wrong with a head, in words."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from quacklr.util.layer_names import pattern, shape


@dataclass(frozen=True, slots=True)
class Fault:
    """A sentence on some heads of a layer."""

    heads: tuple[int, ...]
    text: str


def about(heads: Tensor, text: str) -> Fault:
    """A fault of the heads that are True; {are} in the text is for their number."""
    numbers = tuple(heads.nonzero().flatten().tolist())
    many = len(numbers) > 1
    return Fault(numbers, f"head{'s' * many} {listed(numbers)} {'are' if many else 'is'} {text}")


def listed(numbers: Iterable[int]) -> str:
    """0-3,7"""
    return pattern([str(number) for number in numbers]).strip("{}")


def folded(told: Iterable[tuple[str, str]]) -> list[str]:
    """A line for all names that differ in their numbers only, and of which the same is told."""
    alike: dict[tuple[str, str], list[str]] = {}
    for name, what in told:
        alike.setdefault((shape(name), what), []).append(name)
    return [f"  {pattern(names) or '(model)'}: {what}" for (_, what), names in alike.items()]
