"""Intercept the attention of a model while it runs: for every softmax over keys, the logits that go into it.

Three forms are intercepted: `scaled_dot_product_attention` and flex attention, whose logits are computed again from
queries and keys, and a softmax over the last dimension of a tensor that was computed from q . k.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from quacklr.attention.flex import flex_logits, is_flex, run_flex
from quacklr.attention.logits import EagerLogits, HeadAxes, Logits, QKLogits, last_axis
from quacklr.attention.provenance import ProvenanceTracker
from quacklr.util.torch_functions import (
    LOGSUMEXP,
    MULTIHEAD,
    SDPA,
    SOFTMAX,
    AttentionCall,
    bound,
    multihead_opened,
    tensors_in,
)

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
            self._report(self._sdpa_logits, AttentionCall(*args, **kwargs))
        elif func in SOFTMAX or func in LOGSUMEXP:
            self._report(self._softmax_logits, *bound(args, kwargs, "input", "dim"))
        elif is_flex(func):
            self._report(flex_logits, *args, **kwargs)
            return func(*args, **kwargs) if torch.is_grad_enabled() else run_flex(*args, **kwargs)
        output = func(*args, **kwargs)
        with torch.no_grad():
            self.provenance.track(func, args, kwargs, output)
        return output

    def _softmax_logits(self, logits: Tensor, dim: int | None) -> Logits | None:
        origin = self.provenance.origin_of(logits)
        if origin is None or logits.ndim < 3 or dim not in (-1, logits.ndim - 1) or logits in self._reported:
            return None
        self._reported[logits] = None
        if not logits.numel():
            return None
        shape = logits.movedim(origin.queries, -2).shape
        axes = self.axes_of(tuple(shape[:-2]))

        def arranged(tensor: Tensor) -> Tensor:
            tensor = tensor.detach().expand_as(logits)
            if origin.first_key:  # move the columns that precede the keys to the end
                tensor = tensor.roll(-origin.first_key, -1)
            return axes.arrange(tensor.movedim(origin.queries, -2), shape)

        masked, subtracted = (arranged(t) if t.ndim else None for t in (origin.masked, origin.subtracted))
        return EagerLogits(arranged(logits), origin.keys, masked, subtracted, heads_known=axes.known)

    def _sdpa_logits(self, call: AttentionCall) -> Logits | None:
        """The logits of scaled_dot_product_attention; None for nested tensors. With groups, heads are the last axis."""
        query, key, mask, offset = call.query.detach(), call.key.detach(), call.attn_mask, 0 if call.is_causal else None
        if query.is_nested or not (query.numel() and key.numel()):
            return None
        if query.ndim == 2:
            query, key = query[None], key[None]
        if call.enable_gqa:
            batch = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3])
            lead, key = (*batch, query.shape[-3]), key.expand(*batch, *key.shape[-3:]).reshape(-1, *key.shape[-3:])
            axes = last_axis(lead)
        else:
            lead = tuple(torch.broadcast_shapes(query.shape[:-2], key.shape[:-2]))
            axes = self.axes_of(lead)
            key = axes.arrange(key, (*lead, *key.shape[-2:]))
        bias = sys.modules.get("torch.nn.attention.bias")  # its import takes 1.5 seconds
        if bias is not None and isinstance(mask, bias.CausalBias):
            offset = key.shape[-2] - query.shape[-2] if mask.variant == bias.CausalVariant.LOWER_RIGHT else 0
            mask = None
        if mask is not None:
            mask = axes.arrange(mask.detach(), (*lead, query.shape[-2], key.shape[-2]))
        query = axes.arrange(query, (*lead, *query.shape[-2:]))
        scale = query.shape[-1] ** -0.5 if call.scale is None else call.scale
        return QKLogits(query, key.shape[-2], key, scale, offset, mask, heads_known=axes.known)

    def _report(self, logits_of: Callable[..., Logits | None], *args: Any, **kwargs: Any) -> None:
        device = tensors_in((args, kwargs))[0].device.type
        with torch.no_grad(), torch.autocast(device, enabled=False):
            logits = logits_of(*args, **kwargs)
            if logits is not None:
                self.on_logits(logits)
