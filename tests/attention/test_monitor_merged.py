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

from models import assert_equal
from quacklr import LogitMonitor, LogitPath, QKClip, mha, packed

T, D, H, K = 6, 8, 4, 2
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v, each (B, T, H, K), to (B, T, H, K)


def merged(order: str) -> Attend:
    """Batch and heads (h, or its factors g and r) in one axis, in this order."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (each.unflatten(2, (2, 2)) for each in (q, k, v))
        q, k, v = (torch.einsum(f"bigrd->{order.replace('h', 'gr')}id", each) for each in (q, k, v))
        shape = q.shape
        q, k, v = (each.reshape(-1, T, K) for each in (q, k, v))
        mixed = torch.bmm((torch.bmm(q, k.mT) / K**0.5).softmax(2), v).view(shape)
        return torch.einsum(f"{order.replace('h', 'gr')}id->bigrd", mixed).flatten(2, 3)

    return attend


def by_einsum(logits: str) -> Attend:
    """Axes that are not merged, in any order."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        split = "gr" if "g" in logits else "h"
        q, k, v = (each.unflatten(2, (2, 2)) if split == "gr" else each for each in (q, k, v))
        shares = (torch.einsum(f"bi{split}d,bj{split}d->{logits}", q, k) / K**0.5).softmax(-1)
        return torch.einsum(f"{logits},bj{split}d->bi{split}d", shares, v).reshape(len(q), T, H, K)

    return attend


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Three dimensions to the kernel, heads first, with a mask for each of the merged entries that hides nothing."""
    q, k, v = (each.permute(2, 0, 1, 3).flatten(0, 1) for each in (q, k, v))
    mixed = scaled_dot_product_attention(q, k, v, torch.zeros(*q.shape[:2], q.shape[1]))
    return mixed.unflatten(0, (H, -1)).permute(1, 2, 0, 3)


MERGED: dict[str, Attend] = {
    "batch x heads": merged("bh"),
    "heads x batch": merged("hb"),
    "groups x batch x heads of a group": merged("gbr"),
    "heads x batch, in the kernel": fused,
}
SEPARATE: dict[str, Attend] = {
    "batch, groups, heads of a group": by_einsum("bgrij"),
    "groups, batch, heads of a group": by_einsum("gbrij"),
    "heads, batch": by_einsum("hbij"),
    "batch, queries, heads": by_einsum("bihj"),
}
LAYOUTS = MERGED | SEPARATE


class Undeclared(nn.Module):
    """Projections, and one of the layouts; nothing says how many heads it has."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(D, H * K) for _ in range(3))
        self.attend = attend

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.attend(*(of(x_BTD).unflatten(2, (H, K)) for of in (self.q, self.k, self.v))).flatten(2)


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


@pytest.mark.parametrize("batch", [1, 3, H])
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
    stats = LogitMonitor(model, x_BTD).measure()["attention"]
    torch.testing.assert_close(stats.max, logits_by_hand(model, x_BTD).amax((0, 2, 3)))


def test_as_many_queries_as_heads_are_told_apart() -> None:
    model, x_BTD = built(by_einsum("bihj")), inputs(3)[:, :H]
    model["attention"].attend = lambda q, k, v: torch.einsum(
        "bihj,bjhd->bihd", (torch.einsum("bihd,bjhd->bihj", q, k) / K**0.5).softmax(-1), v
    )
    stats = LogitMonitor(model, x_BTD).measure()["attention"]
    torch.testing.assert_close(stats.max, logits_by_hand(model, x_BTD).amax((0, 2, 3)))


def test_attention_without_heads_is_one_head_however_large_the_batch_is() -> None:
    class Single(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(D, K), nn.Linear(D, K)

        def forward(self, x_BTD: Tensor) -> Tensor:
            return (self.q(x_BTD) @ self.k(x_BTD).mT).softmax(-1) @ x_BTD

    torch.manual_seed(0)
    model, x_BTD = Single(), inputs(3)
    stats = LogitMonitor(model, x_BTD).measure()[""]
    torch.testing.assert_close(stats.max, (model.q(x_BTD) @ model.k(x_BTD).mT).max()[None].detach())


@pytest.mark.parametrize("layout", MERGED)
def test_the_clip_refuses_merged_axes_by_name_unless_there_is_one_sequence(layout: str) -> None:
    model = built(LAYOUTS[layout])
    with QKClip(model, SGD(model.parameters(), lr=0.1)) as clip:
        for batch in (3, H):
            with pytest.raises(ValueError, match="attention: its logits have heads and batch in one axis.*; give the"):
                model(inputs(batch))
        assert clip.max_logits() == {}
        model(inputs(1))
        torch.testing.assert_close(clip.max_logits()["attention"], logits_by_hand(model, inputs(1)).amax((0, 2, 3)))


@pytest.mark.parametrize("batch", [3, H])
@pytest.mark.parametrize("layout", ["bhij", "bihj"])
def test_the_clip_takes_axes_that_are_separate(layout: str, batch: int) -> None:
    model = built(by_einsum(layout))
    clip = QKClip(model, SGD(model.parameters(), lr=0.1))
    model(inputs(batch))
    torch.testing.assert_close(clip.max_logits()["attention"], logits_by_hand(model, inputs(batch)).amax((0, 2, 3)))


class Windows(Attention):
    """Sequences are cut into windows of two tokens inside; axes of the logits that are one word are merged."""

    order = ""

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = (of(x_BTD).unflatten(2, (H, K)).unflatten(1, (-1, 2)) for of in (self.q, self.k, self.v))
        axes = self.order.replace(" ", "")
        logits = torch.einsum(f"bwihd,bwjhd->{axes}ij", q, k) / K**0.5
        shape = logits.shape
        for at, word in enumerate(self.order.split()):
            logits = logits.flatten(at, at + len(word) - 1)
        shares = logits.softmax(-1).view(shape)
        return torch.einsum(f"{axes}ij,bwjhd->bwihd", shares, v).flatten(3).flatten(1, 2)


def windowed(order: str) -> Any:
    model = built(merged("bh"), Windows)
    model["attention"].order = order
    return model


@pytest.mark.parametrize("batch", [1, 2, H])
@pytest.mark.parametrize("order", ["bw h", "bh w", "hb w", "b w h", "h b w", "w h b"])
def test_windows_are_sequences_of_their_own(order: str, batch: int) -> None:
    model, x_BTD = windowed(order), inputs(batch)
    logit = logits_by_hand(model, x_BTD).unflatten(2, (-1, 2)).unflatten(4, (-1, 2))
    logit_BHWII = logit.diagonal(dim1=2, dim2=4).movedim(-1, 2)
    monitor = LogitMonitor(model, x_BTD)
    stats = monitor.measure()["attention"]
    torch.testing.assert_close(stats.max, logit_BHWII.amax((0, 2, 3, 4)))
    torch.testing.assert_close(stats.entropy, torch.special.entr(logit_BHWII.softmax(-1)).sum(-1).mean((0, 2, 3)))
    with torch.no_grad():
        for of in (model["attention"].q.weight, model["attention"].q.bias):
            of.mul_(1.5)
    change = (0.5 * logit_BHWII).abs().mean((0, 2, 3, 4))
    torch.testing.assert_close(monitor.measure()["attention"].mean_change, change)


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
        return super().forward(x_TBD.transpose(0, 1)).transpose(0, 1)


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


class Written(Attention):
    """A forward that writes: a loss, a list of losses, a counter, a cache, a buffer."""

    def __init__(self, attend: Attend) -> None:
        super().__init__(attend)
        self.seen: Tensor = nn.Buffer(torch.zeros(()))
        self.aux_loss, self.count = torch.zeros(()), 0
        self.losses, self.cache = list[Tensor](), dict[str, list[Tensor]](keys=[])

    def forward(self, x_BTD: Tensor) -> Tensor:
        self.seen += 1
        self.count += 1
        self.aux_loss = x_BTD.mean()
        self.losses.append(self.aux_loss)
        self.cache["keys"].append(self.k(x_BTD))
        self.cache["values"] = [self.v(x_BTD)]
        self.late = True
        return super().forward(x_BTD)


@pytest.mark.parametrize("layout", ["bhij", "merged"])
def test_what_a_forward_writes_is_as_it_was_after_a_measurement(layout: str) -> None:
    model = built(merged("hb") if layout == "merged" else by_einsum(layout), Written)
    attention = model["attention"]
    losses, cache, aux_loss, names = attention.losses, attention.cache, attention.aux_loss, set(vars(attention))
    LogitMonitor(model, inputs(3)).measure()
    assert attention.losses is losses == []
    assert attention.cache is cache == {"keys": []}
    assert attention.aux_loss is aux_loss
    assert attention.count == 0
    assert set(vars(attention)) == names
    assert_equal(attention.seen, torch.zeros(()))
