"""A model as somebody hands it to us: its modules by name, and a forward of it that leaves no trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel


def wrappers(model: nn.Module) -> Iterator[nn.Module]:
    """The model and what it wraps, if it is DistributedDataParallel or compiled, from the outside in."""
    yield model
    while isinstance(model, DistributedDataParallel | DataParallel) or "_orig_mod" in model._modules:
        model = model.get_submodule("_orig_mod" if "_orig_mod" in model._modules else "module")
        yield model


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside of DistributedDataParallel and torch.compile: names and forwards are its own."""
    *_, inside = wrappers(model)
    return inside


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules, under names that torch.compile and DDP have not changed: they put what they wrap a level down."""
    for name, module in unwrapped(model).named_modules():
        if "_orig_mod" in module._modules:
            continue
        yield ".".join(part for part in name.split(".") if part != "_orig_mod"), module


def compiled_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that `torch.compile` returned, around the model and in it, under the names of what they compile."""
    yield from (("", wrapper) for wrapper in wrappers(model) if "_orig_mod" in wrapper._modules)
    for name, module in unwrapped(model).named_modules():
        if "_orig_mod" in module._modules:
            yield ".".join(part for part in name.split(".") if part != "_orig_mod"), module


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """All parameters, each once, under names that torch.compile and DDP have not changed."""
    for name, parameter in unwrapped(model).named_parameters():
        yield ".".join(part for part in name.split(".") if part != "_orig_mod"), parameter


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in eval mode; afterwards every module is in the mode it was in.

    Modes are set as they are stored: some modules merge weights or do other things when `eval()` is called.
    """
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """The model in eval mode without gradients; afterwards mode and random state are what they were."""
    devices = {param.device for param in model.parameters() if param.device.type != "cpu"}
    kind = next((device.type for device in devices), "cuda")
    with torch.random.fork_rng(devices, device_type=kind), torch.no_grad(), evaluating(model):
        yield


def run_uncompiled() -> AbstractContextManager[Any]:
    """While entered, what was compiled runs as it was written."""
    return torch.compiler.set_stance("force_eager")


class Arguments(NamedTuple):
    """What a module is called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def tensors(self) -> list[Tensor]:
        """All tensors in it, also in lists, tuples and dicts."""
        found: list[Tensor] = []

        def keep(tensor: Tensor) -> Tensor:
            found.append(tensor)
            return tensor

        self.map(keep)
        return found

    def map(self, function: Callable[[Tensor], Tensor]) -> Arguments:
        """The same call with a function of every tensor in it."""
        return Arguments(_mapped(function, self.args), _mapped(function, self.kwargs))


def _mapped(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(function, each) for each in value))
    if type(value) in (list, tuple):
        return type(value)(_mapped(function, each) for each in value)
    return {key: _mapped(function, each) for key, each in value.items()} if type(value) is dict else value


def run(model: nn.Module, probe: Any) -> Any:
    """One forward of a batch in the form the model takes it."""
    if isinstance(probe, Arguments):
        return model(*probe.args, **probe.kwargs)
    if isinstance(probe, Mapping):
        return model(**probe)
    return model(*probe) if isinstance(probe, tuple) else model(probe)


@contextmanager
def trainable(model: nn.Module) -> Iterator[None]:
    """Every parameter can have gradients; afterwards those that were frozen are again."""
    frozen = [p for p in model.parameters() if not p.requires_grad and p.is_floating_point()]
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


@contextmanager
def own_buffers(model: nn.Module) -> Iterator[None]:
    """The model with copies of its buffers: a forward that writes into them (caches, counters) leaves no trace."""
    kept = [(module, dict(module._buffers)) for module in model.modules()]
    try:
        for module, buffers in kept:
            module._buffers.update({name: b if b is None else b.clone() for name, b in buffers.items()})
        yield
    finally:
        for module, buffers in kept:
            module._buffers.clear()
            module._buffers.update(buffers)


@contextmanager
def own_attributes(module: nn.Module) -> Iterator[None]:
    """Afterwards every attribute and submodule of the module, and of those inside, is what it was."""
    kept = [(each, dict(vars(each)), dict(each._modules)) for each in module.modules()]
    try:
        yield
    finally:
        for each, attributes, submodules in kept:
            vars(each).clear()
            vars(each).update(attributes)
            each._modules.clear()
            each._modules.update(submodules)
