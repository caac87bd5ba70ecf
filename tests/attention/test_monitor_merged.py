"""Leading axes of the logits in any order: the monitor gives each head its own numbers, QK clip refuses merged ones.

The judge is `logits_by_hand`, (B, H, T, T), from weights alone.

Shapes: B batch, T tokens, D width, H heads, K head size, W windows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.optim import SGD

from quacklr import LogitMonitor, LogitPath, QKClip, mha, packed

T, D, H, K = 6, 8, 4, 2
Attend = Callable[[Tensor, Tensor], Tensor]  # q and k, each (B, T, H, K), to shares in any order


def merged(order: str) -> Attend:
    """Batch and heads (h, or its factors g and r) in one axis, in this order."""

    def attend(q: Tensor, k: Tensor) -> Tensor:
        q, k = (torch.einsum(f"bigrd->{order.replace('h', 'gr')}id", each.unflatten(2, (2, 2))) for each in (q, k))
        return (torch.bmm(q.reshape(-1, T, K), k.reshape(-1, T, K).mT) / K**0.5).softmax(2)

    return attend


def separate(logits: str) -> Attend:
    """Axes that are not merged, in any order."""

    def attend(q: Tensor, k: Tensor) -> Tensor:
        heads = "gr" if "g" in logits else "h"
        q, k = (each.unflatten(2, (2, 2)) if heads == "gr" else each for each in (q, k))
        return (torch.einsum(f"bi{heads}d,bj{heads}d->{logits}", q, k) / K**0.5).softmax(-1)

    return attend


def fused(q: Tensor, k: Tensor) -> Tensor:
    """Three dimensions to the kernel, heads first, with a mask for each of the merged entries that hides nothing."""
    q, k = (each.permute(2, 0, 1, 3).flatten(0, 1) for each in (q, k))
    return scaled_dot_product_attention(q, k, k, torch.zeros(*q.shape[:2], q.shape[1]))


MERGED: dict[str, Attend] = {
    "batch x heads": merged("bh"),
    "heads x batch": merged("hb"),
    "groups x batch x heads of a group": merged("gbr"),
    "heads x batch, in the kernel": fused,
}
SEPARATE: dict[str, Attend] = {
    "batch, groups, heads of a group": separate("bgrij"),
    "groups, batch, heads of a group": separate("gbrij"),
    "heads, batch": separate("hbij"),
    "batch, queries, heads": separate("bihj"),
}
LAYOUTS = MERGED | SEPARATE


class Undeclared(nn.Module):
    """Projections, and one of the layouts; nothing says how many heads it has."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.q, self.k = (nn.Linear(D, H * K) for _ in range(2))
        self.attend = attend

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.attend(*(of(x_BTD).unflatten(2, (H, K)) for of in (self.q, self.k)))


class Attention(Undeclared):
    """The same with paths, which say it."""

    def logit_paths(self) -> list[LogitPath]:
        return mha(*packed(self.q, ("q", H, K)), *packed(self.k, ("k", H, K)))


def built(attend: Attend, kind: type[Undeclared] = Attention) -> Any:
    """Each head's logits are of another size than every other's."""
    torch.manual_seed(0)
    model: Any = nn.ModuleDict({"attention": kind(attend)})
    model.forward = lambda *given: model["attention"](*given)
    with torch.no_grad():
        model["attention"].q.weight.mul_(torch.tensor([1.0, 3.0, 9.0, 27.0]).repeat_interleave(K)[:, None])
    return model


def inputs(batch: int) -> Tensor:
    return torch.randn(batch, T, D, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits_by_hand(model: Any, x_BTD: Tensor) -> Tensor:
    q, k = (x_BTD @ of.weight.T + of.bias for of in (model["attention"].q, model["attention"].k))
    heads = [(q[..., h * K : h * K + K], k[..., h * K : h * K + K]) for h in range(H)]
    return torch.stack([one @ other.mT for one, other in heads], dim=1) / K**0.5


def largest(model: Any, x_BTD: Tensor) -> Tensor:
    return logits_by_hand(model, x_BTD).amax((0, 2, 3))


@pytest.mark.parametrize("batch", [3, H])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_head_has_its_own_statistics(layout: str, batch: int) -> None:
    model, x_BTD = built(LAYOUTS[layout]), inputs(batch)
    monitor = LogitMonitor(model, x_BTD)
    before, stats = logits_by_hand(model, x_BTD), monitor.measure()["attention"]
    torch.testing.assert_close(stats.max, before.amax((0, 2, 3)))
    torch.testing.assert_close(stats.entropy, torch.special.entr(before.softmax(-1)).sum(-1).mean((0, 2)))
    with torch.no_grad():
        model["attention"].k.weight.mul_(torch.tensor([1.1, 1.2, 0.9, 1.0]).repeat_interleave(K)[:, None])
    resumed = LogitMonitor(model, x_BTD)
    resumed.load_state_dict(monitor.state_dict())
    change = (logits_by_hand(model, x_BTD) - before).abs().mean((0, 2, 3))
    torch.testing.assert_close(monitor.measure(keep=False)["attention"].mean_change, change)
    torch.testing.assert_close(resumed.measure()["attention"].mean_change, change)


@pytest.mark.parametrize("layout", [*MERGED, "heads, batch"])
def test_without_paths_the_heads_are_counted_too(layout: str) -> None:
    model, x_BTD = built(LAYOUTS[layout], Undeclared), inputs(3)
    if layout.startswith("groups"):
        model["attention"].num_heads = H
    torch.testing.assert_close(LogitMonitor(model, x_BTD).measure()["attention"].max, largest(model, x_BTD))


@pytest.mark.parametrize("layout", [*MERGED, "batch, heads", "batch, queries, heads"])
def test_the_clip_takes_axes_that_are_separate_and_refuses_merged_ones_of_several_sequences(layout: str) -> None:
    model = built((LAYOUTS | {"batch, heads": separate("bhij")})[layout])
    with QKClip(model, SGD(model.parameters(), lr=0.1)) as clip:
        for batch in (3, H):
            if layout in MERGED:
                with pytest.raises(ValueError, match="attention: its logits have heads and batch in one axis.*; give"):
                    model(inputs(batch))
                assert clip.max_logits() == {}
            else:
                model(inputs(batch))
        x_BTD = inputs(1 if layout in MERGED else H)
        model(x_BTD)
        torch.testing.assert_close(clip.max_logits()["attention"], largest(model, x_BTD))


class Windows(Attention):
    """Sequences are cut into windows of two tokens inside; axes of the logits that are one word are merged."""

    order = ""

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k = (of(x_BTD).unflatten(2, (H, K)).unflatten(1, (-1, 2)) for of in (self.q, self.k))
        logits = torch.einsum(f"bwihd,bwjhd->{self.order.replace(' ', '')}ij", q, k) / K**0.5
        for at, word in enumerate(self.order.split()):
            logits = logits.flatten(at, at + len(word) - 1)
        return logits.softmax(-1)


def windowed(order: str) -> Any:
    model = built(fused, Windows)
    model["attention"].order = order
    return model


@pytest.mark.parametrize("order", ["bw h", "bh w", "hb w", "b w h", "h b w", "w h b"])
def test_windows_are_sequences_of_their_own(order: str) -> None:
    for batch in (1, 2, H):
        model, x_BTD = windowed(order), inputs(batch)
        logit = logits_by_hand(model, x_BTD).unflatten(2, (-1, 2)).unflatten(4, (-1, 2))
        logit_BHWII = logit.diagonal(dim1=2, dim2=4).movedim(-1, 2)
        stats = LogitMonitor(model, x_BTD).measure()["attention"]
        torch.testing.assert_close(stats.max, logit_BHWII.amax((0, 2, 3, 4)))
        torch.testing.assert_close(stats.entropy, torch.special.entr(logit_BHWII.softmax(-1)).sum(-1).mean((0, 2, 3)))


@pytest.mark.parametrize("order", ["bwh", "hbw", "whb"])
def test_windows_merged_with_heads_are_refused(order: str) -> None:
    with pytest.raises(ValueError, match="attention: it cannot be seen which of its logits belong to which head"):
        LogitMonitor(windowed(order), inputs(2)).measure()


class Interacting(Attention):
    """Every example is centred by the mean of the batch: all of them make the logits of each."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        return super().forward(x_BTD - x_BTD.mean(0))


class TokensFirst(Attention):
    """Its input is (T, B, D)."""

    def forward(self, x_TBD: Tensor) -> Tensor:
        return super().forward(x_TBD.transpose(0, 1))


class Biased(Attention):
    """Its second input is a bias for all sequences, which has as many rows as there are sequences."""

    def forward(self, x_BTD: Tensor, bias_TT: Any = 0.0) -> Tensor:
        q, k = (of(x_BTD).unflatten(2, (H, K)).permute(2, 0, 1, 3).flatten(0, 1) for of in (self.q, self.k))
        return (torch.bmm(q, k.mT) + bias_TT).softmax(-1)


@pytest.mark.parametrize("kind", [Interacting, TokensFirst, Biased])
def test_a_probe_that_cannot_be_cut_into_its_sequences_is_an_error_and_no_guess(kind: type[Attention]) -> None:
    model = built(fused, kind)
    x, biased = inputs(3), (inputs(T), torch.arange(T * T).view(T, T) / T)
    probe = {Interacting: x, TokensFirst: x.transpose(0, 1).contiguous(), Biased: biased}[kind]
    monitor = LogitMonitor(model, probe)
    for _ in range(2):
        with pytest.raises(ValueError, match="attention: it cannot be seen .* give a probe of one sequence"):
            monitor.measure()
