"""Catch the attention of a model while it runs: for every softmax over keys, the logits that go into it.

Two ways of attending are caught: `scaled_dot_product_attention`, whose logits are made again from its queries and keys,
and a softmax over the last dimension of a (batch, heads, queries, keys) tensor, whose input they are. What belongs to
whom is told by the module that was running: the innermost one whose forward had begun.

Shapes: B batch, H head, I query, J key, D size of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from quacklr.modules import named_modules

SDPA: Any = F.scaled_dot_product_attention
SOFTMAX: tuple[Any, ...] = (F.softmax, torch.softmax, Tensor.softmax)
MULTIHEAD: Any = F.multi_head_attention_forward
CHUNK = 2**24  # logits made at a time: 64 MB

# torch's own code of it but for its first check: a function mode is told of it as a whole, and then sees nothing inside
multihead_opened: Any = FunctionType(
    MULTIHEAD.__code__,
    {**MULTIHEAD.__globals__, "has_torch_function": lambda _: False},
    MULTIHEAD.__name__,
    MULTIHEAD.__defaults__,
)
multihead_opened.__kwdefaults__ = MULTIHEAD.__kwdefaults__


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
        if func is MULTIHEAD:
            with self:
                return multihead_opened(*args, **kwargs)
        caught = sdpa(*args, **kwargs) if func is SDPA else softmax(*args, **kwargs) if func in SOFTMAX else None
        if caught is not None:
            with torch.no_grad(), torch.autocast(caught.q_BHID.device.type, enabled=False):
                self.listener(caught)
        return func(*args, **kwargs)


@dataclass(slots=True)
class Running:
    """The modules whose forward has begun and not ended, outermost first, and a number for each such call."""

    modules: tuple[str, ...] = ("",)
    calls: tuple[int, ...] = (0,)
    _count: Iterator[int] = field(default_factory=lambda: count(1))

    def begin(self, name: str) -> None:
        """A module's forward begins."""
        self.modules, self.calls = (*self.modules, name), (*self.calls, next(self._count))

    def end(self) -> None:
        """The innermost one's forward ends."""
        self.modules, self.calls = self.modules[:-1], self.calls[:-1]


@contextmanager
def running(model: nn.Module) -> Iterator[Running]:
    """While entered, tells which of the model's modules are running."""
    now = Running()
    hooks: list[Any] = []
    for name, module in named_modules(model):
        hooks.append(module.register_forward_pre_hook(lambda *_, name=name: now.begin(name)))
        hooks.append(module.register_forward_hook(lambda *_: now.end(), always_call=True))
    try:
        yield now
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def intercept(model: nn.Module, listener: Callable[[str, Logits], None]) -> Iterator[None]:
    """While entered, every attention of the model's forwards is told to the listener, with its module's name."""
    with running(model) as now, Catch(lambda logits: listener(now.modules[-1], logits)):
        yield


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
