"""Type checks of values read from JSON: a file can be edited, or written by another version."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

Check = Callable[[Any], bool]


def fits(value: Any, kind: Any) -> bool:
    """Whether a value has a type: a class, Any, None, a Literal, a union, list[X], dict[str, X], tuple or TypedDict.

    `float` accepts every finite number, also an int; `int` and `float` reject a bool. A tuple is a list in JSON.
    A TypedDict may have additional keys.
    """
    return checker(kind)(value)


def mismatched_keys(values: dict[str, Any], kind: Any) -> list[str]:
    """The keys whose values do not have the types that a class annotates for these names."""
    checks = checkers(kind)
    return [name for name, value in values.items() if name in checks and not checks[name](value)]


@cache
def checkers(kind: Any) -> dict[str, Check]:
    """A check for each annotated name of a class."""
    return {name: checker(hint) for name, hint in get_type_hints(kind).items()}


@cache
def checker(kind: Any) -> Check:
    """The check for a type; cached, because a ledger has millions of numbers."""
    arguments = get_args(kind)
    inner = [checker(each) for each in arguments] if get_origin(kind) is not Literal else []
    match get_origin(kind):
        case _ if kind is Any:
            return lambda _: True
        case _ if kind is float:
            return lambda value: type(value) in (float, int) and abs(value) < 1e300
        case _ if kind is int:
            return lambda value: type(value) is int and abs(value) < 2**63
        case _ if is_typeddict(kind):
            required = kind.__required_keys__
            return lambda value: (
                isinstance(value, dict) and required <= value.keys() and not mismatched_keys(value, kind)
            )
        case origin if origin in (Union, UnionType):
            first, *others = inner  # the first is the usual one
            return lambda value: first(value) or any(check(value) for check in others)
        case origin if origin is Literal:
            return lambda value: isinstance(value, str) and value in arguments
        case origin if origin is list:
            return lambda value: isinstance(value, list) and all(map(inner[0], value))
        case origin if origin is dict:
            return lambda value: isinstance(value, dict) and all(map(inner[1], value.values()))
        case origin if origin is tuple:
            return lambda value: (
                isinstance(value, list | tuple)
                and len(value) == len(inner)
                and all(check(each) for check, each in zip(inner, value, strict=True))
            )
        case _:
            return lambda value: isinstance(value, type(None) if kind is None else kind)
