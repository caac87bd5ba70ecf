"""Intercept the attention of a model while it runs: for every softmax over keys, the logits that go into it.

Three forms are intercepted: `scaled_dot_product_attention` and flex attention, whose logits are computed again from
queries and keys, and a softmax over the last dimension of a tensor that was computed from q . k.

Flex attention is seen as an operator, if it runs uncompiled. The operator and its arguments are internal to torch:
tests/attention/test_flex.py fails if a version of torch changes them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from quacklr.attention.logits import EagerLogits, HeadAxes, Logits, QKLogits, last_axis
from quacklr.attention.provenance import ProvenanceTracker
from quacklr.util.torch_functions import LOGSUMEXP, MULTIHEAD, SDPA, SOFTMAX, bound, multihead_opened, tensors_in

SUPPORTED = (
    "these are seen: scaled_dot_product_attention, flex attention, torch.nn.MultiheadAttention, and a softmax over the "
    "last dimension of products of queries and keys. If the model has no softmax attention (Mamba, RWKV, linear "
    "attention), there are no logits. Other kernels, such as flash attention, are not seen: switch the model to sdpa "
    "or eager"
)


class AttentionInterceptor(TorchFunctionMode):
    """While entered, calls `on_logits` with the logits of every attention. The forward pass does not change.

    `axes_of(lead)` is called once for each attention whose function does not define which axes are heads, with the
    sizes of the leading axes of its logits. Functions inside of torch.compile are not intercepted.
    """

    def __init__(self, on_logits: Callable[[Logits], None], axes_of: Callable[[tuple[int, ...]], HeadAxes]) -> None:
        super().__init__()
        self.on_logits, self.axes_of, self.provenance = on_logits, axes_of, ProvenanceTracker()
        self._reported: Any = WeakTensorKeyDictionary()  # a model may compute a softmax of the same logits twice

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch, and report its logits if it is an attention."""
        kwargs = kwargs or {}
        if func is MULTIHEAD:
            heads = bound(args, kwargs, "query", "key", "value", "embed_dim_to_check", "num_heads")[4]
            with AttentionInterceptor(self.on_logits, partial(last_axis, heads=heads)):
                return multihead_opened(*args, **kwargs)
        if func is SDPA:
            names = "query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"
            query, key, _, mask, _, causal, scale, groups = bound(args, kwargs, *names)
            self._report(self._sdpa_logits, query.detach(), key.detach(), mask, causal, scale, groups)
        elif func in SOFTMAX or func in LOGSUMEXP:
            self._report(self._softmax_logits, *bound(args, kwargs, "input", "dim"))
        elif isinstance(func, HigherOrderOperator) and func.name() == "flex_attention":
            self._report(flex_logits, *args, **kwargs)
            return func(*args, **kwargs) if torch.is_grad_enabled() else run_flex(*args, **kwargs)
        output = func(*args, **kwargs)
        with torch.no_grad():
            self.provenance.track(func, args, kwargs, output)
        return output

    def _softmax_logits(self, logits: Tensor, dim: int | None) -> Logits | None:
        origin = self.provenance.origin_of(logits)
        is_last = logits.ndim >= 3 and dim in (-1, logits.ndim - 1)
        if origin is None or not is_last or not logits.numel() or logits in self._reported:
            return None
        self._reported[logits] = None
        shape = logits.movedim(origin.queries, -2).shape
        axes = self.axes_of(tuple(shape[:-2]))

        def arranged(tensor: Tensor) -> Tensor:
            tensor = tensor.detach().expand_as(logits)
            if origin.first_key:  # move the columns that precede the keys to the end
                tensor = tensor.roll(-origin.first_key, -1)
            return axes.arrange(tensor.movedim(origin.queries, -2), shape)

        masked, subtracted = (arranged(t) if t.ndim else None for t in (origin.masked, origin.subtracted))
        return EagerLogits(arranged(logits), origin.keys, masked, subtracted, heads_known=axes.known)

    def _sdpa_logits(
        self, query: Tensor, key: Tensor, mask: Any, causal: bool, scale: float | None, groups: bool
    ) -> Logits | None:
        """The logits of scaled_dot_product_attention; None for nested tensors. With groups, heads are the last axis."""
        if query.is_nested or not (query.numel() and key.numel()):
            return None
        if query.ndim == 2:
            query, key = query[None], key[None]
        shared = -3 if groups else -2  # up to this axis, queries and keys have the same leading sizes
        batch = torch.broadcast_shapes(query.shape[:shared], key.shape[:shared])
        lead, lead_of_keys = ((*batch, *each.shape[shared:-2]) for each in (query, key))
        axes, axes_of_keys = [last_axis(lead), last_axis(lead_of_keys)] if groups else [self.axes_of(lead)] * 2
        key = axes_of_keys.arrange(key, (*lead_of_keys, *key.shape[-2:]))
        offset = 0 if causal else None
        bias = sys.modules.get("torch.nn.attention.bias")  # its import takes 1.5 seconds
        if bias is not None and isinstance(mask, bias.CausalBias):
            offset = key.shape[-2] - query.shape[-2] if mask.variant == bias.CausalVariant.LOWER_RIGHT else 0
            mask = None
        if mask is not None:
            mask = axes.arrange(mask.detach(), (*lead, query.shape[-2], key.shape[-2]))
        query = axes.arrange(query, (*lead, *query.shape[-2:]))
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        return QKLogits(query, key.shape[-2], key, scale, offset, mask, heads_known=axes.known)

    def _report(self, logits_of: Callable[..., Logits | None], *args: Any, **kwargs: Any) -> None:
        device = tensors_in((args, kwargs))[0].device.type
        with torch.no_grad(), torch.autocast(device, enabled=False):
            if (logits := logits_of(*args, **kwargs)) is not None:
                self.on_logits(logits)


def flex_logits(
    query: Tensor, key: Tensor, _value: Tensor, score_mod: Any, block_mask: Any, scale: float, _: Any, *buffers: Any
) -> QKLogits:
    """The logits of a call of flex attention's operator, with its signature."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
    from torch.nn.attention.flex_attention import _vmap_for_bhqkv

    score_buffers, mask_buffers = buffers or ((), ())
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


def run_flex(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The outputs of flex attention, without gradients, in chunks: torch's own code holds all logits in memory."""
    logits = flex_logits(query, key, value, *others)
    v_BGJD = value.float().expand(query.shape[0], *value.shape[1:])
    v_BHJD = v_BGJD.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    output = query.new_empty(*query.shape[:3], value.shape[3])
    lse, maxima = (torch.empty(query.shape[:3], device=query.device) for _ in range(2))
    for sequences, queries, logit_BHIJ in logits.chunks():
        share_BHIJ = logit_BHIJ.softmax(-1).nan_to_num_(nan=0.0)
        output[sequences, :, queries] = (share_BHIJ @ v_BHJD[sequences]).to(output.dtype)
        lse[sequences, :, queries] = logit_BHIJ.logsumexp(-1) / math.log(2)  # to base 2, as the operator returns it
        maxima[sequences, :, queries] = logit_BHIJ.amax(-1) / math.log(2)
    return output, lse, maxima
