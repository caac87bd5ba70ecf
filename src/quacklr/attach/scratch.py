"""A scratch copy of an optimizer: the same class and settings on small tensors of its own.

The copy shares nothing with the given optimizer: neither parameters, nor param groups, state or hooks.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict, defaultdict
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Group = dict[str, Any]
SHAPES = {1: (64,), 2: (64, 64), 3: (4, 32, 32), 4: (64, 16, 2, 2)}  # some optimizers treat small tensors differently
OTHER_KERNELS = ("fused", "capturable")  # options that choose a kernel; the update is the same
PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, type, Enum, BuiltinFunctionType)
NOT_COPIED = (Tensor, nn.Module, FunctionType, dict, list, tuple, set)
NO_SETTINGS = {"params", "param_names", "lr", "initial_lr"}
MOST_GROUPS = 16

COPY, COPY_IN_PART, CONSTRUCT, CLASS = "copy", "copy in part", "construct", "class"
WAYS = ((COPY, COPY), (CONSTRUCT, CONSTRUCT), (COPY, CONSTRUCT), (CONSTRUCT, CLASS), (COPY_IN_PART, COPY_IN_PART))
"""How to make a scratch optimizer, and the optimizers inside it if it is a wrapper.

Copy its attributes; or only those that are plain data; or call its constructor. The constructor of a wrapper may take
the class of the inner optimizer.
"""


class ProbeError(Exception):
    """The optimizer cannot be run on scratch tensors, for this reason."""


class Scratch:
    """A scratch copy of an optimizer, or of a wrapper of optimizers, made in one of `WAYS`.

    For every kind of param group and number of dimensions there is one tensor whose steps are scaled. With `mixed`
    there is a second one, not scaled, in its own param group. It represents the parameters on no path.
    """

    def __init__(
        self, given: Any, only: set[int] | None, way: tuple[str, str], mixed: bool, dtype: torch.dtype
    ) -> None:
        self._in_part, self._inner = way[0] == COPY_IN_PART, way[1]
        generator = torch.Generator().manual_seed(0)
        self._pairs: dict[int, list[nn.Parameter]] = {}
        for param in (param for _, params in representatives(given, only) for param in params):
            start = 0.02 * torch.randn(SHAPES[param.ndim], generator=generator, dtype=torch.float64)
            self._pairs[id(param)] = [nn.Parameter(start.to(dtype, copy=True)) for _ in range(1 + mixed)]
        self.scaled = [pair[0] for pair in self._pairs.values()]
        self.params = [param for pair in self._pairs.values() for param in pair]
        self._copies: dict[int, Any] = {key: pair[0] for key, pair in self._pairs.items()}  # by id of the original
        self._groups: dict[int, list[Group]] = {}
        self.optimizer = self._make(given, way[0])

    def _make(self, given: Any, way: str) -> Any:
        if way == CLASS:
            return type(given)
        return self._construct(given) if way == CONSTRUCT else self._copy_object(given)

    def _scratch_groups(self, groups: list[Group]) -> list[Group]:
        for given in groups:
            if id(given) not in self._groups:
                sides = zip(*(self._pairs[id(p)] for p in given["params"] if id(p) in self._pairs), strict=True)
                self._groups[id(given)] = [{**self._settings(given), "params": list(side)} for side in sides]
        return [group for given in groups for group in self._groups[id(given)]]

    def _settings(self, given: Group) -> Group:
        made = self._copy_items({name: v for name, v in given.items() if name not in ("params", "param_names")})
        made.update({name: False for name in OTHER_KERNELS if made.get(name)})
        if made.get("lr", given.get("lr")) is not None:
            made["lr"] = positive_lr(given)
        return made

    def _copy_items(self, items: dict[str, Any]) -> dict[str, Any]:
        made = {}
        for name, value in items.items():
            try:
                made[name] = self._copy(value)
            except ProbeError:
                if not self._in_part:
                    raise
        return made

    def _copy(self, value: Any) -> Any:
        """A deep copy of plain data, with scratch tensors in place of parameters; ProbeError for other objects."""
        if isinstance(value, PLAIN) or (isinstance(value, FunctionType) and "<locals>" not in value.__qualname__):
            return value
        if id(value) in self._copies:
            return self._copies[id(value)]
        if isinstance(value, Optimizer):
            return self._make(value, self._inner)
        if isinstance(value, Tensor) and value.device.type == "cpu" and value.numel() <= 1:
            return value.detach().clone()
        if type(value).__module__.startswith(("torch.distributed", "torch._C._distributed")):
            return None  # a process group or a mesh: the copy runs in one process
        if type(value) in (dict, OrderedDict, defaultdict):
            made = value.copy()
            made.clear()
            made.update({self._copy(key): self._copy(each) for key, each in value.items()})
            return made
        if type(value) in (list, tuple, set, frozenset):
            return type(value)(self._copy(each) for each in value)
        if not hasattr(value, "__dict__") or isinstance(value, NOT_COPIED):
            raise ProbeError(f"it holds a {type(value).__name__}")
        return self._copy_object(value)

    def _copy_object(self, given: Any) -> Any:
        made = self._copies[id(given)] = object.__new__(type(given))
        attributes = dict(vars(given))
        if hasattr(given, "param_groups"):
            attributes.pop("step", None)  # schedulers replace it by one that steps the given optimizer
            if "param_groups" in attributes:
                vars(made)["param_groups"] = self._scratch_groups(attributes.pop("param_groups"))
            if "state" in attributes:
                vars(made)["state"] = self._copies.setdefault(id(attributes.pop("state")), defaultdict(dict))
            hooks = [name for name, v in attributes.items() if name.endswith("_hooks") and isinstance(v, dict)]
            vars(made).update({name: type(attributes.pop(name))() for name in hooks})
        vars(made).update(self._copy_items(attributes))
        return made

    def _construct(self, given: Any) -> Any:
        """A new optimizer by its constructor, with arguments from `defaults` and from attributes of the same name."""
        settings = self._settings(getattr(given, "defaults", {}))
        attributes = {name.removeprefix("_"): value for name, value in vars(given).items()}
        arguments: dict[str, Any] = {}
        for name, parameter in inspect.signature(type(given)).parameters.items():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            if "param" in name and not arguments:
                arguments[name] = self._scratch_groups(given.param_groups)
            elif name in settings:
                arguments[name] = settings[name]
            elif name in attributes:
                arguments[name] = self._copy(attributes[name])
            elif parameter.default is parameter.empty:
                raise ProbeError(f"its constructor needs {name!r}")
        made = self._copies[id(given)] = type(given)(**arguments)
        return made


def inner_optimizers(given: Any) -> list[Optimizer]:
    """The optimizers that a wrapper holds as attributes, if they step all parameters of the wrapper; else none."""
    held = list(getattr(given, "__dict__", {}).values())
    held += [each for value in held if isinstance(value, list | tuple) for each in value]
    held += [each for value in held if isinstance(value, dict) for each in value.values()]
    inner = list(dict.fromkeys(each for each in held if isinstance(each, Optimizer) and each is not given))
    return inner if ids_in_groups(given) <= set().union(*map(ids_in_groups, inner)) else []


def ids_in_groups(optimizer: Any) -> set[int]:
    """Ids of the tensors that are in the optimizer's param groups now."""
    return {id(param) for group in getattr(optimizer, "param_groups", []) for param in group["params"]}


def representatives(given: Any, only: set[int] | None) -> list[tuple[Group, list[Tensor]]]:
    """One param group of each kind, with one of its parameters for each number of dimensions.

    `only` restricts the parameters to these ids. Of groups that differ in lr alone, the one with the largest is taken.
    """
    found: list[tuple[Group, list[Tensor]]] = []
    for each in inner_optimizers(given) or [given]:
        stepped: list[tuple[Group, list[Tensor]]] = []
        for group in each.param_groups:
            params = {p.ndim: p for p in group["params"] if p.ndim in SHAPES and (only is None or id(p) in only)}
            stepped += [(group, list(params.values()))] if params else []
        stepped.sort(key=lambda entry: positive_lr(entry[0]))
        found += {settings_key(group): (group, params) for group, params in stepped}.values()
    if not found:
        raise ProbeError("it steps no parameter of 1 to 4 dimensions")
    return found[:MOST_GROUPS]


def settings_key(group: Group) -> str:
    """The settings of a param group other than lr."""
    return repr(sorted((name, value) for name, value in group.items() if name not in NO_SETTINGS))


def key_of(given: Any, only: set[int] | None) -> str:
    """Equal for optimizers of one class whose scratch copies take the same steps."""
    objects = [given, *inner_optimizers(given)]
    attributes = [{name: value for name, value in vars(each).items() if isinstance(value, PLAIN)} for each in objects]
    kinds = [(settings_key(g), positive_lr(g), [p.ndim for p in ps]) for g, ps in representatives(given, only)]
    return repr(([type(each) for each in objects], attributes, kinds))


def positive_lr(group: Group) -> float:
    """The learning rate of a param group, or its `initial_lr` if that is larger, as in a warmup."""
    if group.get("lr") is None:
        raise ProbeError("its param groups have no lr")
    values = [group.get(name) for name in ("lr", "initial_lr")]
    numbers = [float(v) for v in values if isinstance(v, int | float) or (isinstance(v, Tensor) and v.is_cpu)]
    return max([number for number in numbers if number > 0], default=1e-3)
