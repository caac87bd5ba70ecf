"""Flex attention: its logits, computed again in chunks; and, on CUDA, the largest ones from its own kernel.

A function mode cannot intercept compiled flex attention. Uncompiled, it is an operator; the first half of this file
computes the logits of a call of that operator. The second half replaces flex attention where a model's code refers to
it, to get the maxima from the kernel.

Both use internals of torch: tests/attention/test_flex_contract.py fails if a version of torch changes them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quacklr.attention.logits import QKLogits

Pause = Callable[[], AbstractContextManager[Any]]
LN2 = math.log(2)  # the operator returns logarithms to base 2


def is_flex(func: Any) -> bool:
    """Whether a function is flex attention's operator."""
    return isinstance(func, torch._ops.HigherOrderOperator) and func.name() == "flex_attention"


def flex_logits(
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
    mask: Any = _vmap_for_bhqkv(block_mask[-1], prefix=(), suffix=(None,) * len(mask_buffers))

    def modified(logit_BHIJ: Tensor, sequence: int, query_index: int) -> Tensor:
        starts = (sequence, 0, query_index, 0)
        indices = [
            torch.arange(start, start + size, device=query.device)
            for start, size in zip(starts, logit_BHIJ.shape, strict=True)
        ]
        with TransformGetItemToIndex():
            logit: Tensor = score(logit_BHIJ, *indices, *score_buffers)
            return logit.masked_fill(~mask(*indices, *mask_buffers), -torch.inf)

    k_BGJD = key.detach().expand(query.shape[0], *key.shape[1:])
    return QKLogits(query.detach(), k_BGJD, scale, score_mod=modified)


def run_flex(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The outputs of the operator, without gradients, in chunks: torch's own code holds all logits in memory."""
    logits = flex_logits(query, key, value, *args, **kwargs)
    v_BHJD = value.float().expand(query.shape[0], *value.shape[1:])
    v_BHJD = v_BHJD.repeat_interleave(logits.heads // value.shape[1], dim=1)
    output = query.new_empty(*query.shape[:3], value.shape[3])
    lse, maxima = (torch.empty(query.shape[:3], device=query.device) for _ in range(2))
    for sequences, queries, logit_BHIJ in logits.chunks():
        share_BHIJ = logit_BHIJ.softmax(-1).nan_to_num_(nan=0.0)
        output[sequences, :, queries] = (share_BHIJ @ v_BHJD[sequences]).to(output.dtype)
        lse[sequences, :, queries] = logit_BHIJ.logsumexp(-1) / LN2
        maxima[sequences, :, queries] = logit_BHIJ.amax(-1) / LN2
    return output, lse, maxima


class Reference(NamedTuple):
    """An attribute of a Python module or class whose value is flex attention."""

    owner: Any
    name: str
    function: Callable[..., Any]


def find_references(model: nn.Module) -> list[Reference]:
    """Where the code of a model refers to flex attention: its classes, their Python modules, and transformers."""
    if "torch.nn.attention.flex_attention" not in sys.modules:
        return []
    classes = {each for module in model.modules() for each in type(module).__mro__ if each is not object}
    files = [sys.modules[name] for name in {each.__module__ for each in classes} if name in sys.modules]
    owners: list[Any] = [*files, *classes]
    found = [
        Reference(owner, name, value)
        for owner in owners
        if not owner.__name__.startswith("torch.")
        for name, value in list(vars(owner).items())
        if is_flex_attention(value)
    ]
    if transformers := sys.modules.get("transformers.integrations.flex_attention"):
        name = "compile_friendly_flex_attention"
        found.append(Reference(transformers, name, getattr(transformers, name)))
    return found


def is_flex_attention(value: Any) -> bool:
    """Whether a value is torch's function `flex_attention`, plain or compiled."""
    from torch.nn.attention.flex_attention import flex_attention

    value = value.__func__ if isinstance(value, staticmethod) else value
    return value is flex_attention or getattr(value, "_torchdynamo_orig_callable", None) is flex_attention


@contextmanager
def report_maxima(references: list[Reference], on_max: Callable[[Tensor], None], pause: Pause) -> Iterator[None]:
    """While entered, calls through these references call `on_max(max_H)`, if the kernel can return the maxima."""
    for owner, name, function in references:
        setattr(owner, name, with_maxima(function, on_max, pause))
    try:
        yield
    finally:
        for reference in references:
            setattr(*reference)


def with_maxima(function: Callable[..., Any], on_max: Callable[[Tensor], None], pause: Pause) -> Callable[..., Any]:
    """Flex attention that also requests the largest logits. It is called in `pause()`, where it may be compiled."""
    from torch.nn.attention.flex_attention import AuxRequest

    def attend(
        query: Tensor, *args: Any, return_lse: bool = False, return_aux: AuxRequest | None = None, **kwargs: Any
    ) -> Any:
        if not has_maxima(query):
            return function(query, *args, return_lse=return_lse, return_aux=return_aux, **kwargs)
        lse = return_lse or (return_aux is not None and return_aux.lse)
        with pause():
            output, aux = function(query, *args, return_aux=AuxRequest(lse=lse, max_scores=True), **kwargs)
        on_max(aux.max_scores.detach().float().amax((0, 2)))
        return (output, aux) if return_aux is not None else (output, aux.lse) if return_lse else output

    return staticmethod(attend) if isinstance(function, staticmethod) else attend


def has_maxima(query: Tensor) -> bool:
    """Whether the kernel can return the largest logits: on CUDA it does, on the CPU it raises."""
    return query.is_cuda
