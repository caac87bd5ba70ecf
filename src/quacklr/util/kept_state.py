"""The state of a model besides its parameters: everything that a forward can write into, kept and restored.

State is what is reached from the model by attributes, lists, dicts, sets and tuples: buffers, hooks, a list of
auxiliary losses, a cache of keys and values. An object that refers to a module or an optimizer (a Trainer) is
not state, nor is one with a lock or a dataset; it stays as it is.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
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
        self._copies = TensorCopies(model.parameters())

    def replace_by_copies(self) -> None:
        """Put copies of the tensors into the containers and objects."""
        for each, items, attributes in self._kept:
            _set_items(each, items and self._copies.of_all(items))
            _set_attributes(each, self._copies.of_all(attributes))

    def restore(self) -> None:
        """Put back what the containers and objects held. The containers themselves stay the same objects."""
        for each, items, attributes in self._kept:
            _set_items(each, items)
            _set_attributes(each, attributes)
        for generator, state in self._generators:
            generator.set_state(state)


class TensorCopies:
    """Copies of tensors. Views of one tensor become views of one copy; parameters and their views are not copied."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._of_parameters = {_storage(parameter) for parameter in parameters} - {None}
        self._storages: dict[int, Any] = {}
        self._copies: dict[int, Tensor] = {}

    def of_all(self, values: Any) -> Any:
        """The values of a dict, or the entries of a list, with copies for tensors."""
        if isinstance(values, Mapping):
            return {key: self.of(value) for key, value in values.items()}
        return [self.of(value) for value in values]

    def of(self, value: Any) -> Any:
        """The copy of a tensor, or a tuple with copies; any other value as it is."""
        if isinstance(value, Tensor):
            if id(value) not in self._copies:
                self._copies[id(value)] = self._copy(value)
            return self._copies[id(value)]
        if isinstance(value, tuple) and value:
            items = [self.of(item) for item in value]
            if any(new is not old for new, old in zip(items, value, strict=True)):
                return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        return value

    def _copy(self, tensor: Tensor) -> Tensor:
        storage = _storage(tensor)
        if isinstance(tensor, nn.Parameter) or is_lazy(tensor) or storage in self._of_parameters:
            return tensor
        if storage is None:
            copy = tensor.detach().clone()
        else:
            if storage not in self._storages:
                self._storages[storage] = tensor.untyped_storage().clone()
            empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            copy = empty.set_(self._storages[storage], tensor.storage_offset(), tensor.size(), tensor.stride())
        vars(copy).update(vars(tensor))
        return copy.requires_grad_(tensor.requires_grad)


def _storage(tensor: Tensor) -> int | None:
    """The address of a tensor's storage; None if the tensor is not just a view of a storage."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided:
        return None
    return None if tensor.is_conj() or tensor.is_neg() or tensor.is_quantized else tensor.untyped_storage()._cdata


def _reached(model: nn.Module) -> list[Any]:
    """The modules, and the containers and objects that their attributes hold."""
    found: dict[int, Any] = {}
    refused: dict[int, Any] = {}
    waiting: list[Any] = [model]
    while waiting:
        each = waiting.pop()
        if each is None or isinstance(each, ATOMS) or id(each) in found or id(each) in refused:
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
        if each is not None and not isinstance(each, ATOMS) and id(each) not in found:
            found[id(each)] = each
            waiting += _parts(each)
    return found


def _parts(value: Any) -> list[Any]:
    items = _items(value)
    if items is None:
        items = value if isinstance(value, tuple | frozenset) else ()
    return [*(items.values() if isinstance(items, dict) else items), *_attributes(value).values()]


def _items(value: Any) -> Any:
    """The contents of a container that can be changed; None for anything else."""
    if isinstance(value, dict):
        return dict(value)
    return list(value) if isinstance(value, list | set | deque) else None


def _attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object, also those in slots."""
    slots = [name for cls in type(value).__mro__ for name in _slots(cls) if hasattr(value, name)]
    return {**getattr(value, "__dict__", {}), **{name: getattr(value, name) for name in slots}}


def _slots(cls: type) -> list[str]:
    if cls.__module__ == "builtins" or "__slots__" not in vars(cls):
        return []
    slots: Any = vars(cls)["__slots__"]
    names = [slots] if isinstance(slots, str) else list(slots)
    return [name for name in names if not name.startswith("__")]


def _set_items(value: Any, items: Any) -> None:
    """Give a container these contents, by the methods of its builtin type: a subclass may refuse them."""
    if isinstance(value, dict):
        if not _same(list(value.items()), list(items.items())):
            kind: Any = OrderedDict if isinstance(value, OrderedDict) else dict
            kind.clear(value)
            for key, item in items.items():
                kind.__setitem__(value, key, item)
    elif isinstance(value, list | deque | set) and not _same([*value], items):
        value.clear()
        (value.update if isinstance(value, set) else value.extend)(items)


def _set_attributes(value: Any, attributes: dict[str, Any]) -> None:
    now = _attributes(value)
    for name in now.keys() - attributes.keys():
        object.__delattr__(value, name)
    in_dict = getattr(value, "__dict__", {})
    for name, attribute in attributes.items():
        if name not in now or now[name] is not attribute:
            if name in in_dict or not hasattr(type(value), name):
                in_dict[name] = attribute
            else:
                object.__setattr__(value, name, attribute)


def _same(one: list[Any], other: list[Any]) -> bool:
    """Whether two lists hold the same objects; items of dicts are pairs of a key and a value."""
    if len(one) != len(other):
        return False
    return all(
        a is b or (type(a) is tuple is type(b) and len(a) == len(b) == 2 and a[0] is b[0] and a[1] is b[1])
        for a, b in zip(one, other, strict=True)
    )
