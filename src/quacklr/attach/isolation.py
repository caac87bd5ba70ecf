"""Run an optimizer's code in isolation: global state is restored, and collectives and accelerators raise an error."""

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

from quacklr.attach.scratch import ProbeError, inner_optimizers
from quacklr.util.modules import run_uncompiled

COLLECTIVES = {"c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd"}


class LocalOnly(TorchDispatchMode):
    """Raises ProbeError for a collective, and for an operation on a device other than the CPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in COLLECTIVES:
            raise ProbeError("it communicates between processes")
        devices = [torch.device(kwargs.get("device") or "cpu"), *(a.device for a in args if isinstance(a, Tensor))]
        if any(device.type != "cpu" for device in devices):
            raise ProbeError("it needs a device")
        return func(*args, **kwargs)


@contextlib.contextmanager
def isolated(given: Any) -> Iterator[None]:
    """Run code of an optimizer or wrapper on the CPU, with gradients enabled and without collectives.

    On exit these are restored: random number generators, default dtype and device, warning filters, stdout and stderr,
    torch's global optimizer hooks, and the class attributes of the optimizer and of the optimizers inside it.
    """
    numpy: Any = sys.modules.get("numpy")
    in_processes = distributed_c10d.is_initialized()
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        stack.callback(random.setstate, random.getstate())
        if numpy:
            stack.callback(numpy.random.set_state, numpy.random.get_state())
        for cls in {cls for each in (given, *inner_optimizers(given)) for cls in type(each).__mro__[:-1]}:
            contents = {n: copy.copy(value) for n, value in vars(cls).items() if isinstance(value, list | dict | set)}
            stack.callback(_restore, cls, dict(vars(cls)), contents)
        for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"):
            _replace(stack, optimizer, name, OrderedDict())
        if in_processes:
            _replace(stack, distributed_c10d, "_new_group_with_tag", _no_new_groups)
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        stack.enter_context(run_uncompiled())
        stack.enter_context(torch.inference_mode(False))  # enables gradients, too
        if torch.empty(0).device.type != "cpu":  # get_default_device fails after set_default_device(None) in torch 2.9
            stack.enter_context(torch.device("cpu"))
        if in_processes or torch.accelerator.current_accelerator() is not None:
            stack.enter_context(LocalOnly())  # type: ignore[no-untyped-call]
        yield


def _replace(stack: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def _no_new_groups(*_: Any, **__: Any) -> Any:
    raise ProbeError("it makes process groups")


def _restore(cls: type, attributes: dict[str, Any], contents: dict[str, Any]) -> None:
    """Restore the attributes of a class, and the contents of those that are containers."""
    for name in vars(cls).keys() - attributes.keys():
        delattr(cls, name)
    for name, value in attributes.items():
        if vars(cls).get(name) is not value:
            setattr(cls, name, value)
    for name, content in contents.items():
        container = attributes[name]
        container.clear()
        container.extend(content) if isinstance(container, list) else container.update(content)
