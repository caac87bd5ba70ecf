"""Keeps a small slice of the first batch that a model runs. It is used to verify rules.

A forward pre-hook keeps the first examples of the model's inputs. A trainer may call only a submodule of the model (a
LightningModule's `self.model`), so all modules that contain an attention have the hook. The inputs of the outermost
module that is called are kept, and the hooks of all modules inside it are removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from quacklr.find.finding import is_inside
from quacklr.util.modules import Arguments, compiled_modules, named_modules

EXAMPLES, TOKENS = 2, 8
LONGEST = 512  # tokens of the longest example that is run whole, if the model fails on its first tokens


class FirstBatch:
    """The inputs of the first call of modules that contain some attentions, kept by hooks."""

    def __init__(self, model: nn.Module, attentions: Iterable[str]) -> None:
        attentions = list(attentions)
        self.calls: dict[str, tuple[Callable[[], nn.Module | None], Arguments]] = {}
        self._hooks: dict[str, list[RemovableHandle]] = {}
        for name, module in [*compiled_modules(model), *named_modules(model)]:
            is_around = any(is_inside(attention, name) for attention in attentions)
            if is_around and not isinstance(module, torch.jit.ScriptModule):
                hook = module.register_forward_pre_hook(Hook(self, name), with_kwargs=True)
                self._hooks.setdefault(name, []).append(hook)

    def keep(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Keep the first examples of a call, and remove the hooks of the modules inside."""
        if name in self._hooks:
            self.calls[name] = ref(module), _examples(Arguments(args, dict(kwargs)))
            self.remove(name)

    def remove(self, outer: str = "") -> None:
        """Remove the hooks of a module and of all modules inside it."""
        for name in [name for name in self._hooks if is_inside(name, outer)]:
            for hook in self._hooks.pop(name):
                hook.remove()


class Hook:
    """The forward pre-hook. In a copied or loaded model it does nothing."""

    def __init__(self, batch: FirstBatch | None, name: str) -> None:
        self.batch, self.name = batch, name

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the call, but not while compiling, nor in inference mode, whose tensors have no gradients.

        The hook of a module that `torch.compile` returned runs outside the compiled code.
        """
        if self.batch is not None and not torch.compiler.is_compiling() and not torch.is_inference_mode_enabled():
            self.batch.keep(self.name, module, args, kwargs)

    def __reduce__(self) -> tuple[type[Hook], tuple[None, str]]:
        return Hook, (None, self.name)


def slices(call: Arguments) -> Iterator[Arguments]:
    """The call with a few tokens of each example; then with all of them, if they are not too many."""
    batch, lengths = _sizes(call)
    if any(length > TOKENS for length in lengths):
        yield call.map(lambda tensor: _first_tokens(tensor, batch, lengths))
    if all(length <= LONGEST for length in lengths):
        yield call


def _examples(call: Arguments) -> Arguments:
    """A copy of the first examples of a call."""
    batch, _ = _sizes(call)
    with torch.no_grad():
        return call.map(lambda tensor: _first_examples(tensor, batch).detach().clone())


def _sizes(call: Arguments) -> tuple[int, set[int]]:
    """The batch size, and the sequence lengths: second dimensions of token ids, or of a batch of vectors."""
    tensors = call.tensors()
    ids = [tensor for tensor in tensors if tensor.ndim == 2 and not tensor.is_floating_point()]
    vectors = [tensor for tensor in tensors if tensor.ndim == 3 and tensor.is_floating_point()]
    batch = next((len(tensor) for tensor in [*ids, *tensors] if tensor.ndim > 1), 0)
    return batch, {tensor.shape[1] for tensor in ids or vectors[:1]}


def _first_examples(tensor: Tensor, batch: int) -> Tensor:
    dim = next((dim for dim in range(min(2, tensor.ndim)) if tensor.shape[dim] == batch), None)
    return tensor if dim is None else tensor.narrow(dim, 0, min(EXAMPLES, batch))


def _first_tokens(tensor: Tensor, batch: int, lengths: set[int]) -> Tensor:
    for dim, size in enumerate(tensor.shape):
        if size in lengths and (dim or size != batch):
            tensor = tensor.narrow(dim, 0, min(TOKENS, size))
    return tensor
