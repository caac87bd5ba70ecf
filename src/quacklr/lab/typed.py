"""Whether a value read from JSON has the type that a program expects: files can be edited, and other versions exist."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

Check = Callable[[Any], bool]


def fits(value: Any, kind: Any) -> bool:
    """Whether a value is of a type: a plain one, Any, Literal, a union, list[X], dict[str, X], tuple or TypedDict.

    A float is a finite number, also a whole one. A bool is no number. A tuple is a list in JSON.
    A TypedDict may have more keys than it names.
    """
    return check_of(kind)(value)


def misfits(values: dict[str, Any], kind: Any) -> list[str]:
    """The keys of a dict whose values do not have the types that the hints of a class give to these names."""
    checks = checks_of(kind)
    return [name for name, value in values.items() if name in checks and not checks[name](value)]


@cache
def checks_of(kind: Any) -> dict[str, Check]:
    """A check for each name that a class has a hint for."""
    return {name: check_of(hint) for name, hint in get_type_hints(kind).items()}


@cache
def check_of(kind: Any) -> Check:
    """The check for a type, made once: a ledger has millions of numbers."""
    inner = [check_of(each) for each in get_args(kind)] if get_origin(kind) is not Literal else []
    match get_origin(kind):
        case _ if kind is Any:
            return lambda _: True
        case _ if kind is float:
            return lambda value: type(value) in (float, int) and abs(value) < 1e300
        case _ if kind is int:
            return lambda value: type(value) is int and abs(value) < 2**63
        case _ if is_typeddict(kind):
            required = kind.__required_keys__
            return lambda value: isinstance(value, dict) and required <= value.keys() and not misfits(value, kind)
        case origin if origin in (Union, UnionType):
            first, other = inner[0], check_of(Union[get_args(kind)[1:]])  # noqa: UP007
            return lambda value: first(value) or other(value)
        case origin if origin is Literal:
            known = get_args(kind)
            return lambda value: isinstance(value, str) and value in known
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
            plain = NoneType if kind is None else kind
            return lambda value: isinstance(value, plain)
