"""Whether a value read from JSON has the type that a program expects: files can be edited, and other versions exist."""

from __future__ import annotations

from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict


def fits(value: Any, kind: Any) -> bool:
    """Whether a value is of a type: a plain one, Any, Literal, a union, list[X], dict[str, X], tuple or TypedDict.

    A float is a finite number, also a whole one. A bool is no number. A tuple is a list of that length in JSON.
    A TypedDict may have more keys than it names.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return True
    if origin in (Union, UnionType):
        return any(fits(value, each) for each in inner)
    if origin is Literal:
        return any(type(value) is type(each) and value == each for each in inner)
    if origin is list:
        return isinstance(value, list) and all(fits(each, inner[0]) for each in value)
    if origin is dict:
        return isinstance(value, dict) and all(fits(each, inner[1]) for each in value.values())
    if origin is tuple:
        return isinstance(value, list) and len(value) == len(inner) and all(map(fits, value, inner))
    if is_typeddict(kind):
        return isinstance(value, dict) and kind.__required_keys__ <= value.keys() and not misfits(value, kind)
    if kind is float:
        return type(value) in (int, float) and abs(value) < 1e300
    if kind is int:
        return type(value) is int and abs(value) < 2**63
    return isinstance(value, NoneType if kind is None else kind)


def misfits(values: dict[str, Any], kind: Any) -> list[str]:
    """The keys of a dict whose values do not have the types that the hints of a class give to these names."""
    hints = _hints(kind)
    return [name for name, value in values.items() if name in hints and not fits(value, hints[name])]


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)
