"""Intercept the attention of a model while it runs: for every softmax over keys, the logits that go into it.

Three forms are intercepted: `scaled_dot_product_attention` and flex attention, whose logits are computed again from
queries and keys, and a softmax over the last dimension of a tensor that was computed from q . k.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from quacklr.attention.axes import HeadOrder
from quacklr.attention.flex import flex_logits, is_flex, run_flex
from quacklr.attention.logits import EagerLogits, Logits, QKLogits
from quacklr.attention.provenance import ProvenanceTracker
from quacklr.util.torch_functions import LOGSUMEXP, MULTIHEAD, SDPA, SOFTMAX, bound, multihead_opened, tensors_in

SUPPORTED = (
    "these are seen: scaled_dot_product_attention, flex attention, torch.nn.MultiheadAttention, and a softmax over the "
    "last dimension of products of queries and keys. If the model has no softmax attention (Mamba, RWKV, linear "
    "attention), there are no logits. Other kernels, such as flash attention, are not seen: switch the model to sdpa "
    "or eager"
)
OrderOf = Callable[[Sequence[Tensor], int | None], HeadOrder]


class AttentionInterceptor(TorchFunctionMode):
    """While entered, calls `on_logits` with the logits of every attention. The forward pass does not change.

    `order_of(tensors, heads)` is called once for each attention and returns the order of its heads. `tensors` are its
    queries and keys, or its logits; `heads` is given if the called function has a number of heads as an argument: then
    the heads are the last leading axis. Functions inside of torch.compile are not intercepted.
    """

    def __init__(self, on_logits: Callable[[Logits], None], order_of: OrderOf) -> None:
        super().__init__()
        self.on_logits, self.order_of, self.provenance = on_logits, order_of, ProvenanceTracker()
        self._heads: int | None = None  # of torch.nn.MultiheadAttention, while it runs
        self._reported: Any = WeakTensorKeyDictionary()  # a model may compute a softmax of the same logits twice

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch, and report its logits if it is an attention."""
        kwargs = kwargs or {}
        if func is MULTIHEAD:
            return self._multihead(args, kwargs)
        if func is SDPA:
            self._report(partial(sdpa_logits, self._order), *args, **kwargs)
        elif func in SOFTMAX or func in LOGSUMEXP:
            self._report(self._softmax_logits, *bound(args, kwargs, "input", "dim"))
        elif is_flex(func):
            self._report(flex_logits, *args, **kwargs)
            return func(*args, **kwargs) if torch.is_grad_enabled() else run_flex(*args, **kwargs)
        output = func(*args, **kwargs)
        with torch.no_grad():
            self.provenance.track(func, args, kwargs, output)
        return output

    def _multihead(self, args: Any, kwargs: Any) -> Any:
        self._heads = bound(args, kwargs, "query", "key", "value", "embed_dim_to_check", "num_heads")[4]
        try:
            with self:
                return multihead_opened(*args, **kwargs)
        finally:
            self._heads = None

    def _order(self, *tensors: Tensor, heads: int | None = None) -> HeadOrder:
        return self.order_of(tensors, heads if self._heads is None else self._heads)

    def _softmax_logits(self, logits: Tensor, dim: int | None) -> Logits | None:
        origin = self.provenance.origin_of(logits)
        if origin is None or logits.ndim < 3 or dim not in (-1, logits.ndim - 1) or logits in self._reported:
            return None
        self._reported[logits] = None
        if not logits.numel():
            return None
        masked, subtracted = origin.masked, origin.subtracted
        if origin.first_key:  # move the columns that precede the keys to the end
            masked = None if masked is None else masked.expand_as(logits).roll(-origin.first_key, -1)
            logits = logits.roll(-origin.first_key, -1)
        order = self._order(logits)
        if order.is_convention and logits.ndim == 4 and logits.shape[1] != order.heads == logits.shape[2]:
            # (B, I, H, J)
            masked, subtracted = (
                None if t is None else t.expand_as(logits).transpose(1, 2) for t in (masked, subtracted)
            )
            logits = logits.transpose(1, 2)
        masked, subtracted = (
            None if t is None else order.arrange_mask(t, logits.shape[:-2]) for t in (masked, subtracted)
        )
        extra = logits.shape[-1] - origin.keys
        return EagerLogits(order.arrange(logits.detach()), masked, subtracted, origin.factors, extra=extra)

    def _report(self, logits_of: Callable[..., Logits | None], *args: Any, **kwargs: Any) -> None:
        device = tensors_in((args, kwargs))[0].device.type
        with torch.no_grad(), torch.autocast(device, enabled=False):
            logits = logits_of(*args, **kwargs)
            if logits is not None:
                self.on_logits(logits)


def leading_shape(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """The leading axes of logits, given the logits or the queries and keys: all but the last two, broadcast."""
    return tuple(torch.broadcast_shapes(*(tensor.shape[:-2] for tensor in tensors)))


def sdpa_logits(
    order_of: Callable[..., HeadOrder],
    query: Tensor,
    key: Tensor,
    value: Tensor,  # noqa: ARG001
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,  # noqa: ARG001
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Logits | None:
    """The logits of a call of scaled_dot_product_attention, with its signature; None for nested tensors.

    With `enable_gqa` the heads are the last leading axis, as the kernel defines it.
    """
    if query.is_nested or not (query.numel() and key.numel()):
        return None
    if query.ndim == 2:
        query, key = query[None], key[None]
    order = order_of(query, heads=query.shape[-3]) if enable_gqa else order_of(query, key)
    lead = query.shape[:-2] if enable_gqa else leading_shape((query, key))
    offset = 0 if is_causal else None
    bias = sys.modules.get("torch.nn.attention.bias")  # its import takes 1.5 seconds
    if bias is not None and isinstance(attn_mask, bias.CausalBias):
        offset = key.shape[-2] - query.shape[-2] if attn_mask.variant == bias.CausalVariant.LOWER_RIGHT else 0
        attn_mask = None
    mask = None if attn_mask is None else order.arrange_mask(attn_mask, lead)
    q = order.arrange(query.expand(*lead, *query.shape[-2:]))
    k = HeadOrder().arrange(key) if enable_gqa else order.arrange(key.expand(*lead, *key.shape[-2:]))
    return QKLogits(q.detach(), k.detach(), query.shape[-1] ** -0.5 if scale is None else scale, offset, mask)
