"""The state of a model besides its parameters: everything that a forward can write into, kept and restored.

State is what is reached from the model by attributes, lists, dicts, sets and tuples: buffers, hooks, a list of
auxiliary losses, a cache of keys and values. An object that refers to a module or an optimizer (a Trainer) is
not state, nor is one with a lock or a dataset; it stays as it is.
"""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict, deque
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

ATOMS = (
    *(str, bytes, int, float, complex, type, Tensor, torch.dtype, torch.device),
    *(FunctionType, MethodType, BuiltinFunctionType, ModuleType),
)
CONTAINERS = (dict, list, tuple, set, frozenset, deque)
NO_STATE = (
    nn.Module,
    Optimizer,
    Dataset,
    DataLoader,
    threading.Thread,
    type(threading.Lock()),
    type(threading.RLock()),
)


class KeptState:
    """The contents of every container and object that is reached from a model."""

    def __init__(self, model: nn.Module) -> None:
        reached = _reached(model)
        self._kept = [(each, _items(each), _attributes(each)) for each in reached]
        self._generators = [(each, each.get_state()) for each in reached if isinstance(each, torch.Generator)]
        self._of_parameters = {_storage(parameter) for parameter in model.parameters()} - {None}
        self._copies: dict[Any, Any] = {}  # by id, and what copy.deepcopy keeps in a memo

    def replace_by_copies(self) -> None:
        """Put copies of the tensors into the containers and objects."""
        for each, items, attributes in self._kept:
            if isinstance(items, dict):
                _set_items(each, {key: self._copied(item) for key, item in items.items()})
            else:
                _set_items(each, [self._copied(item) for item in items])
            _set_attributes(each, {name: self._copied(attribute) for name, attribute in attributes.items()})

    def restore(self) -> None:
        """Put back what the containers and objects held. The containers themselves stay the same objects."""
        for each, items, attributes in self._kept:
            _set_items(each, items)
            _set_attributes(each, attributes)
        for generator, state in self._generators:
            generator.set_state(state)

    def _copied(self, value: Any) -> Any:
        """The copy of a tensor, or a tuple with copies; any other value as it is. Parameters are not copied."""
        if isinstance(value, tuple) and value:
            items = [self._copied(item) for item in value]
            if any(new is not old for new, old in zip(items, value, strict=True)):
                return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        if not isinstance(value, Tensor) or isinstance(value, nn.Parameter) or is_lazy(value):
            return value
        if _storage(value) in self._of_parameters:
            return value
        if id(value) not in self._copies:
            copied = copy.deepcopy(value.detach(), self._copies)  # views of one storage become views of one copy
            vars(copied).update(vars(value))
            self._copies[id(value)] = copied.requires_grad_(value.requires_grad)
        return self._copies[id(value)]


def _storage(tensor: Tensor) -> int | None:
    """The address of a tensor's storage; None if the tensor has none of its own, as a DTensor."""
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
    return tensor.untyped_storage()._cdata if is_plain else None


def _reached(model: nn.Module) -> list[Any]:
    """The modules, and the containers and objects that their attributes hold."""
    found: dict[int, Any] = {}
    refused: dict[int, Any] = {}
    waiting: list[Any] = [model]
    while waiting:
        each = waiting.pop()
        if id(each) in found or id(each) in refused:
            continue
        if isinstance(each, (nn.Module, *CONTAINERS)):
            found[id(each)] = each
            waiting += _parts(each)
        elif (inside := _all_in(each)) is not None:
            found |= inside
        else:
            refused[id(each)] = each
    return list(found.values())


def _all_in(value: Any) -> dict[int, Any] | None:
    """The object and all that it holds; None if that is more than state."""
    found: dict[int, Any] = {}
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, NO_STATE):
            return None
        if id(each) not in found:
            found[id(each)] = each
            waiting += _parts(each)
    return found


def _parts(value: Any) -> list[Any]:
    """What a container or an object holds, without tensors, numbers and others that hold nothing."""
    items = value if isinstance(value, tuple | frozenset) else _items(value)
    held = [*(items.values() if isinstance(items, dict) else items), *_attributes(value).values()]
    return [each for each in held if each is not None and not isinstance(each, ATOMS)]


def _items(value: Any) -> Any:
    """The contents of a container that can be changed; empty for anything else."""
    if isinstance(value, dict):
        return dict(value)
    return list(value) if isinstance(value, list | set | deque) else []


def _attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object, also those in slots."""
    state: Any = object.__getstate__(value)  # a dict, or a pair of dicts if the class has slots
    in_dict, in_slots = state if isinstance(state, tuple) else (state, None)
    return {**(in_dict or {}), **(in_slots or {})}


def _set_items(value: Any, items: Any) -> None:
    """Give a container these contents, by the methods of its builtin type: a subclass may refuse them."""
    if _ids(_items(value)) == _ids(items):
        return
    if isinstance(value, dict):
        kind: Any = OrderedDict if isinstance(value, OrderedDict) else dict
        kind.clear(value)
        for key, item in items.items():
            kind.__setitem__(value, key, item)
    else:
        value.clear()
        (value.update if isinstance(value, set) else value.extend)(items)


def _ids(items: Any) -> list[int]:
    return [id(each) for each in ([*items, *items.values()] if isinstance(items, dict) else items)]


def _set_attributes(value: Any, attributes: dict[str, Any]) -> None:
    now = _attributes(value)
    for name in now.keys() - attributes.keys():
        object.__delattr__(value, name)
    for name, attribute in attributes.items():
        if name in now and now[name] is attribute:
            continue
        if isinstance(getattr(type(value), name, None), MemberDescriptorType):  # a slot
            object.__setattr__(value, name, attribute)
        else:
            vars(value)[name] = attribute  # not by setattr: a property may have the name
