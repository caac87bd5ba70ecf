"""Catch the attention of a model while it runs: for every softmax over keys, the logits that go into it.

Caught are `scaled_dot_product_attention` and flex attention, whose logits are made again from queries and keys, and a
softmax over the last dimension of something made of products, whose input they are. What belongs to whom is told by
the module that was running: the innermost one whose forward had begun.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import CausalBias, CausalVariant
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from quacklr.logits.flex import is_flex, of_flex, run_flex
from quacklr.logits.logits import EagerLogits, Logits, Order, QKLogits, arranged, headless
from quacklr.logits.provenance import Provenance
from quacklr.util.module_stack import module_stack
from quacklr.util.modules import run_uncompiled
from quacklr.util.torch_functions import LOGSUMEXP, MULTIHEAD, SDPA, SOFTMAX, bound, multihead_opened, tensors_in

if TYPE_CHECKING:
    from quacklr.logits.head_order import HeadOrders

Reading = tuple[int | None, Order | None]  # how many heads, if that is known, and where they are if that was measured
SEEN = (
    "seen are scaled_dot_product_attention, flex attention, torch.nn.MultiheadAttention, and a softmax over the last "
    "dimension of products of queries and keys. A model may have no softmax attention (Mamba, RWKV, linear attention): "
    "then there are no logits. A kernel with a name of its own, such as flash attention, is not seen: switch the model "
    "to sdpa or eager"
)


class AttentionInterceptor(TorchFunctionMode):
    """While entered, hands the logits of every attention to a listener. The forward itself is untouched.

    `read(shape, heads)` is called once for each attention and says how many heads it has and where they are. `shape`
    is that of the logits, but for the keys; `heads` is given where the function that is called says it and has them
    last. Sees nothing inside torch.compile.
    """

    def __init__(
        self,
        listener: Callable[[Logits], None],
        read: Callable[[Sequence[int], int | None], Reading] = lambda _, heads: (heads, None),
    ) -> None:
        super().__init__()
        self.listener, self.read, self.trail = listener, read, Provenance()
        self._heads: int | None = None  # of torch's own attention, while it runs
        self.told: Any = WeakTensorKeyDictionary()  # some take a softmax of the same logits in two ways

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the function as it is, and tell the listener if it was an attention."""
        kwargs = kwargs or {}
        if func is MULTIHEAD:
            return self._opened(args, kwargs)
        if func is SDPA:
            self._tell(partial(sdpa, self.reading), *args, **kwargs)
        elif func in SOFTMAX or func in LOGSUMEXP:
            self._tell(self._softmax, *bound(args, kwargs, "input", "dim"))
        elif is_flex(func):
            self._tell(of_flex, *args, **kwargs)
            return func(*args, **kwargs) if torch.is_grad_enabled() else run_flex(*args, **kwargs)
        output = func(*args, **kwargs)
        with torch.no_grad():
            self.trail.follow(func, args, kwargs, output)
        return output

    def _opened(self, args: Any, kwargs: Any) -> Any:
        """torch's own attention, which says how many heads it has."""
        self._heads = bound(args, kwargs, "query", "key", "value", "embed_dim_to_check", "num_heads")[4]
        try:
            with self:
                return multihead_opened(*args, **kwargs)
        finally:
            self._heads = None

    def reading(self, *tensors: Tensor, heads: int | None = None) -> Reading:
        """Of queries and keys, or of logits, which broadcast to the same leading axes."""
        lead = torch.broadcast_shapes(*(tensor.shape[:-2] for tensor in tensors))
        return self.read((*lead, tensors[0].shape[-2]), heads if self._heads is None else self._heads)

    def _softmax(self, logits: Tensor, dim: int | None) -> Logits | None:
        mark = self.trail.mark_of(logits)
        if mark is None or logits.ndim < 3 or dim not in (-1, logits.ndim - 1) or logits in self.told:
            return None
        self.told[logits] = None
        if not logits.numel():
            return None
        hidden, taken = mark.hidden, mark.taken
        if mark.front:  # keys first, then what else the softmax sees
            logits = logits.roll(-mark.front, -1)
            hidden = None if hidden is None else hidden.expand_as(logits).roll(-mark.front, -1)
        heads, order = self.reading(logits)
        if order is None and logits.ndim == 4 and heads and logits.shape[1] != heads == logits.shape[2]:  # (B, I, H, J)
            hidden, taken = (None if t is None else t.expand_as(logits).transpose(1, 2) for t in (hidden, taken))
            logits = logits.transpose(1, 2)
        hidden, taken = (None if t is None else headless(t, logits.shape[:-2], heads, order) for t in (hidden, taken))
        extra = logits.shape[-1] - mark.keys
        return EagerLogits(arranged(logits.detach(), heads, order), hidden, taken, extra, mark.factors)

    def _tell(self, made: Callable[..., Logits | None], *args: Any, **kwargs: Any) -> None:
        device = tensors_in([*args, *kwargs.values()])[0].device.type
        with torch.no_grad(), torch.autocast(device, enabled=False):
            logits = made(*args, **kwargs)
            if logits is not None:
                self.listener(logits)


@contextmanager
def intercepting(
    model: nn.Module,
    listener: Callable[[str, Logits], None],
    heads: Mapping[str, int] | None = None,
    orders: HeadOrders | None = None,
) -> Iterator[None]:
    """While entered, every attention of the model's forwards is told to the listener, with its module's name.

    `heads`: of modules of which it is known, how many. `orders`: measures where they are, if their shape does not
    show it, and remembers. What was compiled is run as it was written.
    """
    known = heads or {}

    def read(shape: Sequence[int], said: int | None) -> Reading:
        inside = next((known[name] for name in reversed(now.modules) if name in known), None)
        reading: Reading = (inside if said is None else said), None
        if orders is not None and said is None:
            reading = orders.read(now.forwards, shape, inside)
        for forward in now.forwards:
            forward.attentions += 1
        return reading

    with (
        module_stack(model) as now,
        run_uncompiled(),
        AttentionInterceptor(lambda caught: listener(now.modules[-1], caught), read),
    ):
        yield


def sdpa(
    reading: Callable[..., Reading],
    query: Tensor,
    key: Tensor,
    value: Tensor,  # noqa: ARG001
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,  # noqa: ARG001
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Logits | None:
    """The logits of a call of scaled_dot_product_attention, with its signature; of nested tensors they are not made.

    With `enable_gqa` the kernel itself says which axis has the heads.
    """
    if query.is_nested or not (query.numel() and key.numel()):
        return None
    if query.ndim == 2:
        query, key = query[None], key[None]
    heads, order = reading(query, heads=query.shape[-3]) if enable_gqa else reading(query, key)
    sizes = (query.shape[-2], key.shape[-2])
    lead = query.shape[:-2] if enable_gqa else torch.broadcast_shapes(query.shape[:-2], key.shape[:-2])
    query = query.expand(*lead, *query.shape[-2:])
    offset = 0 if is_causal else None
    if isinstance(attn_mask, CausalBias):
        offset = sizes[1] - sizes[0] if attn_mask.variant == CausalVariant.LOWER_RIGHT else 0
        attn_mask = None
    if attn_mask is not None:
        attn_mask = headless(attn_mask, lead, heads, order)
    k = arranged(key, None) if enable_gqa else arranged(key.expand(*lead, *key.shape[-2:]), heads, order)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    return QKLogits(arranged(query, heads, order).detach(), k.detach(), factor, offset, attn_mask)
