"""An attention of a model, called alone with what it was given in a real forward; and the logits it then has.

Shapes: H heads, N whatever else logits have.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from quacklr.util.modules import module_stack
from quacklr.util.torch_functions import MULTIHEAD, SDPA, SOFTMAX, multihead_opened
from sample import BATCH

LOGSUMEXP: tuple[Any, ...] = (torch.logsumexp, Tensor.logsumexp)
LARGEST: tuple[Any, ...] = (torch.max, Tensor.max)
TANH: tuple[Any, ...] = (torch.tanh, Tensor.tanh, F.tanh)
HEADS_ARE_THIRD = {  # of so many dimensions of the logits; otherwise they are second
    *(("LongformerSelfAttention", 4), ("LEDEncoderSelfAttention", 4)),
    *(("LongT5LocalAttention", 5), ("ProphetNetNgramSelfAttention", 5)),
}
NOT_ATTENTION = re.compile(r"(router|gate|patcher|_hc|compressor|indexer)$")  # have a softmax of their own
MASKED = 5e3  # beyond it, a logit is masked


class Reader(TorchFunctionMode):
    """Hands on what goes into every softmax over keys. Caps, and the largest logit that some subtract, are left out."""

    def __init__(self, listener: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.listener = listener

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is MULTIHEAD:
            with self:
                return multihead_opened(*args, **kwargs)
        if func is SDPA:
            self.listener(of_sdpa(*args, **kwargs))
        elif (func in SOFTMAX and args[0].ndim > 2) or (func in LOGSUMEXP and args[0].ndim > 3):
            if kwargs.get("dim", args[1] if len(args) > 1 else None) in (-1, args[0].ndim - 1):
                self.listener(args[0])
        elif func in TANH and args[0].ndim == 4:
            return args[0]
        elif func in LARGEST and kwargs.get("keepdim"):
            largest = func(*args, **kwargs)
            return type(largest)((torch.zeros_like(largest.values), largest.indices))
        return func(*args, **kwargs)


def of_sdpa(query: Tensor, key: Tensor, _: Tensor, attn_mask: Tensor | None = None, *__: Any, **given: Any) -> Tensor:
    """The logits of scaled_dot_product_attention, with what is added to them, but unmasked."""
    key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
    logits = (query * (given.get("scale") or query.shape[-1] ** -0.5)) @ key.mT
    if attn_mask is None or attn_mask.dtype == torch.bool:
        return logits
    return logits + attn_mask.masked_fill(attn_mask < -MASKED, 0)


@dataclass(frozen=True, eq=False)
class Attention:
    """A module, and what it was called with."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def logits(self) -> Tensor:
        """(H, N), the same every time."""
        caught: list[Tensor] = []
        kwargs = {name: copy.copy(value) if isinstance(value, dict) else value for name, value in self.kwargs.items()}
        with torch.random.fork_rng(), torch.no_grad(), Reader(caught.append):
            torch.manual_seed(0)
            self.module(*self.args, **kwargs)
        return torch.cat([self._heads_first(logits) for logits in caught], dim=1) if caught else torch.zeros(0, 0)

    def _heads_first(self, logits: Tensor) -> Tensor:
        logits = logits.unflatten(0, (BATCH, -1)) if logits.ndim == 3 else logits
        third = (type(self.module).__name__, logits.ndim) in HEADS_ARE_THIRD
        return logits.movedim(2 if third else 1, 0).flatten(1)


def calls(model: nn.Module, sample: Any, names: Iterable[str]) -> tuple[dict[str, Attention], list[str]]:
    """The first call of each of these modules in one forward; and where else in the model there is an attention."""
    found: dict[str, Attention] = {}
    elsewhere: list[str] = []

    def record(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if name not in found:
            found[name] = Attention(module, tuple(map(_alone, args)), {k: _alone(v) for k, v in kwargs.items()})

    modules = {name: model.get_submodule(name) for name in names}
    hooks = [
        module.register_forward_pre_hook(lambda m, a, k, name=name: record(name, m, a, k), with_kwargs=True)
        for name, module in modules.items()
    ]
    with torch.no_grad(), module_stack(model) as now:

        def listen(_: Tensor) -> None:
            if not any(name in modules for name in now.modules) and not NOT_ATTENTION.search(now.modules[-1]):
                elsewhere.append(now.modules[-1])

        with Reader(listen):
            model(**sample) if isinstance(sample, dict) else model(sample)
    for hook in hooks:
        hook.remove()
    return found, elsewhere


def _alone(arg: Any) -> Any:
    """A copy without caches, and with noise for vectors that are zero or NaN: they would hide what multiplies them."""
    if isinstance(arg, Tensor) and arg.ndim == 3 and arg.is_floating_point() and (arg.isnan().any() or not arg.any()):
        return torch.randn(arg.shape)
    return None if type(arg).__name__.endswith("Cache") else copy.deepcopy(arg)
