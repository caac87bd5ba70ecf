"""Functions of torch, as a TorchFunctionMode gets them: sets of equivalent functions, and copies of their arguments.

Some names here are internal to torch: tests/util/test_torch_contract.py fails if a version of torch changes them.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import suppress
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

SDPA: Any = F.scaled_dot_product_attention
MULTIHEAD: Any = F.multi_head_attention_forward
SOFTMAX: set[Any] = {F.softmax, torch.softmax, torch.special.softmax, Tensor.softmax}
LOGSUMEXP: set[Any] = {torch.logsumexp, Tensor.logsumexp}  # some models compute a softmax with it
MATMUL: set[Any] = {torch.matmul, torch.mm, torch.bmm, Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.__matmul__}
ADDED_MATMUL: set[Any] = {torch.baddbmm, Tensor.baddbmm, torch.addmm, Tensor.addmm, Tensor.addbmm, torch.addbmm}
CONVOLUTION: set[Any] = {F.conv1d, F.conv2d, F.conv3d}
ADD: set[Any] = {torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__iadd__, Tensor.__radd__}
SUBTRACT: set[Any] = {torch.sub, Tensor.sub, Tensor.sub_, Tensor.__sub__, Tensor.__isub__}
MULTIPLY: set[Any] = {torch.mul, Tensor.mul, Tensor.mul_, Tensor.__mul__, Tensor.__rmul__, Tensor.__imul__}
DIVIDE: set[Any] = {torch.div, Tensor.div, Tensor.div_, Tensor.__truediv__, Tensor.__itruediv__}
CAT: set[Any] = {torch.cat, torch.concat}
CONCATENATE: set[Any] = {*CAT, torch.stack}
FILL: set[Any] = {torch.masked_fill, Tensor.masked_fill, Tensor.masked_fill_}
WHERE: set[Any] = {torch.where, Tensor.where}
SET_ITEM: Any = Tensor.__setitem__
MATRIX_T: Any = vars(torch._C.TensorBase)["mT"].__get__
LAYOUT: set[Any] = {
    *(Tensor.view, Tensor.reshape, Tensor.transpose, Tensor.permute, Tensor.flatten, Tensor.unflatten, Tensor.movedim),
    *(Tensor.unsqueeze, Tensor.squeeze, Tensor.swapaxes, Tensor.__getitem__, MATRIX_T),
    *(torch.reshape, torch.transpose, torch.permute, torch.flatten, torch.unflatten, torch.movedim, torch.unsqueeze),
    *(torch.squeeze, torch.swapaxes),
}

# multi_head_attention_forward without its first check, `if has_torch_function(...)`: with that check, a function mode
# gets one call of the whole function, and not the calls inside it
multihead_opened: Any = FunctionType(
    MULTIHEAD.__code__,
    {**MULTIHEAD.__globals__, "has_torch_function": lambda _: False},
    MULTIHEAD.__name__,
    MULTIHEAD.__defaults__,
)
multihead_opened.__kwdefaults__ = MULTIHEAD.__kwdefaults__


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in a value: itself, or those in lists, tuples and dicts, in order."""
    if isinstance(value, Tensor):
        return [value]
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for each in values for tensor in tensors_in(each)]


def is_product(func: Any) -> bool:
    """Whether a function multiplies matrices."""
    return func in MATMUL or func in ADDED_MATMUL or func is torch.einsum


def factors_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that a function multiplies as matrices; empty if it does not."""
    if not is_product(func):
        return []
    return tensors_in((args, kwargs))[1 if func in ADDED_MATMUL else 0 :]


def bound(args: Sequence[Any], kwargs: dict[str, Any], *names: str) -> list[Any]:
    """The first arguments of a call, positional or named; None for those that were not given."""
    return [args[i] if i < len(args) else kwargs.get(name) for i, name in enumerate(names)]


def copied(given: Any, recorded: Any = None, deep: bool = False) -> Any:
    """The arguments of a call with copies of its floating point tensors. `recorded`: arguments to copy these from.

    Tensors in tuples, lists and dicts are copied too. A tensor that occurs twice is copied once, and views of one
    tensor become views of one copy. Everything else is shared; with `deep`, other objects (caches of keys and values)
    are copied too, and those that cannot be copied become None.
    """
    return _Copies(given if recorded is None else recorded, deep).of(given, given if recorded is None else recorded)


class _Copies:
    """Copies the arguments of one call."""

    def __init__(self, given: Any, deep: bool) -> None:
        self.deep = deep
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
        if self.deep and not isinstance(given, nn.Module):
            with suppress(Exception), _Cloning():
                return copy.deepcopy(given)
            return None
        return given

    def _tensor(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage() if _is_plain(tensor) else None
        if storage is None or storage._cdata not in self._shared:
            return tensor.detach().clone()
        if storage._cdata not in self._storages:
            self._storages[storage._cdata] = storage.clone()
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(self._storages[storage._cdata], tensor.storage_offset(), tensor.size(), tensor.stride())


class _Cloning(TorchFunctionMode):
    """While entered, deepcopy clones tensors. Without this, it raises for tensors with a graph."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:
            return args[0].detach().clone()
        return func(*args, **(kwargs or {}))


def _is_plain(value: Any) -> bool:
    """Whether a value is a strided floating point tensor, and of no subclass but Parameter."""
    return type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided and value.is_floating_point()
