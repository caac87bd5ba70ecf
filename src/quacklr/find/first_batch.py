"""A short slice of the first batch that a model runs, kept to verify its rules with.

A pre-forward hook keeps the first examples of what the model is called with. A trainer may call a part of the model it
was given (a LightningModule's `self.model`), so the modules around every attention have the hook, and the outermost
one that is called keeps its arguments. Then the hooks of all modules inside of it are removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from quacklr.util.modules import Arguments, compiled_modules, named_modules

EXAMPLES, TOKENS = 2, 8
LONGEST = 512  # tokens of an example that is run whole, where a model does not run on a few of them


class FirstBatch:
    """While its hooks are on, keeps what the modules around some attentions are called with first."""

    def __init__(self, model: nn.Module, attentions: Iterable[str]) -> None:
        around = {part for name in attentions for part in _outer(name)}
        self.calls: dict[str, tuple[Callable[[], nn.Module | None], Arguments]] = {}
        self._hooks: dict[str, list[RemovableHandle]] = {}
        for name, module in [*compiled_modules(model), *named_modules(model)]:
            if name in around and not isinstance(module, torch.jit.ScriptModule):
                hook = module.register_forward_pre_hook(Hook(self, name), with_kwargs=True)
                self._hooks.setdefault(name, []).append(hook)

    def keep(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Keep the first examples of a call, and ask no more of what is inside the module."""
        if name not in self._hooks:
            return
        self.calls[name] = ref(module), _examples(Arguments(args, dict(kwargs)))
        for inside in [other for other in self._hooks if is_inside(other, name)]:
            self._remove(inside)

    def remove(self) -> None:
        """Take the hooks off."""
        for name in list(self._hooks):
            self._remove(name)

    def _remove(self, name: str) -> None:
        for hook in self._hooks.pop(name):
            hook.remove()


class Hook:
    """The pre-forward hook. A copied or saved model gets one that does nothing."""

    def __init__(self, batch: FirstBatch, name: str) -> None:
        self.batch, self.name = batch, name

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the call. Not while compiling, nor of inference tensors, which have no gradients.

        The hook of a module that `torch.compile` returned runs outside of what is compiled.
        """
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
            return
        self.batch.keep(self.name, module, args, kwargs)

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _no_hook, ()


def _no_hook() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*_: Any) -> None:
    pass


def is_inside(name: str, outer: str) -> bool:
    """Whether a module is another one, or a part of it."""
    return not outer or name == outer or name.startswith(f"{outer}.")


def _outer(name: str) -> list[str]:
    """The module and all that it is a part of: a.b gives "", a and a.b."""
    parts = name.split(".") if name else []
    return [".".join(parts[:i]) for i in range(len(parts) + 1)]


def slices(call: Arguments) -> Iterator[Arguments]:
    """The call with a few tokens of each example; then with all of them, if they are not too many."""
    batch, lengths = _sizes(call)
    if any(length > TOKENS for length in lengths):
        yield call.map(lambda tensor: _cut_tokens(tensor, batch, lengths))
    if all(length <= LONGEST for length in lengths):
        yield call


def _examples(call: Arguments) -> Arguments:
    """The first examples, as copies that training does not change."""
    batch, _ = _sizes(call)
    with torch.no_grad():
        return call.map(lambda tensor: _cut_batch(tensor, batch).detach().clone())


def _sizes(call: Arguments) -> tuple[int, set[int]]:
    """The batch size, and the lengths of sequences: second dimensions of token ids, or of a batch of vectors."""
    tensors = call.tensors()
    ids = [tensor for tensor in tensors if tensor.ndim == 2 and not tensor.is_floating_point()]
    vectors = [tensor for tensor in tensors if tensor.ndim == 3 and tensor.is_floating_point()]
    batch = next((len(tensor) for tensor in [*ids, *tensors] if tensor.ndim > 1), 0)
    return batch, {tensor.shape[1] for tensor in ids or vectors[:1]}


def _cut_batch(tensor: Tensor, batch: int) -> Tensor:
    dim = next((dim for dim in range(min(2, tensor.ndim)) if tensor.shape[dim] == batch), None)
    return tensor if dim is None else tensor.narrow(dim, 0, min(EXAMPLES, batch))


def _cut_tokens(tensor: Tensor, batch: int, lengths: set[int]) -> Tensor:
    for dim, size in enumerate(tensor.shape):
        if size in lengths and (dim or size != batch):
            tensor = tensor.narrow(dim, 0, min(TOKENS, size))
    return tensor
