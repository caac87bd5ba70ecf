"""Heads and batch in one axis of the logits, in any order: monitor, clip and check give each head its own numbers.

Shapes: B batch, T tokens, D width, H heads, K head size, W windows. The judge is `logits_BHTT`, from weights alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.optim import SGD

import kimi
from models import assert_equal
from quacklr import LogitMonitor, Path, QKClip, Weight, check, mha, packed

T, D, H, K = 6, 8, 4, 2
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v, each (B, T, H, K), to (B, T, H, K)


def merged(*order: str) -> Attend:
    """Batch and heads (or two factors of the heads, g and r) merged into one axis, in this order."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        sizes = {"b": len(q), "h": H, "g": 2, "r": 2}
        places = [{"b": 0, "h": 2, "g": 2, "r": 3}[axis] for axis in order]
        split = (q, k, v) if "h" in order else (each.unflatten(2, (2, 2)) for each in (q, k, v))
        flat_q, flat_k, flat_v = (
            each.permute(*places, 1, each.ndim - 1).contiguous().view(-1, T, K) for each in split
        )
        mixed = torch.bmm((torch.bmm(flat_q, flat_k.mT) / K**0.5).softmax(2), flat_v)
        apart = mixed.view(*(sizes[axis] for axis in order), T, K)
        where = {axis: number for number, axis in enumerate(order)}
        heads = [where[axis] for axis in ("g", "r", "h") if axis in where]
        return apart.permute(where["b"], len(order), *heads, len(order) + 1).reshape(len(q), T, H, K)

    return attend


def by_einsum(logits: str) -> Attend:
    """Axes that are not merged, in any order."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (each.unflatten(2, (2, 2)) for each in (q, k, v))
        shares = (torch.einsum(f"bigrd,bjgrd->{logits}", q, k) / K**0.5).softmax(-1)
        return torch.einsum(f"{logits},bjgrd->bigrd", shares, v).flatten(2, 3)

    return attend


def heads_then_batch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(H, B, I, J)."""
    q, k, v = (each.permute(2, 0, 1, 3) for each in (q, k, v))
    return ((q @ k.mT / K**0.5).softmax(-1) @ v).permute(1, 2, 0, 3)


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Three dimensions to the kernel, heads first, with a mask for each of the merged entries that hides nothing."""
    q, k, v = (each.permute(2, 0, 1, 3).flatten(0, 1) for each in (q, k, v))
    mixed = scaled_dot_product_attention(q, k, v, torch.zeros(len(q), T, T))
    return mixed.unflatten(0, (H, -1)).permute(1, 2, 0, 3)


def time_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(T, B x H, K), as fairseq and torch's own attention have it."""
    q, k, v = (each.transpose(0, 1).reshape(T, -1, K).transpose(0, 1) for each in (q, k, v))
    mixed = (torch.bmm(q, k.mT) / K**0.5).softmax(-1) @ v
    return mixed.transpose(0, 1).reshape(T, -1, H, K).transpose(0, 1)


LAYOUTS: dict[str, Attend] = {
    "batch x heads": merged("b", "h"),
    "heads x batch": merged("h", "b"),
    "groups x batch x heads of a group": merged("g", "b", "r"),
    "groups x heads of a group x batch": merged("g", "r", "b"),
    "batch, groups, heads of a group": by_einsum("bgrij"),
    "groups, batch, heads of a group": by_einsum("gbrij"),
    "heads, batch": heads_then_batch,
    "heads x batch, in the kernel": fused,
    "time first": time_first,
}


class Attention(nn.Module):
    """Projections, and one of the layouts; nothing tells how many heads it has but the paths."""

    def __init__(self, attend: Attend, declared: bool = True) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(D, H * K) for _ in range(3))
        self.attend = attend
        if declared:
            self.logit_paths = lambda: mha(*packed(self.q, ("q", H, K)), *packed(self.k, ("k", H, K)))

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.attend(*(of(x_BTD).unflatten(2, (H, K)) for of in (self.q, self.k, self.v))).flatten(2)


class Model(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.inside, self.attention = nn.Linear(D, D), attention

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.attention(self.inside(x_BTD))


def built(attend: Attend, declared: bool = True) -> Model:
    """Each head's logits are of another size than every other's."""
    torch.manual_seed(0)
    model = Model(Attention(attend, declared))
    with torch.no_grad():
        model.attention.q.weight.mul_(torch.tensor([1.0, 3.0, 9.0, 27.0]).repeat_interleave(K)[:, None])
    return model


def inputs(batch: int) -> Tensor:
    return torch.randn(batch, T, D, generator=torch.Generator().manual_seed(1))


def logits_BHTT(model: Any, x_BTD: Tensor) -> Tensor:
    with torch.no_grad():
        x_BTD = model.inside(x_BTD)
        q, k = (x_BTD @ of.weight.T + of.bias for of in (model.attention.q, model.attention.k))
        heads = [(q[..., h * K : h * K + K], k[..., h * K : h * K + K]) for h in range(H)]
        return torch.stack([one @ other.mT for one, other in heads], dim=1) / K**0.5


@pytest.mark.parametrize("batch", [1, 3, H])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_head_has_its_own_statistics(layout: str, batch: int) -> None:
    model, x_BTD = built(LAYOUTS[layout]), inputs(batch)
    stats = LogitMonitor(model, x_BTD).measure()["attention"]
    logit = logits_BHTT(model, x_BTD)
    torch.testing.assert_close(stats.max, logit.amax((0, 2, 3)))
    entropy = torch.special.entr(logit.softmax(-1)).sum(-1).mean((0, 2))
    torch.testing.assert_close(stats.entropy, entropy)
