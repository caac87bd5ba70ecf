"""Copies of the arguments of a call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quacklr.util.torch_functions import tensors_in


def copied(given: Any, recorded: Any = None) -> Any:
    """The arguments of a call with copies of its floating point tensors. `recorded`: arguments to copy these from.

    Tensors in tuples, lists and dicts are copied too. A tensor that occurs twice is copied once, and views of one
    tensor become views of one copy. Everything else is shared.
    """
    return _Copies(given if recorded is None else recorded).of(given, given if recorded is None else recorded)


class _Copies:
    """Copies the arguments of one call."""

    def __init__(self, given: Any) -> None:
        self._memo: dict[tuple[int, int], Any] = {}
        self._storages: dict[int, Any] = {}
        several: dict[int, set[int]] = {}
        for tensor in filter(_is_plain, tensors_in(given)):
            several.setdefault(tensor.untyped_storage()._cdata, set()).add(id(tensor))
        self._shared = {storage for storage, tensors in several.items() if len(tensors) > 1}

    def of(self, given: Any, recorded: Any) -> Any:
        """The copy of one argument."""
        key = id(given), id(recorded)
        if key not in self._memo:
            self._memo[key] = self._new(given, recorded)
        return self._memo[key]

    def _new(self, given: Any, recorded: Any) -> Any:
        if isinstance(given, Tensor):
            return self._tensor(recorded) if given.is_floating_point() else given
        if isinstance(given, tuple | list) and type(given) is type(recorded) and len(given) == len(recorded):
            items = [self.of(*pair) for pair in zip(given, recorded, strict=True)]
            if all(new is old for new, old in zip(items, given, strict=True)):
                return given
            return type(given)(*items) if hasattr(given, "_fields") else type(given)(items)
        if type(given) is dict and given.keys() == recorded.keys():
            values = {name: self.of(value, recorded[name]) for name, value in given.items()}
            return given if all(value is given[name] for name, value in values.items()) else values
        return given

    def _tensor(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage() if _is_plain(tensor) else None
        if storage is None or storage._cdata not in self._shared:
            return tensor.detach().clone()
        if storage._cdata not in self._storages:
            self._storages[storage._cdata] = storage.clone()
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(self._storages[storage._cdata], tensor.storage_offset(), tensor.size(), tensor.stride())


def _is_plain(value: Any) -> bool:
    """Whether a value is a strided floating point tensor, and of no subclass but Parameter."""
    return type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided and value.is_floating_point()
