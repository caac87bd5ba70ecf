"""Modules of a model by name, those that are running, and forward passes without side effects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from quacklr.util.kept_state import state_kept

IN_PLACE = ("_orig_mod", "_fsdp_wrapped_module")  # of torch.compile and FSDP1, which also wrap modules inside a model
WRAPPERS = {  # the package and the name of classes with the model as `module`
    *(("torch", "DistributedDataParallel"), ("torch", "DataParallel")),
    *(("deepspeed", "DeepSpeedEngine"), ("deepspeed", "PipelineEngine")),
    *(("megatron", "DistributedDataParallel"), ("megatron", "Float16Module")),
}


def wrappers(model: nn.Module) -> Iterator[nn.Module]:
    """The model, and the modules in its wrappers (DistributedDataParallel, compiled, DeepSpeed's); outermost first."""
    yield model
    kinds = {(cls.__module__.split(".")[0], cls.__name__) for cls in type(model).__mro__}
    names = (*IN_PLACE, "module") if kinds & WRAPPERS else IN_PLACE
    if inside := [name for name in names if name in model._modules]:
        yield from wrappers(model.get_submodule(inside[0]))


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside of its wrappers."""
    *_, inside = wrappers(model)
    return inside


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules, under the names that they have without torch.compile, DistributedDataParallel and FSDP1."""
    for name, module in unwrapped(model).named_modules():
        if not any(wrapped in module._modules for wrapped in IN_PLACE):
            yield _plain_name(name), module


def compiled_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that `torch.compile` returned, around the model and in it, by the name of the compiled module."""
    around = [("", wrapper) for wrapper in wrappers(model)]
    for name, module in (*around, *unwrapped(model).named_modules()):
        if "_orig_mod" in module._modules:
            yield _plain_name(name), module


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """All parameters, each once, under the names that they have without torch.compile and DistributedDataParallel."""
    for name, parameter in unwrapped(model).named_parameters():
        yield _plain_name(name), parameter


def _plain_name(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in IN_PLACE)


@contextmanager
def _attributes_set(objects: Iterable[Any], name: str, value: Any) -> Iterator[None]:
    """While entered, an attribute of the objects has this value; afterwards its earlier one."""
    kept = [(each, getattr(each, name)) for each in objects]
    try:
        for each, old in kept:
            if old is not value:
                setattr(each, name, value)
        yield
    finally:
        for each, old in kept:
            if getattr(each, name) is not old:
                setattr(each, name, old)


def evaluating(model: nn.Module) -> AbstractContextManager[None]:
    """While entered, the model is in eval mode. Not by `eval()`, in which some modules merge weights."""
    return _attributes_set(model.modules(), "training", False)


def trainable(model: nn.Module) -> AbstractContextManager[None]:
    """While entered, every floating point parameter requires gradients; afterwards the frozen ones are frozen again."""
    return _attributes_set([p for p in model.parameters() if p.is_floating_point()], "requires_grad", True)


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """On exit, the model is what it was: a forward or a backward inside leaves nothing behind.

    Restored are its state (util/kept_state.py), its gradients and all random state. While entered, it has copies of its
    tensors, and no gradients; so a graph that was made before can still be differentiated. Parameters are not copied: a
    forward that writes into a parameter changes it.
    """
    devices = {x.device for x in (*model.parameters(), *model.buffers()) if x.device.type not in ("cpu", "meta")}
    random_state = torch.random.fork_rng(devices, device_type=next((device.type for device in devices), "cuda"))
    with random_state, state_kept(model), _attributes_set(model.parameters(), "grad", None):
        yield


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """While entered, the model is in eval mode without gradients; afterwards it is untouched."""
    with untouched(model), torch.no_grad(), evaluating(model):
        yield


def run_uncompiled() -> AbstractContextManager[Any]:
    """While entered, compiled code runs uncompiled."""
    return torch.compiler.set_stance("force_eager")


@dataclass(slots=True)
class ModuleStack:
    """Names and call numbers of the running modules, outermost first. "" and 0 are of the code around the model."""

    modules: tuple[str, ...] = ("",)
    calls: tuple[int, ...] = (0,)


@contextmanager
def module_stack(model: nn.Module) -> Iterator[ModuleStack]:
    """While entered, keeps a stack of the running modules of a model, without softmax modules."""
    stack = ModuleStack()
    numbers = count(1)

    def begin(name: str, *_: Any) -> None:
        stack.modules += (name,)
        stack.calls += (next(numbers),)

    def end(*_: Any) -> None:
        stack.modules, stack.calls = stack.modules[:-1], stack.calls[:-1]

    with ExitStack() as hooks:
        for name, module in named_modules(model):
            if not isinstance(module, nn.Softmax):
                hooks.enter_context(module.register_forward_pre_hook(partial(begin, name)))
                hooks.enter_context(module.register_forward_hook(end, always_call=True))
        yield stack


class Arguments(NamedTuple):
    """The arguments of a call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def map(self, function: Callable[[Tensor], Tensor]) -> Arguments:
        """The same arguments with a function applied to every tensor."""
        return Arguments(*tree_map_only(Tensor, function, (self.args, self.kwargs)))


def run(model: nn.Module, probe: Any) -> Any:
    """Run the model on a batch: a tensor, a tuple of arguments, a dict of named ones, or Arguments."""
    if isinstance(probe, Arguments):
        return model(*probe.args, **probe.kwargs)
    if isinstance(probe, Mapping):
        return model(**probe)
    return model(*probe) if isinstance(probe, tuple) else model(probe)
