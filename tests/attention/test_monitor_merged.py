"""Heads and batch in one axis of the logits, in any order: monitor, clip and check give each head its own numbers.

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

import kimi
from models import assert_equal
from quacklr import LogitMonitor, LogitPath, QKClip, Weight, check, mha, packed

T, D, H, K = 6, 8, 4, 2
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v, each (B, T, H, K), to (B, T, H, K)


def merged(*order: str) -> Attend:
    """Batch and heads (or two factors of the heads, g and r) merged into one axis, in this order."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        sizes = {"b": len(q), "h": H, "g": 2, "r": 2}
        places = [{"b": 0, "h": 2, "g": 2, "r": 3}[axis] for axis in order]
        split = (q, k, v) if "h" in order else (each.unflatten(2, (2, 2)) for each in (q, k, v))
        flat_q, flat_k, flat_v = (each.permute(*places, 1, each.ndim - 1).contiguous().view(-1, T, K) for each in split)
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


class Model(nn.Module):
    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.inside: Any = nn.Linear(D, D)
        self.attention: Any = attention

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.attention(self.inside(x_BTD))


def built(attend: Attend, kind: type[Undeclared] = Attention) -> Model:
    """Each head's logits are of another size than every other's."""
    torch.manual_seed(0)
    model = Model(kind(attend))
    with torch.no_grad():
        model.attention.q.weight.mul_(torch.tensor([1.0, 3.0, 9.0, 27.0]).repeat_interleave(K)[:, None])
    return model


def inputs(batch: int) -> Tensor:
    return torch.randn(batch, T, D, generator=torch.Generator().manual_seed(1))


def logits_by_hand(model: Any, x_BTD: Tensor) -> Tensor:
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
    logit = logits_by_hand(model, x_BTD)
    torch.testing.assert_close(stats.max, logit.amax((0, 2, 3)))
    entropy = torch.special.entr(logit.softmax(-1)).sum(-1).mean((0, 2))
    torch.testing.assert_close(stats.entropy, entropy)


@pytest.mark.parametrize("batch", [1, 2, 3, H])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_paths_the_heads_of_a_merged_axis_are_counted_too(layout: str, batch: int) -> None:
    model, x_BTD = built(LAYOUTS[layout], Undeclared), inputs(batch)
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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_head_that_is_clipped_is_the_one_with_the_large_logits(layout: str) -> None:
    """Batches of several sizes: what was measured of one serves for the next, or is measured again."""
    model = built(LAYOUTS[layout])
    optimizer = SGD(model.parameters(), lr=1e-12)
    clip = QKClip(model, optimizer, threshold := 1.0)
    for batch in (3, H, 1, 2):
        x_BTD = inputs(batch)
        state = {name: of.detach().clone() for name, of in model.state_dict().items()}
        largest = logits_by_hand(model, x_BTD).amax((0, 2, 3))
        model(x_BTD).square().mean().backward()
        optimizer.step()
        torch.testing.assert_close(clip.max_logits()["attention"], largest)
        q, k = (kimi.Rows((f"attention.{of}.weight", f"attention.{of}.bias"), K, K) for of in "qk")
        kimi.mha(state, q, k, largest.tolist(), threshold)
        torch.testing.assert_close(dict(model.state_dict()), state, rtol=1e-5, atol=1e-6)
        with torch.no_grad():
            model.attention.q.weight.mul_(3)


@pytest.mark.parametrize("batch", [3, H])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_check_is_right_about_right_paths_and_about_wrong_ones(layout: str, batch: int) -> None:
    model = Model(Attention(LAYOUTS[layout]))
    optimizer, x_BTD = SGD(model.parameters(), lr=0.1), inputs(batch)
    right = check(model, optimizer, x_BTD, steps=1)
    assert right.ok, right
    blocks = torch.arange(H * K) // K
    weights = [Weight(f"attention.{of}", getattr(model.attention, of).weight, blocks) for of in "qk"]
    swapped = torch.tensor([0, 2, 1, 3])
    with pytest.raises(ValueError, match="attention: the rule for Attention is wrong here"):
        check(model, optimizer, x_BTD, steps=1, paths=[LogitPath(tuple(weights), H, (None, swapped))])


class Windows(Attention):
    """Sequences are cut into windows of two tokens inside; the axes of the logits are in any order."""

    def __init__(self, order: str) -> None:
        super().__init__(merged("b", "h"))
        self.order = order

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = (of(x_BTD).unflatten(2, (H, K)).unflatten(1, (-1, 2)) for of in (self.q, self.k, self.v))
        axes = self.order.replace(" ", "")
        logits = torch.einsum(f"bwihd,bwjhd->{axes}ij", q, k) / K**0.5
        shape = logits.shape
        words, at = self.order.split(), 0
        for word in words:
            logits, at = logits.flatten(at, at + len(word) - 1), at + 1
        shares = logits.softmax(-1).view(shape)
        return torch.einsum(f"{axes}ij,bwjhd->bwihd", shares, v).flatten(3).flatten(1, 2)


@pytest.mark.parametrize("batch", [1, 2, H])
@pytest.mark.parametrize(
    "order", ["bwh", "hbw", "bhw", "whb", "bh w", "hb w", "b wh", "b w h", "b h w", "h b w", "w h b"]
)
def test_windows_are_sequences_of_their_own(order: str, batch: int) -> None:
    torch.manual_seed(0)
    model, x_BTD = Model(Windows(order)), inputs(batch)
    logit = logits_by_hand(model, x_BTD).unflatten(2, (-1, 2)).unflatten(4, (-1, 2))
    logit_BHWII = logit.diagonal(dim1=2, dim2=4).movedim(-1, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    clip = QKClip(model, optimizer)
    model(x_BTD)
    stats = LogitMonitor(model, x_BTD).measure()["attention"]
    torch.testing.assert_close(clip.max_logits()["attention"], logit_BHWII.amax((0, 2, 3, 4)))
    torch.testing.assert_close(stats.max, logit_BHWII.amax((0, 2, 3, 4)))
    torch.testing.assert_close(stats.entropy, torch.special.entr(logit_BHWII.softmax(-1)).sum(-1).mean((0, 2, 3)))


class Odd(Attention):
    """Heads first; with dropout, a norm over the batch, counters, and inputs that are written into."""

    def __init__(self, attend: Attend) -> None:
        super().__init__(attend)
        self.norm, self.drop = nn.BatchNorm1d(D), nn.Dropout(0.3)
        self.seen: Tensor = nn.Buffer(torch.zeros(()))
        self.forwards, self.last = 0, torch.zeros(0)

    def forward(self, x_BTD: Tensor) -> Tensor:
        self.forwards += 1
        self.seen += 1
        x_BTD = self.norm(x_BTD.mul_(2).mT).mT
        self.last = x_BTD
        return super().forward(self.drop(x_BTD))


def trained(model: Model, watched: bool) -> tuple[object, ...]:
    torch.manual_seed(1)
    optimizer = SGD(model.parameters(), lr=0.1)
    clip = QKClip(model, optimizer, clip=False) if watched else None
    for batch in (3, 3, 5, H, 1):
        optimizer.zero_grad()
        model(torch.randn(batch, T, D)).square().mean().backward()
        optimizer.step()
    assert clip is None or clip.max_logits()
    return model.state_dict(), model.attention.forwards, model.attention.last, torch.get_rng_state()


@pytest.mark.parametrize("layout", ["heads x batch", "groups x batch x heads of a group", "heads, batch"])
def test_measuring_the_order_of_heads_leaves_no_trace_in_training(layout: str) -> None:
    assert_equal(trained(built(LAYOUTS[layout], Odd), True), trained(built(LAYOUTS[layout], Odd), False))


def counting(layout: str) -> tuple[Model, list[int]]:
    """A model, and a list that grows with every call of its attention."""
    counted: list[int] = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        counted.append(len(q))
        return LAYOUTS[layout](q, k, v)

    return built(attend), counted


@pytest.mark.parametrize("layout", ["batch x heads", "heads x batch", "heads, batch"])
def test_the_order_is_measured_once_and_not_in_every_step(layout: str) -> None:
    model, counted = counting(layout)
    optimizer = SGD(model.parameters(), lr=0.1)
    clip = QKClip(model, optimizer, threshold=1e6)
    model(inputs(H))
    measuring = len(counted) - 1
    assert 1 <= measuring <= 1 + 2 * 2 * 2  # for each bit of the batch, and of what is as large, both its values
    for length in (T, T, T):
        model(torch.randn(H, length, D))
    assert len(counted) == measuring + 4
    if layout != "heads, batch":  # in one axis, batches of another size have the same order
        for batch in (2, 3, 5, 1):
            model(inputs(batch))
        assert len(counted) == measuring + 8
    assert list(clip.max_logits()) == ["attention"]


def test_a_probe_is_run_more_than_once_at_the_first_measurement_only() -> None:
    model, counted = counting("heads x batch")
    monitor = LogitMonitor(model, inputs(3))
    monitor.measure()
    assert len(counted) > 1
    counted.clear()
    monitor.measure()
    assert len(counted) == 1


def test_weights_that_are_zero_do_not_hide_the_order() -> None:
    model = built(LAYOUTS["heads x batch"])
    nn.init.zeros_(model.attention.q.weight)
    with torch.no_grad():
        model.attention.q.bias.copy_(torch.arange(H * K))
    stats = LogitMonitor(model, inputs(3)).measure()["attention"]
    torch.testing.assert_close(stats.max, logits_by_hand(model, inputs(3)).amax((0, 2, 3)))


class Core(nn.Module):
    """Attention in a module of its own, which is given queries and keys that are merged already."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        logits = torch.bmm(q, k.mT) / K**0.5
        return (logits if bias is None else logits + bias).softmax(-1) @ v


class Outside(Attention):
    """Projections here, attention there, heads first; and a bias that has an axis of heads."""

    def __init__(self, attend: Attend) -> None:
        super().__init__(attend)
        self.core = Core()

    def forward(self, x_BTD: Tensor, bias: Tensor | None = None, cache: Any = None) -> Tensor:
        q, k, v = (of(x_BTD).unflatten(2, (H, K)).permute(2, 0, 1, 3) for of in (self.q, self.k, self.v))
        if cache is not None:
            k, v = cache.update(k, v)
        q, k, v = (each.reshape(-1, each.shape[2], K) for each in (q, k, v))
        bias = None if bias is None else bias.repeat_interleave(len(x_BTD), 0)
        return self.core(q, k, v, bias).unflatten(0, (H, -1)).permute(1, 2, 0, 3).flatten(2)


def test_an_attention_that_is_given_merged_heads_is_measured_from_the_module_around_it() -> None:
    model = built(heads_then_batch, Outside)
    for batch in (3, H):
        stats = LogitMonitor(model, inputs(batch)).measure()["attention.core"]
        torch.testing.assert_close(stats.max, logits_by_hand(model, inputs(batch)).amax((0, 2, 3)))


@pytest.mark.parametrize("batch", [3, H])
def test_a_bias_with_an_axis_of_heads_is_no_batch(batch: int) -> None:
    class Biased(Model):
        def forward(self, x_BTD: Tensor) -> Tensor:
            return self.attention(bias=bias_HTT, x_BTD=self.inside(x_BTD))

    torch.manual_seed(0)
    bias_HTT = torch.randn(H, T, T)
    model, x_BTD = Biased(Outside(heads_then_batch)), inputs(batch)
    clip = QKClip(model, SGD(model.parameters(), lr=0.1))
    model(x_BTD)
    wanted = (logits_by_hand(model, x_BTD) + bias_HTT).amax((0, 2, 3))
    torch.testing.assert_close(clip.max_logits()["attention"], wanted)
    torch.testing.assert_close(LogitMonitor(model, x_BTD).measure()["attention.core"].max, wanted)


class Cache:
    """Keys and values of earlier calls, with the new ones after them."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def update(self, *new: Tensor) -> list[Tensor]:
        self.kept = [torch.cat(each, 2) for each in zip(self.kept, new, strict=True)] if self.kept else list(new)
        return self.kept


def test_a_cache_is_not_filled_by_measuring() -> None:
    class Caching(Model):
        def forward(self, x_BTD: Tensor) -> Tensor:
            cache = Cache()
            self.attention(self.inside(x_BTD), cache=cache)
            assert cache.kept[0].shape == (H, len(x_BTD), T, K)
            return self.attention(self.inside(x_BTD), cache=cache)

    torch.manual_seed(0)
    model = Caching(Outside(heads_then_batch))
    clip = QKClip(model, SGD(model.parameters(), lr=0.1))
    model(inputs(3)).sum().backward()
    wanted = logits_by_hand(model, inputs(3)).amax((0, 2, 3))
    torch.testing.assert_close(clip.max_logits()["attention"], wanted)
    torch.testing.assert_close(LogitMonitor(model, inputs(3)).measure()["attention.core#2"].max, wanted)


def test_under_autocast_no_weight_loses_its_gradient() -> None:
    """A cast that is made without gradients, and kept, would be used in the forward that is watched."""

    class Ends(Attention):
        def __init__(self, attend: Attend) -> None:
            super().__init__(attend)
            self.o = nn.Linear(H * K, D)

        def forward(self, x_BTD: Tensor) -> Tensor:
            try:
                y_BTD = super().forward(x_BTD)
            except Exception:  # as those who fall back to another kernel
                y_BTD = x_BTD
            return self.o(y_BTD)

    grads = []
    for clipping in (False, True):
        model = built(LAYOUTS["heads x batch"], Ends)
        clip = QKClip(model, SGD(model.parameters(), lr=0.1)) if clipping else None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(inputs(3)).float().square().mean().backward()
        grads.append([param.grad for param in model.parameters()])
        assert clip is None or clip.max_logits()
    assert all(grad is not None for grad in grads[1])
    assert_equal(*grads)


class Interacting(Attention):
    """Every example is centred by the mean of the batch: all of them make the logits of each."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        return super().forward(x_BTD - x_BTD.mean(0))


@pytest.mark.parametrize("layout", ["batch x heads", "heads x batch", "heads, batch"])
def test_examples_that_interact_before_they_are_projected_do_not_hide_the_order(layout: str) -> None:
    model, x_BTD = built(LAYOUTS[layout], Interacting), inputs(3)
    model.inside = nn.Identity()
    wanted = logits_by_hand(model, x_BTD - x_BTD.mean(0)).amax((0, 2, 3))
    torch.testing.assert_close(LogitMonitor(model, x_BTD).measure()["attention"].max, wanted)
    assert check(model, SGD(model.parameters(), lr=0.1), x_BTD, steps=1).ok


class Tangled(Attention):
    """Queries and keys are centred over the batch, and normed over all heads: none belong to one head or example."""

    def __init__(self, attend: Attend) -> None:
        super().__init__(attend)
        self.attend = lambda q, k, v: attend(mixed(q), mixed(k), v)


def mixed(x_BTHK: Tensor) -> Tensor:
    return nn.functional.rms_norm(x_BTHK - x_BTHK.mean(0), (H, K))


class Once(Attention):
    """It cannot run a second time."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        assert torch.is_grad_enabled()
        return super().forward(x_BTD)


@pytest.mark.parametrize("kind", [Tangled, Once])
def test_an_order_that_cannot_be_measured_is_an_error_and_no_guess(kind: type[Attention]) -> None:
    model = built(LAYOUTS["heads x batch"], kind)
    optimizer = SGD(model.parameters(), lr=0.1)
    sentence = "attention: its logits have heads and batch in one axis, and it cannot be measured which entry is which"
    if kind is Tangled:
        with pytest.raises(ValueError, match=f"{sentence}.*; give the heads an axis of their own"):
            LogitMonitor(model, inputs(3)).measure()
        with pytest.raises(ValueError, match="the measurement says that it is on no path"):
            check(model, optimizer, inputs(3), steps=1)
    with QKClip(model, optimizer), pytest.raises(ValueError, match=sentence):
        model(inputs(3))
    with QKClip(model, optimizer) as clip:  # with one sequence there is no ambiguity
        model(inputs(1))
        assert len(clip.max_logits()["attention"]) == H


def test_examples_that_interact_are_not_taken_for_one_sequence_with_many_heads() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return LAYOUTS["heads x batch"](q - q.mean(0), k - k.mean(0), v)

    with pytest.raises(ValueError, match="attention: its logits have heads and batch in one axis"):
        LogitMonitor(built(attend, Undeclared), inputs(3)).measure()


@pytest.mark.parametrize("kind", [Undeclared, Attention])
@pytest.mark.parametrize("batch", [2, H])
def test_heads_that_are_split_before_they_are_projected_are_still_heads(kind: type[Undeclared], batch: int) -> None:
    """One small matrix for all heads, applied to (heads x batch, T, K): its input has an axis of heads."""

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(K, K), nn.Linear(K, K)
            self.heads = H if kind is Attention else None

        def forward(self, x_BTD: Tensor) -> Tensor:
            x = x_BTD.unflatten(2, (H, K)).permute(2, 0, 1, 3).flatten(0, 1)
            return (self.one(x) @ self.other(x).mT).softmax(-1)

    torch.manual_seed(0)
    model, x_BTD = Small(), inputs(batch)
    x_BHTK = x_BTD.unflatten(2, (H, K)).transpose(1, 2)
    wanted = (model.one(x_BHTK) @ model.other(x_BHTK).mT).amax((0, 2, 3)).detach()
    torch.testing.assert_close(LogitMonitor(model, x_BTD).measure()[""].max, wanted)
