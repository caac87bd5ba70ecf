"""An attribute that can be read, and set only once."""

from __future__ import annotations

from typing import Any, Generic, NoReturn, TypeVar

T = TypeVar("T")


class ReadOnly(Generic[T]):
    """An attribute that is set when QuacK is attached and can only be read later: others were computed from it."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type) -> T:
        return getattr(instance, f"_{self.name}")

    def __set__(self, instance: Any, value: object) -> NoReturn:
        raise AttributeError(f"{self.name} is fixed when QuacK is attached; remove() this one and attach another")
