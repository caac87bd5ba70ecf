"""A scratch copy of an optimizer: the same class and settings on small tensors of its own.

Nothing of the given optimizer is shared with the copy: not its parameters, state, hooks or param groups.
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
SHAPES = {1: (64,), 2: (64, 64), 3: (4, 32, 32), 4: (64, 16, 2, 2)}  # of 4096 entries: some treat small ones otherwise
OTHER_KERNELS = ("fused", "capturable")  # the same update on other devices
PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, type, Enum, BuiltinFunctionType)
NO_SETTINGS = {"params", "param_names", "lr", "initial_lr"}
MOST_GROUPS = 16


class ProbeError(Exception):
    """The optimizer cannot be run on scratch tensors, for this reason."""


class Scratch:
    """Scratch tensors in place of some parameters, and copies of optimizers that step them.

    For every kind of param group there is a tensor to scale for each number of dimensions, and if `mixed` another one,
    in a param group of its own, that stands for the parameters on no path.
    """

    def __init__(self, given: Any, only: set[int] | None, dtype: torch.dtype, mixed: bool) -> None:
        self._make_inner, self._may_leave_out = self.copy, False
        numbers = torch.Generator().manual_seed(0)
        self._pairs: dict[int, list[nn.Parameter]] = {}
        for param in (param for _, params in representatives(given, only) for param in params):
            start = 0.02 * torch.randn(SHAPES[param.ndim], generator=numbers, dtype=torch.float64)
            self._pairs[id(param)] = [nn.Parameter(start.to(dtype, copy=True)) for _ in range(1 + mixed)]
        self._copies: dict[int, Any] = {}
        self._groups: dict[int, list[Group]] = {}

    @property
    def scaled(self) -> list[nn.Parameter]:
        """The tensors whose steps are scaled."""
        return [pair[0] for pair in self._pairs.values()]

    @property
    def params(self) -> list[nn.Parameter]:
        """All scratch tensors."""
        return [param for pair in self._pairs.values() for param in pair]

    def groups(self, given: list[Group]) -> list[Group]:
        """The scratch groups for some param groups."""
        return [group for each in given for group in self._group(each)]

    def _group(self, given: Group) -> list[Group]:
        if id(given) not in self._groups:
            pairs = [self._pairs[id(param)] for param in given["params"] if id(param) in self._pairs]
            sides = zip(*pairs, strict=True)
            self._groups[id(given)] = [{**self._settings(given), "params": list(side)} for side in sides]
        return self._groups[id(given)]

    def _settings(self, given: Group) -> Group:
        made: Group = {}
        for name, value in given.items():
            if name not in ("params", "param_names"):
                self._copy_plain(name, value, made)
        made.update({name: False for name in OTHER_KERNELS if made.get(name)})
        if made.get("lr", given.get("lr")) is not None:
            made["lr"] = positive_lr(given)
        return made

    def copy(self, given: Any) -> Any:
        """An optimizer, or a wrapper of some, without its state and hooks."""
        if id(given) in self._copies:
            return self._copies[id(given)]
        made = self._copies[id(given)] = object.__new__(type(given))
        for name, value in vars(given).items():
            if name == "step":  # schedulers replace it by one that steps the given optimizer
                continue
            if name == "param_groups":
                vars(made)[name] = self.groups(value)
            elif name == "state":
                vars(made)[name] = self._copies.setdefault(id(value), defaultdict(dict))
            elif name.endswith("_hooks") and isinstance(value, dict):
                vars(made)[name] = OrderedDict()
            else:
                self._copy_plain(name, value, vars(made))
        return made

    def _copy_plain(self, name: str, value: Any, into: dict[str, Any]) -> None:
        try:
            into[name] = self._plain(value)
        except ProbeError:
            if not self._may_leave_out:
                raise

    def _plain(self, value: Any) -> Any:
        if isinstance(value, PLAIN) or (isinstance(value, FunctionType) and "<locals>" not in value.__qualname__):
            return value
        if isinstance(value, Optimizer):
            return self._make_inner(value)
        if id(value) in self._pairs:
            return self._pairs[id(value)][0]
        if isinstance(value, Tensor) and value.device.type == "cpu" and value.numel() <= 1:
            return value.detach().clone()
        if type(value).__module__.startswith(("torch.distributed", "torch._C._distributed")):
            return None  # a process group or a mesh: the copy is alone
        if type(value) in (dict, OrderedDict, defaultdict):
            made = value.copy()
            made.clear()
            made.update({self._plain(key): self._plain(each) for key, each in value.items()})
            return made
        if type(value) in (list, tuple, set, frozenset):
            return type(value)(self._plain(each) for each in value)
        if not hasattr(value, "__dict__") or isinstance(
            value, Tensor | nn.Module | FunctionType | dict | list | tuple | set
        ):
            raise ProbeError(f"it holds a {type(value).__name__}")
        return self._object(value)

    def _object(self, value: Any) -> Any:
        if id(value) not in self._copies:
            made = self._copies[id(value)] = object.__new__(type(value))
            for name, each in vars(value).items():
                self._copy_plain(name, each, vars(made))
        return self._copies[id(value)]

    def copy_around(self, given: Any) -> Any:
        """A copy of a wrapper around new optimizers."""
        self._make_inner = self.construct
        return self.copy(given)

    def copy_in_part(self, given: Any) -> Any:
        """A copy without what is no plain data."""
        self._may_leave_out = True
        return self.copy(given)

    def construct_with_class(self, given: Any) -> Any:
        """A new wrapper by its constructor, which gets the class of the inner optimizer."""
        return self.construct(given, classes=True)

    def construct(self, given: Any, classes: bool = False) -> Any:
        """A new one by its constructor, with arguments from `defaults` and from attributes of the same name."""
        self._make_inner = self.construct
        known = {name.removeprefix("_"): value for name, value in vars(given).items()}
        known.update(self._settings(getattr(given, "defaults", {})))
        arguments: dict[str, Any] = {}
        for name, parameter in inspect.signature(type(given)).parameters.items():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            if "param" in name and not arguments:
                arguments[name] = self.groups(given.param_groups)
            elif classes and isinstance(known.get(name), Optimizer):
                arguments[name] = type(known[name])
            elif name in known:
                arguments[name] = self._plain(known[name])
            elif parameter.default is parameter.empty:
                raise ProbeError(f"its constructor needs {name!r}")
        return type(given)(**arguments)


def inner_optimizers(given: Any) -> list[Optimizer]:
    """The optimizers that a wrapper holds as attributes, if they step all that it steps; else none."""
    held = list(getattr(given, "__dict__", {}).values())
    held += [each for value in held if isinstance(value, list | tuple) for each in value]
    held += [each for value in held if isinstance(value, dict) for each in value.values()]
    inner = [each for each in held if isinstance(each, Optimizer) and each is not given]
    own = {id(param) for group in getattr(given, "param_groups", []) for param in group["params"]}
    theirs = {id(param) for each in inner for group in each.param_groups for param in group["params"]}
    return list(dict.fromkeys(inner)) if own <= theirs else []


def representatives(given: Any, only: set[int] | None) -> list[tuple[Group, list[Tensor]]]:
    """One param group of each kind that is stepped, with one parameter for each number of dimensions.

    With `only`, the ids of some parameters, these are chosen of those. Of groups that differ in lr alone it is the one
    with the largest.
    """
    found: list[tuple[Group, list[Tensor]]] = []
    for each in inner_optimizers(given) or [given]:
        stepped: list[tuple[Group, list[Tensor]]] = []
        for group in each.param_groups:
            params = {p.ndim: p for p in group["params"] if p.ndim in SHAPES and (only is None or id(p) in only)}
            stepped += [(group, list(params.values()))] if params else []
        kinds = {
            settings_key(group): (group, params) for group, params in sorted(stepped, key=lambda e: positive_lr(e[0]))
        }
        found += kinds.values()
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
    """The learning rate of a param group; in a warmup the one that it leads to."""
    if group.get("lr") is None:
        raise ProbeError("its param groups have no lr")
    values = [group.get(name) for name in ("lr", "initial_lr")]
    numbers = [float(v) for v in values if isinstance(v, int | float) or (isinstance(v, Tensor) and v.is_cpu)]
    return max([number for number in numbers if number > 0], default=1e-3)
