"""Catch the attention of a model while it runs: for every softmax over keys, the logits that go into it.

Two ways of attending are caught: `scaled_dot_product_attention`, whose logits are made again from its queries and keys,
and a softmax over the last dimension of a (batch, heads, queries, keys) tensor, whose input they are. What belongs to
whom is told by the module that was running: the innermost one whose forward had begun.

Shapes: B batch, H head, I query, J key, D size of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from quacklr.find import named_modules

SDPA: Any = F.scaled_dot_product_attention
SOFTMAX: tuple[Any, ...] = (F.softmax, torch.softmax, Tensor.softmax)
CHUNK = 2**24  # logits made at a time: 64 MB


@dataclass(frozen=True, slots=True, eq=False)
class Logits:
    """The logits of one attention, made in chunks of queries, so that a long context never has them all at once."""

    q_BHID: Tensor
    k_BHJD: Tensor | None  # None: q_BHID holds the logits themselves
    scale: float
    causal: bool
    mask: Tensor | None

    @property
    def heads(self) -> int:
        """How many heads attend."""
        return self.q_BHID.shape[1]

    @property
    def queries(self) -> int:
        """How many positions ask."""
        return self.q_BHID.shape[2]

    @property
    def keys(self) -> int:
        """How many positions are asked."""
        return self.q_BHID.shape[3] if self.k_BHJD is None else self.k_BHJD.shape[2]

    def rows(self, picked: slice | Tensor) -> Tensor:
        """(B, H, picked queries, J) in float32; -inf where a query may not look."""
        q_BHID = self.q_BHID[:, :, picked].float()
        if self.k_BHJD is None:  # eager attention masks with the least number of a dtype rather than with -inf
            return q_BHID.masked_fill(q_BHID <= torch.finfo(self.q_BHID.dtype).min / 2, -torch.inf)
        logit_BHIJ = (q_BHID * self.scale) @ self.k_BHJD.float().mT
        if self.mask is not None:
            mask = self.mask if self.mask.shape[-2] == 1 else self.mask[..., picked, :]
            if mask.dtype == torch.bool:
                return logit_BHIJ.masked_fill_(~mask, -torch.inf)
            logit_BHIJ += mask
            return logit_BHIJ.masked_fill_(mask <= torch.finfo(mask.dtype).min / 2, -torch.inf)
        if self.causal:
            place = torch.arange(self.queries, device=logit_BHIJ.device)[picked]
            future_IJ = torch.arange(self.keys, device=logit_BHIJ.device) > place[:, None]
            return logit_BHIJ.masked_fill_(future_IJ, -torch.inf)
        return logit_BHIJ

    def chunks(self) -> Iterator[Tensor]:
        """All rows in order, as many at a time as CHUNK allows."""
        step = max(1, CHUNK // (self.q_BHID.shape[0] * self.heads * self.keys))
        for start in range(0, self.queries, step):
            yield self.rows(slice(start, start + step))


class Catch(TorchFunctionMode):
    """While entered, hands the logits of every attention to a listener. The forward itself is untouched.

    Sees nothing inside torch.compile: there, run the module that was compiled, uncompiled.
    """

    def __init__(self, listener: Callable[[Logits], None]) -> None:
        super().__init__()
        self.listener = listener

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the function as it is, and tell the listener if it was an attention."""
        kwargs = kwargs or {}
        caught = sdpa(*args, **kwargs) if func is SDPA else softmax(*args, **kwargs) if func in SOFTMAX else None
        if caught is not None:
            with torch.no_grad(), torch.autocast(caught.q_BHID.device.type, enabled=False):
                self.listener(caught)
        return func(*args, **kwargs)


@contextmanager
def intercept(model: nn.Module, listener: Callable[[str, Logits], None]) -> Iterator[None]:
    """While entered, every attention of the model's forwards is told to the listener, with its module's name."""
    running = [""]
    hooks: list[Any] = []
    for name, module in named_modules(model):
        hooks.append(module.register_forward_pre_hook(lambda *_, name=name: running.append(name)))
        hooks.append(module.register_forward_hook(lambda *_: running.pop() and None, always_call=True))
    try:
        with Catch(lambda logits: listener(running[-1], logits)):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,  # noqa: ARG001
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,  # noqa: ARG001
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Logits | None:
    """The logits of a call of scaled_dot_product_attention, with its signature."""
    if query.ndim != 4:
        return None
    key = key.detach()
    if enable_gqa:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    return Logits(query.detach(), key, scale or query.shape[-1] ** -0.5, is_causal, attn_mask)


def softmax(input: Tensor, dim: int | None = None, *_: Any, **__: Any) -> Logits | None:  # noqa: A002
    """The logits of a softmax, if it is over the last of four dimensions."""
    if input.ndim != 4 or dim not in (-1, 3):
        return None
    return Logits(input.detach(), None, 1.0, causal=False, mask=None)
