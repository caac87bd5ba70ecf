"""Flex attention: its logits, computed again in chunks.

A function mode sees flex attention as an operator, if it runs uncompiled. The operator and its arguments are internal
to torch: tests/attention/test_flex.py fails if a version of torch changes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quacklr.attention.logits import QKLogits

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
        sizes = zip((sequence, 0, query_index, 0), logit_BHIJ.shape, strict=True)
        indices = [torch.arange(start, start + size, device=query.device) for start, size in sizes]
        with TransformGetItemToIndex():
            logit: Tensor = score(logit_BHIJ, *indices, *score_buffers)
            return logit.masked_fill(~mask(*indices, *mask_buffers), -torch.inf)

    k_BGJD = key.detach().expand(query.shape[0], *key.shape[1:])
    return QKLogits(query.detach(), key.shape[2], k_BGJD, scale, score_mod=modified)


def run_flex(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The outputs of the operator, without gradients, in chunks: torch's own code holds all logits in memory."""
    logits = flex_logits(query, key, value, *args, **kwargs)
    v_BGJD = value.float().expand(query.shape[0], *value.shape[1:])
    v_BHJD = v_BGJD.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    output = query.new_empty(*query.shape[:3], value.shape[3])
    lse, maxima = (torch.empty(query.shape[:3], device=query.device) for _ in range(2))
    for sequences, queries, logit_BHIJ in logits.chunks():
        share_BHIJ = logit_BHIJ.softmax(-1).nan_to_num_(nan=0.0)
        output[sequences, :, queries] = (share_BHIJ @ v_BHJD[sequences]).to(output.dtype)
        lse[sequences, :, queries] = logit_BHIJ.logsumexp(-1) / LN2
        maxima[sequences, :, queries] = logit_BHIJ.amax(-1) / LN2
    return output, lse, maxima
