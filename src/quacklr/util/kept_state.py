"""The state of a model besides its parameters: everything that a forward can write into, kept and restored.

State is what is reached from the model by attributes, lists, dicts, sets, tuples and bound methods, and by attributes
of its own classes: buffers, hooks, a list of auxiliary losses, a cache of keys and values, arrays, random generators.
An optimizer, a dataset, an object with a lock and an object of torch are not state; they stay as they are.
"""

from __future__ import annotations

import copy
import gc
import logging
import random
import sys
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

ATOMS = (str, bytes, int, float, complex, type, type(None), Tensor, FunctionType, BuiltinFunctionType, ModuleType)
NO_STATE = (*ATOMS, Optimizer, Dataset, DataLoader, logging.Logger)
CONTAINERS = (dict, list, set, deque)
NOT_OWN = ("torch.", "quacklr.")  # a forward writes nothing into these classes, and into objects of them


@contextmanager
def state_kept(model: nn.Module) -> Iterator[None]:
    """While entered, the model holds copies of its tensors; on exit, all that it holds, and its state, is as before."""
    reached = _reached(model)
    kept = [(place, _items(place)) for each in reached for place in _places(each)]
    undo = list(filter(None, map(_undo, reached)))
    copies = _Copies(model)
    try:
        for place, items in kept:
            _fill(place, {key: copies.of(item) for key, item in items.items()})
        yield
    finally:
        for place, items in kept:
            _fill(place, items)
        for each in undo:
            each()


def _undo(value: Any) -> Callable[[], Any] | None:
    """What gives an array its numbers of now, or a random generator its state of now."""
    numpy: Any = sys.modules.get("numpy")
    if isinstance(value, bytearray | array):
        return partial(value.__setitem__, slice(None), value[:])
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return partial(value.setstate, value.getstate())
    if isinstance(value, torch.Generator) or (numpy and isinstance(value, numpy.random.RandomState)):
        return partial(value.set_state, value.get_state())
    if numpy and isinstance(value, numpy.ndarray) and value.flags.writeable:
        return partial(value.__setitem__, ..., value.copy())
    if numpy and isinstance(value, numpy.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    return None


class _Copies:
    """Copies of tensors. Parameters, and tensors in their memory, are not copied."""

    def __init__(self, model: nn.Module) -> None:
        self.of_parameters = {_storage(parameter) for parameter in model.parameters()} - {None}
        self.copies: dict[Any, Any] = {}  # by id, and what copy.deepcopy keeps in a memo

    def of(self, value: Any) -> Any:
        """The copy of a tensor, or a tuple with copies; any other value as it is."""
        if isinstance(value, tuple):
            items = [self.of(item) for item in value]
            if all(map(is_, items, value)):
                return value
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        if not isinstance(value, Tensor) or isinstance(value, nn.Parameter) or is_lazy(value):
            return value
        if _storage(value) in self.of_parameters:
            return value
        if id(value) not in self.copies:
            copied = copy.deepcopy(value.detach(), self.copies)  # views of one storage become views of one copy
            vars(copied).update(vars(value))
            self.copies[id(value)] = copied.requires_grad_(value.requires_grad)
        return self.copies[id(value)]


def _storage(tensor: Tensor) -> int | None:
    """The address of a tensor's storage; None if the tensor has none of its own, as a DTensor."""
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
    return tensor.untyped_storage()._cdata if is_plain else None


def _reached(model: nn.Module) -> list[Any]:
    """The modules, the containers and objects that they hold, and the global random generators."""
    found: dict[int, Any] = {}
    numpy: Any = sys.modules.get("numpy")
    waiting: list[Any] = [model, random.getstate, numpy and numpy.random.get_state.__self__]
    while waiting:
        each = waiting.pop()
        if id(each) not in found and _is_state(each):
            found[id(each)] = each
            waiting += _parts(each)
    return list(found.values())


def _is_state(value: Any) -> bool:
    if isinstance(value, NO_STATE) or hasattr(type(value), "param_groups"):  # as an optimizer of DeepSpeed
        return False
    if isinstance(value, (nn.Module, torch.Generator, *CONTAINERS)):
        return True
    has_lock = any(type(part).__module__ in ("threading", "_thread") for part in _parts(value))
    return not has_lock and not type(value).__module__.startswith(NOT_OWN)


def _parts(value: Any) -> list[Any]:
    """What a container or an object holds."""
    if isinstance(value, tuple | frozenset | MethodType | partial):
        return gc.get_referents(value)
    return [part for place in _places(value) for part in _items(place).values()]


def _places(value: Any) -> list[Any]:
    """Where a value holds others: a container, a dict of attributes, an object with slots, a module's own classes."""
    if isinstance(value, nn.Module):
        return [vars(value), *(cls for cls in type(value).__mro__ if not cls.__module__.startswith(NOT_OWN))]
    attributes = getattr(value, "__dict__", None)
    own = [value] if isinstance(value, CONTAINERS) or isinstance(object.__getstate__(value), tuple) else []
    return [*own, attributes] if isinstance(attributes, dict) else own


def _items(place: Any) -> dict[Any, Any]:
    """The contents of a place, by key, position or name of a slot."""
    if isinstance(place, dict):
        return dict(place)
    if isinstance(place, CONTAINERS):
        return dict(enumerate(place))
    return dict(vars(place)) if isinstance(place, type) else object.__getstate__(place)[1]  # type: ignore[index]


def _fill(place: Any, items: dict[Any, Any]) -> None:
    """Give a place these contents. By the methods of the builtin type, because a subclass may refuse them."""
    now = _items(place)
    if now.keys() == items.keys() and all(map(is_, now.values(), items.values())):
        return
    if isinstance(place, dict):
        kind: Any = OrderedDict if isinstance(place, OrderedDict) else dict
        kind.clear(place)
        for key, item in items.items():
            kind.__setitem__(place, key, item)
    elif isinstance(place, list | set | deque):
        place.clear()
        (place.update if isinstance(place, set) else place.extend)(items.values())
    else:
        kind = type if isinstance(place, type) else object
        for name in now.keys() - items.keys():
            kind.__delattr__(place, name)
        for name in [name for name, item in items.items() if now.get(name, now) is not item]:
            kind.__setattr__(place, name, items[name])
