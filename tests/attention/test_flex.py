"""Flex attention: its logits equal those computed by hand.

interceptor.py needs more than torch documents: the operator's name, the order of its arguments, and its three outputs.
If a test here fails after an update of torch, interceptor.py must follow. Tried with torch 2.13.0.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex

import quacklr.attention.logits
from quacklr import LogitMonitor, LogitPath, QKClip, mha, packed

BIAS = torch.randn(4, generator=torch.Generator().manual_seed(3))
attend: Any = flex.flex_attention  # by the name that the model's code calls
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def capped_and_biased(score: Tensor, _batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return 2.0 * torch.tanh(score / 2.0) + BIAS[head] * (i - j)


def window(_batch: Tensor, _head: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i >= j) & (i - j < 5)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)

    def parts(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q = self.q(x_BTD).unflatten(-1, (4, 4)).transpose(1, 2)
        k, v = self.kv(x_BTD).unflatten(-1, (2, 2, 4)).transpose(1, 3).unbind(2)
        return q, k, v

    def forward(self, x_BTD: Tensor) -> Tensor:
        mask = flex.create_block_mask(window, None, None, x_BTD.shape[1], x_BTD.shape[1], device="cpu")
        output: Tensor = attend(*self.parts(x_BTD), score_mod=capped_and_biased, block_mask=mask, enable_gqa=True)
        return output

    def logit_paths(self) -> list[LogitPath]:
        return mha(*packed(self.q, ("q", 4, 4)), *packed(self.kv, ("k", 2, 4), (None, 2, 4)))


def inputs() -> Tensor:
    return torch.randn(2, 12, 16, generator=torch.Generator().manual_seed(1)) * 3


def by_hand(attention: Attention, x_BTD: Tensor) -> Tensor:
    """(B, H, I, J), one number at a time."""
    q, k, _ = attention.parts(x_BTD)
    logits = torch.full((2, 4, 12, 12), -torch.inf)
    for b, h, i in torch.cartesian_prod(torch.arange(2), torch.arange(4), torch.arange(12)).tolist():
        for j in range(max(0, i - 4), i + 1):
            score = float(q[b, h, i] @ k[b, h // 2, j]) / 2
            logits[b, h, i, j] = 2 * torch.tanh(torch.tensor(score / 2)) + BIAS[h] * (i - j)
    return logits


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, from its compiler
@pytest.mark.parametrize("compiled", [False, True], ids=["as it is", "compiled"])
@torch.no_grad()
def test_its_logits_are_those_made_by_hand_in_chunks(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    attention, x = Attention(), inputs()
    monkeypatch.setattr(quacklr.attention.logits, "CHUNK", 4 * 12 * 5)
    if compiled:
        monkeypatch.setattr(sys.modules[__name__], "attend", torch.compile(flex.flex_attention))
    stats = LogitMonitor(attention, x).measure()[""]
    share = by_hand(attention, x).softmax(-1)
    torch.testing.assert_close(stats.max, by_hand(attention, x).amax((0, 2, 3)))
    torch.testing.assert_close(stats.entropy, torch.special.entr(share).sum(-1).mean((0, 2)))
    torch.testing.assert_close(stats.sink, share[:, :, 1:, 0].mean((0, 2)))


class Detached(Attention):
    """On the CPU, torch has no flex attention of tensors that require gradients."""

    def parts(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().parts(x_BTD)
        return q.detach(), k.detach(), v.detach()


def test_its_logits_are_recorded_in_training() -> None:
    torch.manual_seed(0)
    attention, x = Detached(), inputs()
    clip = QKClip(attention, torch.optim.SGD(attention.parameters(), lr=0.1))
    attention(x)
    torch.testing.assert_close(clip.max_logits()[""], by_hand(attention, x).amax((0, 2, 3)))
