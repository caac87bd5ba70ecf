"""The state of a model besides its parameters: everything that a forward can write into, kept and restored.

State is what is reached from the model by attributes, lists, dicts, sets and tuples: buffers, hooks, a list of
auxiliary losses, a cache of keys and values. An object that refers to a module or an optimizer (a Trainer) is
not state, nor is one with a lock or a dataset; it stays as it is.
"""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

ATOMS = (
    *(str, bytes, int, float, complex, type, type(None), Tensor, torch.dtype, torch.device),
    *(FunctionType, MethodType, BuiltinFunctionType, ModuleType),
)
CONTAINERS = (dict, list, set, deque)
LOCKS = (threading.Thread, type(threading.Lock()), type(threading.RLock()))
NO_STATE = (nn.Module, Optimizer, Dataset, DataLoader, *LOCKS)


@contextmanager
def state_kept(model: nn.Module) -> Iterator[None]:
    """While entered, the model holds copies of its tensors; on exit, all containers and objects hold what they held."""
    reached = _reached(model)
    kept = [(place, _items(place)) for each in reached for place in _places(each)]
    generators = [(each, each.get_state()) for each in reached if isinstance(each, torch.Generator)]
    copies = _Copies(model)
    try:
        for place, items in kept:
            _fill(place, {key: copies.of(item) for key, item in items.items()})
        yield
    finally:
        for place, items in kept:
            _fill(place, items)
        for generator, state in generators:
            generator.set_state(state)


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
    """The modules, and the containers and objects that they hold."""
    found: dict[int, Any] = {}
    seen: set[int] = set()
    waiting: list[Any] = [model]
    while waiting:
        each = waiting.pop()
        is_container = isinstance(each, (nn.Module, tuple, frozenset, *CONTAINERS))
        if id(each) not in seen:
            found |= {id(each): each} if is_container else _all_in(each)
            waiting += _parts(each) if is_container else []
        seen.add(id(each))
    return list(found.values())


def _all_in(value: Any) -> dict[int, Any]:
    """The object and all that it holds, by id; nothing if that is more than state."""
    found: dict[int, Any] = {}
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, NO_STATE):
            return {}
        if id(each) not in found:
            found[id(each)] = each
            waiting += _parts(each)
    return found


def _parts(value: Any) -> list[Any]:
    """What a container or an object holds, without tensors, numbers and others that hold nothing."""
    held = [value] if isinstance(value, tuple | frozenset) else [_items(place).values() for place in _places(value)]
    return [each for values in held for each in values if not isinstance(each, ATOMS)]


def _places(value: Any) -> list[Any]:
    """Where a value holds others: a container, the dict of its attributes, or the object itself if it has slots."""
    attributes = getattr(value, "__dict__", None)
    own = [value] if isinstance(value, CONTAINERS) or isinstance(_state(value), tuple) else []
    return [*own, attributes] if isinstance(attributes, dict) else own


def _state(value: Any) -> Any:
    """The dict of attributes, or a pair of it and of a dict of slots."""
    return None if isinstance(value, nn.Module | tuple) else object.__getstate__(value)  # these have no slots


def _items(place: Any) -> dict[Any, Any]:
    """The contents of a place, by key, position or name of a slot."""
    if isinstance(place, dict):
        return dict(place)
    return dict(enumerate(place)) if isinstance(place, CONTAINERS) else _state(place)[1]


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
        for name in now.keys() - items.keys():
            object.__delattr__(place, name)
        for name, item in items.items():
            object.__setattr__(place, name, item)
