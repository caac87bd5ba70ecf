"""A read-only attribute of QuacK."""

from __future__ import annotations

from typing import Any, Generic, NoReturn, TypeVar

T = TypeVar("T")


class ReadOnly(Generic[T]):
    """An attribute that is fixed when QuacK is attached, because other values were computed from it."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type) -> T:
        return getattr(instance, f"_{self.name}")

    def __set__(self, instance: Any, value: object) -> NoReturn:
        raise AttributeError(f"{self.name} is fixed when QuacK is attached; remove() this one and attach another")
