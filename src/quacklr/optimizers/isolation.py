"""Run an optimizer's code without a trace: global state is restored, collectives and other devices are forbidden."""

from __future__ import annotations

import contextlib
import copy
import io
import random
import sys
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.optim import optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from quacklr.optimizers.scratch import ProbeError, inner_optimizers
from quacklr.util.modules import run_uncompiled

COLLECTIVES = {"c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd"}


class LocalOnly(TorchDispatchMode):
    """Raises ProbeError where a collective or another device would be used."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in COLLECTIVES:
            raise ProbeError("it communicates between processes")
        devices = [torch.device(kwargs.get("device") or "cpu"), *(a.device for a in args if isinstance(a, Tensor))]
        if any(device.type != "cpu" for device in devices):
            raise ProbeError("it needs a device")
        return func(*args, **kwargs)


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _no_new_groups(*_: Any, **__: Any) -> Any:
    raise ProbeError("it makes process groups")


@contextlib.contextmanager
def isolated(given: Any) -> Iterator[None]:
    """Afterwards random and other global state is what it was, and so are the attributes of the optimizer's classes."""
    classes = _class_attributes(given)
    numpy: Any = sys.modules.get("numpy")
    python_random, dtype = random.getstate(), torch.get_default_dtype()
    numpy_random = numpy and numpy.random.get_state()
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=[]))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
            for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"):
                stack.enter_context(_replaced(optimizer, name, OrderedDict()))
            if distributed_c10d.is_initialized():
                stack.enter_context(_replaced(distributed_c10d, "_new_group_with_tag", _no_new_groups))
            stack.enter_context(run_uncompiled())
            stack.enter_context(torch.inference_mode(False))  # gradients are on, too
            if torch.get_default_device().type != "cpu":
                stack.enter_context(torch.device("cpu"))
            if torch.accelerator.current_accelerator() is not None or distributed_c10d.is_initialized():
                stack.enter_context(LocalOnly())  # type: ignore[no-untyped-call]
            yield
    finally:
        torch.set_default_dtype(dtype)
        random.setstate(python_random)
        if numpy_random:
            numpy.random.set_state(numpy_random)
        for cls, before in classes.items():
            _restore(cls, *before)


def _class_attributes(given: Any) -> dict[type, tuple[dict[str, Any], dict[str, Any]]]:
    """The attributes of an optimizer's classes, and copies of what their containers hold."""
    found = {}
    for cls in {cls for each in (given, *inner_optimizers(given)) for cls in type(each).__mro__[:-1]}:
        values = dict(vars(cls))
        found[cls] = values, {name: copy.copy(v) for name, v in values.items() if isinstance(v, list | dict | set)}
    return found


def _restore(cls: type, values: dict[str, Any], held: dict[str, Any]) -> None:
    for name in vars(cls).keys() | values.keys():
        if name not in values:
            delattr(cls, name)
        elif vars(cls).get(name) is not values[name]:
            setattr(cls, name, values[name])
    for name, copied in held.items():
        values[name].clear()
        values[name].extend(copied) if isinstance(copied, list) else values[name].update(copied)
