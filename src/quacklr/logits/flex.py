"""Flex attention: its logits, made again a few at a time; and, on CUDA, the largest ones from its own kernel.

Compiled, flex attention is out of a function mode's sight. Called as it was written it shows as an operator, of which
the first half of this file makes the logits; the second half reaches for it where a model's code holds it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quacklr.logits.logits import QKLogits

Pause = Callable[[], AbstractContextManager[Any]]
LN2 = math.log(2)  # the operator counts in powers of two


def is_flex(func: Any) -> bool:
    """Whether a function is flex attention's operator."""
    return isinstance(func, torch._ops.HigherOrderOperator) and func.name() == "flex_attention"


def of_flex(
    query: Tensor,
    key: Tensor,
    _value: Tensor,
    score_mod: Callable[..., Tensor],
    block_mask: tuple[Any, ...],
    scale: float,
    _kernel_options: Any = None,
    score_buffers: tuple[Tensor, ...] = (),
    mask_buffers: tuple[Tensor, ...] = (),
) -> QKLogits:
    """The logits of a call of the operator, with its signature."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
    from torch.nn.attention.flex_attention import _vmap_for_bhqkv

    score: Any = _vmap_for_bhqkv(score_mod, prefix=(0,), suffix=(None,) * len(score_buffers))
    seen: Any = _vmap_for_bhqkv(block_mask[-1], prefix=(), suffix=(None,) * len(mask_buffers))

    def modify(logit_BHIJ: Tensor, sequence: int, first: int) -> Tensor:
        starts = (sequence, 0, first, 0)
        places = [
            torch.arange(start, start + size, device=query.device)
            for start, size in zip(starts, logit_BHIJ.shape, strict=True)
        ]
        with TransformGetItemToIndex():
            modified: Tensor = score(logit_BHIJ, *places, *score_buffers)
            return modified.masked_fill(~seen(*places, *mask_buffers), -torch.inf)

    k_BGJD = key.detach().expand(query.shape[0], *key.shape[1:])
    return QKLogits(query.detach(), k_BGJD, scale, modify=modify)


def run_flex(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """What the operator puts out, without gradients, and without all logits at once: torch's own has them."""
    logits = of_flex(query, key, value, *args, **kwargs)
    v_BHJD = value.float().expand(query.shape[0], *value.shape[1:])
    v_BHJD = v_BHJD.repeat_interleave(logits.heads // value.shape[1], dim=1)
    output = query.new_empty(*query.shape[:3], value.shape[3])
    sums, largest = (torch.empty(query.shape[:3], device=query.device) for _ in range(2))
    for sequences, queries, logit_BHIJ in logits.chunks():
        share_BHIJ = logit_BHIJ.softmax(-1).nan_to_num_(nan=0.0)
        output[sequences, :, queries] = (share_BHIJ @ v_BHJD[sequences]).to(output.dtype)
        sums[sequences, :, queries] = logit_BHIJ.logsumexp(-1) / LN2
        largest[sequences, :, queries] = logit_BHIJ.amax(-1) / LN2
    return output, sums, largest


@dataclass(frozen=True, slots=True)
class Holder:
    """A place from which a model's code calls flex attention."""

    owner: Any
    name: str
    function: Callable[..., Any]

    def put(self, function: Callable[..., Any]) -> None:
        """Hold this function instead."""
        setattr(self.owner, self.name, function)


def holders(model: nn.Module) -> list[Holder]:
    """Every place: what the files of the model's classes, and these classes, name so; and transformers' own."""
    if "torch.nn.attention.flex_attention" not in sys.modules:
        return []
    classes = {each for module in model.modules() for each in type(module).__mro__ if each is not object}
    files = [sys.modules[name] for name in {each.__module__ for each in classes} if name in sys.modules]
    owners: list[Any] = [*files, *classes]
    found = [
        Holder(owner, name, value)
        for owner in owners
        if not owner.__name__.startswith("torch.")
        for name, value in list(vars(owner).items())
        if is_held(value)
    ]
    if transformers := sys.modules.get("transformers.integrations.flex_attention"):
        name = "compile_friendly_flex_attention"
        found.append(Holder(transformers, name, getattr(transformers, name)))
    return found


def is_held(value: Any) -> bool:
    """Whether it is flex attention, as it is or compiled."""
    from torch.nn.attention.flex_attention import flex_attention

    value = value.__func__ if isinstance(value, staticmethod) else value
    return value is flex_attention or getattr(value, "_torchdynamo_orig_callable", None) is flex_attention


@contextmanager
def telling(places: list[Holder], listener: Callable[[Tensor], None], pause: Pause) -> Iterator[None]:
    """While entered, calls from these places are told: the (H,) largest logits, where the kernel gives them."""
    for place in places:
        place.put(with_maxima(place.function, listener, pause))
    try:
        yield
    finally:
        for place in places:
            place.put(place.function)


def with_maxima(function: Callable[..., Any], listener: Callable[[Tensor], None], pause: Pause) -> Callable[..., Any]:
    """Flex attention that asks its kernel for the largest logits too; `pause` lets it be compiled meanwhile."""
    from torch.nn.attention.flex_attention import AuxRequest

    def called(
        query: Tensor, *args: Any, return_lse: bool = False, return_aux: AuxRequest | None = None, **kwargs: Any
    ) -> Any:
        if not has_maxima(query):
            return function(query, *args, return_lse=return_lse, return_aux=return_aux, **kwargs)
        lse = return_lse or (return_aux is not None and return_aux.lse)
        with pause():
            output, aux = function(query, *args, return_aux=AuxRequest(lse=lse, max_scores=True), **kwargs)
        listener(aux.max_scores.detach().float().amax((0, 2)))
        return (output, aux) if return_aux is not None else (output, aux.lse) if return_lse else output

    return staticmethod(called) if isinstance(function, staticmethod) else called


def has_maxima(query: Tensor) -> bool:
    """Whether the kernel can give the largest logits: on CUDA; on the CPU it raises."""
    return query.is_cuda
