"""Attentions as people write them: each way to mask, to scale and to take a softmax is measured as by hand.

The judge is by_hand.statistics, of q . k and of what may be seen, one query at a time.

Shapes: B sequences, H heads, T tokens, K head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import normalize, scaled_dot_product_attention, softmax

import by_hand
import quacklr.attention.monitor
from quacklr import LogitMonitor

B, H, T, K = 3, 4, 7, 4
MIN = torch.finfo(torch.float32).min
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q and k (B, H, T, K), what may be seen (B, 1, T, T), to anything


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


Q, KEYS = random(B, H, T, K, seed=0), random(B, H, T, K, seed=1)
MOVED = Q + 0.3 * random(B, H, T, K, seed=2)
PADDED = torch.ones(B, T)
PADDED[1, :3] = PADDED[2, -2:] = 0  # queries that see nothing, and keys that no query sees
SEEN = by_hand.allowed(PADDED)
SINK = 2.0


class Attention(nn.Module):
    """A function of queries and keys; the logits are q . k."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend, self.num_heads = attend, H

    def forward(self, q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
        return self.attend(q, k, seen)


def assert_as_by_hand(attend: Attend, seen: Tensor = SEEN, sink: bool = False, scale: float = 1.0) -> None:
    """Two measurements, with other queries in the second."""
    monitor, before = LogitMonitor(Attention(attend), (Q, KEYS, seen)), None
    for q in (Q * scale, MOVED * scale):
        monitor.probe = (q, KEYS, seen)
        extra = torch.full((H,), SINK) if sink else None
        now = by_hand.Written(q @ KEYS.mT, torch.empty(0), torch.empty(0), extra_H=extra)
        (stats,) = monitor.measure().values()
        by_hand.assert_measured(stats, by_hand.statistics(now, seen, before), "")
        before = now


def added(seen: Tensor, value: float = -1e9) -> Tensor:
    return torch.zeros(seen.shape).masked_fill(~seen, value)


def filled_in_place(q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    scores = q @ k.mT
    scores.masked_fill_(~seen, -1e4)
    return scores.softmax(-1)


def added_in_place_then_scaled(q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    scores = 2 * q @ k.mT
    scores += added(seen)
    scores /= 2
    return scores.softmax(-1)


def into_an_output(q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    scores = torch.empty(B, H, T, T)
    torch.matmul(2 * q, k.mT, out=scores)
    scores.view(B * H, T, T).div_(2.0)
    scores[~seen.expand_as(scores)] = -1e9
    return scores.softmax(-1)


def multiplied_out(q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    """GPT's way: the mask's zeros multiply, and a large number is subtracted in their place."""
    return softmax(q @ k.mT * seen.float() - 1e4 * (1 - seen.float()), dim=-1)


def one_sequence_at_a_time(q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    scores = q @ k.mT
    for b in range(B):
        scores[b].masked_fill_(~seen[b], -1e9)
    return scores.softmax(-1)


def added_to_an_unwritten_tensor(q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    """beta=0: what is in the tensor that is added to does not count."""
    rubbish = torch.full((B * H, T, T), -1e9)
    scores = torch.baddbmm(rubbish, q.flatten(0, 1), k.flatten(0, 1).mT, beta=0).view(B, H, T, T)
    return scores.masked_fill(~seen, -1e9).softmax(-1)


def stabilised(q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    """The row's maximum is subtracted first; the logits are what was there before."""
    scores = (q @ k.mT).masked_fill(~seen, MIN)
    return softmax(scores - scores.amax(dim=-1, keepdim=True), dim=-1)


def less_the_largest_of_all(q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    scores = (q @ k.mT).masked_fill(~seen, -1e9)
    return (scores - scores.max()).softmax(-1)


def logsumexp_and_softmax(q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    """Granite's way to a learned sink: a gate from the logsumexp, then a softmax of the same logits."""
    scores = (q @ k.mT).masked_fill(~seen, MIN)
    return softmax(scores, dim=-1) * torch.logsumexp(scores, dim=-1)[..., None].sigmoid()


def reshaped_after_the_mask(q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    scores = (q.flatten(0, 1) @ k.flatten(0, 1).mT).masked_fill(~seen.expand(B, H, T, T).flatten(0, 1), -1e4)
    return scores.view(-1, H, T, T).transpose(1, 2).contiguous().transpose(1, 2).softmax(-1)


def written_into_a_buffer(q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    scores = torch.zeros(B, H, T, T)
    for rows in (slice(3), slice(3, T)):
        scores[:, :, rows] = (q[:, :, rows] @ k.mT).masked_fill(~seen[:, :, rows], -1e9)
    return scores.softmax(-1)


def conditions_and_indices(q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    """Tensors computed from logits that are no numbers are not logits."""
    scores = q @ k.mT
    table = torch.zeros(10)
    table[scores.topk(2).indices] = table[scores.argsort(-1)][..., :2]
    assert len(torch.where(scores > 0)) == 4
    scores = torch.reshape(input=torch.where((scores > -torch.inf) & seen, scores, -1e9), shape=(B * H, T, T))
    return scores.view(B, H, T, T).softmax(-1)


def two_halves_of_the_keys(q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    scores = [
        (q @ part.mT).masked_fill(~mask, -1e4) for part, mask in zip(k.split(4, 2), seen.split(4, 3), strict=True)
    ]
    return torch.cat(scores, -1).softmax(-1)


def in_the_kernel(q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    return scaled_dot_product_attention(query=q / 2, key=k, value=k, attn_mask=added(seen, -1e4), scale=2.0)


def masked_with(value: float) -> Attend:
    return lambda q, k, seen: (q @ k.mT).masked_fill(~seen, value).softmax(-1)


WAYS: dict[str, Attend] = {
    **{f"masked with {value}": masked_with(value) for value in (-1e4, -1e9, MIN, -math.inf)},
    "where": lambda q, k, seen: torch.where(seen, q @ k.mT, -1e9).softmax(-1),
    "added": lambda q, k, seen: (q @ k.mT + added(seen, MIN)).softmax(-1),
    "added twice": lambda q, k, seen: (q @ k.mT + added(seen | (PADDED < 1)[:, None, None]) + added(seen)).softmax(-1),
    "alpha of an addition": lambda q, k, seen: torch.add(q @ k.mT, (~seen).float(), alpha=-1e9).softmax(dim=-1),
    "baddbmm": lambda q, k, seen: torch.baddbmm(
        added(seen).expand(len(q), H, T, T).flatten(0, 1), q.flatten(0, 1), k.flatten(0, 1).mT
    ).softmax(-1),
    "einsum": lambda q, k, seen: softmax(
        torch.einsum("bhid,bhjd->bhij", q, k).masked_fill(~seen, -1e9), dim=3, dtype=torch.float32
    ),
    "einsum of a list": lambda q, k, seen: (
        torch.einsum("bhid, bhjd -> bhij", [q, k]).masked_fill(~seen, -1e9).softmax(-1)
    ),
    "bmm with a name": lambda q, k, seen: (
        torch.bmm(q.flatten(0, 1), mat2=k.flatten(0, 1).mT).view_as(seen.expand(len(q), H, T, T).float()) + added(seen)
    ).softmax(-1),
    "a sum of products": lambda q, k, seen: (q @ k.mT / 2 + (q @ k.mT / 2).masked_fill(~seen, -1e9)).softmax(-1),
    "a minimum": lambda q, k, seen: torch.minimum(q @ k.mT, torch.where(seen, torch.inf, -torch.inf)).softmax(-1),
    "a boolean mask of the kernel": lambda q, k, seen: scaled_dot_product_attention(q, k, k, seen, scale=1.0),
}
WAYS |= {
    each.__name__.replace("_", " "): each
    for each in (
        *(filled_in_place, added_in_place_then_scaled, into_an_output),
        *(multiplied_out, one_sequence_at_a_time, added_to_an_unwritten_tensor, stabilised, less_the_largest_of_all),
        *(logsumexp_and_softmax, reshaped_after_the_mask, written_into_a_buffer, conditions_and_indices),
        *(two_halves_of_the_keys, in_the_kernel),
    )
}


@pytest.mark.parametrize("way", WAYS)
def test_logits_are_what_goes_into_the_softmax_however_they_were_made(way: str) -> None:
    assert_as_by_hand(WAYS[way])


@pytest.mark.parametrize("first", [False, True], ids=["after the keys", "before the keys"])
def test_a_learned_sink_is_no_key_wherever_it_stands(first: bool) -> None:
    def attend(q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
        columns = [(q @ k.mT).masked_fill(~seen, -1e9), torch.full((B, H, T, 1), SINK)]
        return torch.cat(columns[::-1] if first else columns, -1).softmax(-1)

    assert_as_by_hand(attend, sink=True)


@pytest.mark.parametrize("way", ["in the kernel", "einsum", "stabilised"])
def test_shares_that_are_all_one_keys_have_no_entropy_and_are_numbers(way: str) -> None:
    assert_as_by_hand(WAYS[way], scale=100.0)


def test_each_head_may_have_a_mask_of_its_own_and_see_one_key_only() -> None:
    seen = torch.eye(T, dtype=torch.bool).expand(B, H, T, T).clone()
    seen[:, :2, -1] = True
    for way in ("in the kernel", "einsum"):
        assert_as_by_hand(WAYS[way], seen)


def test_masks_that_move_are_compared_where_both_times_could_be_seen() -> None:
    def top3(q: Tensor, k: Tensor, _: Tensor) -> Tensor:
        scores = q @ k.mT
        return scores.masked_fill(scores < scores.topk(3).values[..., -1:], -torch.inf).softmax(-1)

    monitor = LogitMonitor(Attention(top3), (Q, KEYS, SEEN))
    monitor.measure()
    monitor.probe = (MOVED, KEYS, SEEN)
    before, now = (each @ KEYS.mT for each in (Q, MOVED))
    both = torch.stack([each >= each.topk(3).values[..., -1:] for each in (before, now)]).all(0)
    wanted = torch.stack([(now - before)[:, h][both[:, h]].abs().mean() for h in range(H)])
    torch.testing.assert_close(monitor.measure()[""].mean_change, wanted)


def test_torchs_own_causal_masks_are_respected() -> None:
    q, lower = Q[:, :, :3], torch.ones(3, T, dtype=torch.bool).tril(T - 3)
    aligned = Attention(lambda q, k, _: scaled_dot_product_attention(q, k, k, attn_mask=causal_lower_right(3, T)))
    stats = LogitMonitor(aligned, (q, KEYS, SEEN)).measure()[""]
    logits = q @ KEYS.mT / 2
    written = by_hand.Written(logits, torch.empty(0), torch.empty(0))
    by_hand.assert_measured(stats, by_hand.statistics(written, lower.expand(B, H, 3, T)), "lower right")


CALLS: dict[str, tuple[Callable[[], Tensor], Tensor]] = {
    "without batch and heads": (
        lambda: scaled_dot_product_attention(Q[0, 0], KEYS[0, 0], KEYS[0, 0]),
        Q[:1, :1] @ KEYS[:1, :1].mT,
    ),
    "queries for all sequences": (lambda: scaled_dot_product_attention(Q[:1], KEYS, KEYS), Q[:1] @ KEYS.mT),
    "groups without a batch": (
        lambda: scaled_dot_product_attention(Q[0], KEYS[0, :2], KEYS[0, :2], enable_gqa=True),
        Q[:1] @ KEYS[:1, :2].repeat_interleave(2, 1).mT,
    ),
    "groups with keys for all sequences": (
        lambda: scaled_dot_product_attention(Q, KEYS[:1, :2], KEYS[:1, :2], enable_gqa=True),
        Q @ KEYS[:1, :2].repeat_interleave(2, 1).mT,
    ),
    "five dimensions": (lambda: scaled_dot_product_attention(Q[None], KEYS[None], KEYS[None]), Q @ KEYS.mT),
}


@pytest.mark.parametrize("call", CALLS)
def test_every_legal_call_of_the_kernel_is_measured(call: str) -> None:
    attend, logits = CALLS[call]
    stats = LogitMonitor(Attention(lambda *_: attend()), (Q, KEYS, SEEN)).measure()[""]
    torch.testing.assert_close(stats.max, logits.amax((0, 2, 3)) / 2)


def test_attention_to_nothing_is_passed_over_and_a_sample_of_padding_is_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
        scaled_dot_product_attention(q[:0], k[:0], k[:0])
        (q[:0] @ k[:0].mT).softmax(-1)
        return (q @ k.mT).masked_fill(~seen, -1e9).softmax(-1)

    monkeypatch.setattr(quacklr.attention.monitor, "KEPT", B * H * T * 2)
    monitor = LogitMonitor(Attention(attend), (Q, KEYS, SEEN))
    assert list(monitor.measure()) == [""]
    assert monitor.measure()[""].mean_change.isfinite().all()


ROUTERS: dict[str, Callable[[Tensor, nn.Linear], Tensor]] = {
    "a layer": lambda x, router: router(x),
    "matmul": lambda x, router: x @ router.weight.T,
    "einsum": lambda x, router: torch.einsum("btd,ed->bte", x, router.weight),
    "a cast weight": lambda x, router: (x.double() @ router.weight.double().T).float(),
    "cosines": lambda x, router: normalize(x, dim=-1) @ normalize(router.weight, dim=-1).T,
    "four axes": lambda x, router: router(x)[:, None].expand(B, 2, T, T),
}


@pytest.mark.parametrize("how", ROUTERS)
def test_a_router_is_no_attention_and_a_softmax_that_is_a_module_is_its_attentions(how: str) -> None:
    """As many experts as tokens: the shape of its logits is that of an attention without heads."""

    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.softmax, self.router = nn.Softmax(dim=-1), nn.Linear(K, T)
            self.attention = Attention(lambda q, k, seen: self.softmax((q @ k.mT).masked_fill(~seen, -1e9)))

        def forward(self, q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
            self.attention(q, k, seen)
            return ROUTERS[how](q[:, 0], self.router).softmax(-1).log_softmax(-1)

    assert list(LogitMonitor(Router(), (Q, KEYS, SEEN)).measure()) == ["attention"]


def test_learned_queries_attend_too() -> None:
    """A pooling head asks with a parameter: projected, it is a query like any other."""

    class Pooling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ask, self.q, self.k = nn.Parameter(torch.randn(1, 3, 8)), nn.Linear(8, 8), nn.Linear(8, 8)
            self.by_hand = False

        def parts(self, x: Tensor) -> list[Tensor]:
            asked = self.ask.float() @ self.q.weight.T if self.by_hand else self.q(self.ask.float()) - self.q.bias
            return [by_hand.heads(each, 2) for each in (asked, self.k(x))]

        def forward(self, x: Tensor) -> Any:
            q, k = self.parts(x)
            return (q @ k.mT).softmax(-1) @ k

    torch.manual_seed(0)
    model, x = Pooling(), torch.randn(2, 5, 8)
    q, k = model.parts(x)
    for model.by_hand in (False, True):
        torch.testing.assert_close(LogitMonitor(model, x).measure()[""].max, (q @ k.mT).amax((0, 2, 3)).detach())
