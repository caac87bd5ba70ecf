"""Attentions written in unusual ways: their statistics are right, and monitoring never breaks a forward that runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quacklr.attention.accumulator
from quacklr import LogitMonitor, LogitStats

Q, K = (torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
MOVED = Q + 0.3 * torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(2))
CAUSAL = torch.ones(5, 5).tril().bool()
PADDED = (torch.arange(5) < torch.tensor([5, 3])[:, None])[:, None, None]  # (B, 1, 1, J)
SINK = torch.full((2, 3, 5, 1), 50.0)


class Written(nn.Module):
    """A function of queries and keys that ends in a softmax; all else is up to it."""

    def __init__(self, attend: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.attend, self.num_heads = attend, 3

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return self.attend(q, k)


def measured(attend: Callable[[Tensor, Tensor], Tensor]) -> LogitStats:
    monitor = LogitMonitor(Written(attend), (Q, K))
    monitor.measure()
    monitor.probe = (MOVED, K)
    return monitor.measure()[""]


def expected(seen: Tensor, extra: Tensor | None = None) -> LogitStats:
    """By hand: `seen` broadcasts to (B, H, I, J); `extra` are columns that the softmax sees beside the keys."""
    seen = seen.expand(2, 3, 5, 5)
    before, now = ((each @ K.mT).masked_fill(~seen, -torch.inf) for each in (Q, MOVED))
    change = torch.stack([(now - before)[:, h][seen[:, h]].abs().mean() for h in range(3)])
    share = torch.cat([now, *([] if extra is None else [extra])], -1).softmax(-1)
    looking, choosing = seen.any(-1), seen.sum(-1) > 1
    entropies = -torch.special.xlogy(share, share).sum(-1)
    sinks = share[..., 0] + share[..., 5:].sum(-1)
    entropy = torch.stack([entropies[:, h][looking[:, h]].mean() for h in range(3)])
    sink = torch.stack([sinks[:, h][choosing[:, h]].mean() for h in range(3)])
    return LogitStats(now.amax((0, 2, 3)), change, entropy, sink)


def assert_same(found: LogitStats, wanted: LogitStats) -> None:
    for name in ("max", "mean_change", "entropy", "sink"):
        torch.testing.assert_close(getattr(found, name), getattr(wanted, name))


def in_a_buffer(q: Tensor, k: Tensor) -> Tensor:
    scores = torch.zeros(2, 3, 5, 5)
    for start in (0, 3):
        scores[:, :, start : start + 3] = q[:, :, start : start + 3] @ k.mT
    return scores.masked_fill(~CAUSAL, -1e9).softmax(-1)


def marked_condition(q: Tensor, k: Tensor) -> Tensor:
    scores = q @ k.mT
    keep = (scores > -torch.inf) & CAUSAL
    return torch.where(keep, scores, -1e9).softmax(-1)


def indices_of(q: Tensor, k: Tensor) -> Tensor:
    scores = q @ k.mT
    table = torch.zeros(10)
    table[scores.topk(2).indices] = 1
    assert len(torch.where(scores > 0)) == 4
    _ = table[scores.argsort(-1)]
    scores = torch.reshape(input=torch.masked_fill(input=scores, mask=~CAUSAL, value=-1e9), shape=(6, 5, 5))
    return scores.view(2, 3, 5, 5).masked_fill(~CAUSAL, -1e9).softmax(-1)


def masked_in_a_buffer(q: Tensor, k: Tensor) -> Tensor:
    scores = torch.zeros(2, 3, 5, 5)
    for start in (0, 3):
        rows = slice(start, start + 3)
        scores[:, :, rows] = (q[:, :, rows] @ k.mT).masked_fill(~CAUSAL[rows], -1e9)
    return scores.softmax(-1)


def less_the_largest(q: Tensor, k: Tensor) -> Tensor:
    scores = (q @ k.mT).masked_fill(~CAUSAL, -1e9)
    return (scores - scores.max()).softmax(-1)


WAYS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Tensor]] = {
    "padding alone": (lambda q, k: (q @ k.mT + torch.where(PADDED, 0, -1e9)).softmax(-1), PADDED),
    "padding, then causal": (
        lambda q, k: (q @ k.mT + torch.where(PADDED, 0, -1e9) + torch.where(CAUSAL, 0, -1e9)).softmax(-1),
        PADDED & CAUSAL,
    ),
    "written into a buffer": (in_a_buffer, CAUSAL),
    "written into a buffer with its mask": (masked_in_a_buffer, CAUSAL),
    "less the largest of all": (less_the_largest, CAUSAL),
    "heads one by one": (
        lambda q, k: torch.cat(
            [(q[:, [h]] @ k[:, [h]].mT).masked_fill(~CAUSAL, -1e9) for h in range(3)], dim=1
        ).softmax(-1),
        CAUSAL,
    ),
    "the sum of two products, one masked": (
        lambda q, k: ((q @ k.mT / 2) + (q @ k.mT / 2).masked_fill(~CAUSAL, -1e9)).softmax(-1),
        CAUSAL,
    ),
    "a condition made of logits": (marked_condition, CAUSAL),
    "indices made of logits": (indices_of, CAUSAL),
    "in two halves": (lambda q, k: torch.cat([q @ k[:, :, :2].mT, q @ k[:, :, 2:].mT], -1).softmax(-1), CAUSAL | True),
    "in two halves, one masked": (
        lambda q, k: torch.cat(
            [(q @ k[:, :, :2].mT).masked_fill(~CAUSAL[:, :2], -1e4), (q @ k[:, :, 2:].mT) + torch.zeros(3)], -1
        ).softmax(-1),
        torch.cat([CAUSAL[:, :2], torch.ones(5, 3).bool()], -1),
    ),
    "each head its own window, by a minimum": (
        lambda q, k: torch.minimum(
            q @ k.mT, torch.where(CAUSAL | (torch.arange(3) == 0)[:, None, None], torch.inf, -torch.inf)
        ).softmax(-1),
        CAUSAL | (torch.arange(3) == 0)[:, None, None],
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_seen_is_what_was_attended_to(way: str) -> None:
    attend, seen = WAYS[way]
    assert_same(measured(attend), expected(seen))


@pytest.mark.parametrize("first", [False, True], ids=["after the keys", "before the keys"])
def test_a_learned_sink_is_no_key_wherever_it_stands(first: bool) -> None:
    def attend(q: Tensor, k: Tensor) -> Tensor:
        columns = [(q @ k.mT).masked_fill(~CAUSAL, -1e9), SINK]
        return torch.cat(columns[::-1] if first else columns, -1).softmax(-1)

    assert_same(measured(attend), expected(CAUSAL, SINK))


def test_masks_that_move_are_compared_where_both_times_could_be_looked_at() -> None:
    def top3(q: Tensor, k: Tensor) -> Tensor:
        scores = q @ k.mT
        return scores.masked_fill(scores < scores.topk(3).values[..., -1:], -torch.inf).softmax(-1)

    before, now = (each @ K.mT for each in (Q, MOVED))
    both = torch.stack([each >= each.topk(3).values[..., -1:] for each in (before, now)]).all(0)
    wanted = torch.stack([(now - before)[:, h][both[:, h]].abs().mean() for h in range(3)])
    torch.testing.assert_close(measured(top3).mean_change, wanted)


def test_a_large_probe_with_nothing_but_padding_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quacklr.attention.accumulator, "KEPT", 2 * 3 * 5 * 2)
    assert measured(WAYS["padding alone"][0]).mean_change.isfinite().all()


CALLS: dict[str, Callable[[], Tensor]] = {
    "without batch and heads": lambda: F.scaled_dot_product_attention(Q[0, 0], K[0, 0], K[0, 0]),
    "queries for all sequences": lambda: F.scaled_dot_product_attention(Q[:1], K, K),
    "groups without a batch": lambda: F.scaled_dot_product_attention(Q[0].repeat(2, 1, 1), K[0], K[0], enable_gqa=True),
    "groups with keys for all sequences": lambda: F.scaled_dot_product_attention(
        Q.repeat(1, 2, 1, 1), K[:1], K[:1], enable_gqa=True
    ),
    "by name": lambda: F.scaled_dot_product_attention(query=Q, key=K, value=K),
    "five dimensions": lambda: F.scaled_dot_product_attention(Q[None], K[None], K[None]),
}


@pytest.mark.parametrize("call", CALLS)
def test_every_legal_call_of_the_kernel_is_measured(call: str) -> None:
    largest = {
        "without batch and heads": (Q[0, 0] @ K[0, 0].mT)[None, None],
        "queries for all sequences": Q[:1] @ K.mT,
        "groups without a batch": (Q[0].repeat(2, 1, 1) @ K[0].repeat_interleave(2, 0).mT)[None],
        "groups with keys for all sequences": Q.repeat(1, 2, 1, 1) @ K[:1].repeat_interleave(2, 1).mT,
    }.get(call, Q @ K.mT)
    stats = LogitMonitor(Written(lambda *_: CALLS[call]()), (Q, K)).measure()[""]
    torch.testing.assert_close(stats.max, largest.amax((0, 2, 3)) / 2)


def test_attention_to_nothing_is_passed_over() -> None:
    def attend(q: Tensor, k: Tensor) -> Tensor:
        F.scaled_dot_product_attention(q[:0], k[:0], k[:0])
        (q[:0] @ k[:0].mT).softmax(-1)
        return F.scaled_dot_product_attention(q, k, k)

    assert list(LogitMonitor(Written(attend), (Q, K)).measure()) == [""]


@pytest.mark.parametrize(
    "probe",
    [None, "tokens", torch.utils.data.DataLoader(torch.utils.data.TensorDataset(Q))],
    ids=["None", "str", "DataLoader"],
)
def test_what_is_no_batch_is_refused(probe: object) -> None:
    with pytest.raises(ValueError, match="a probe is a batch that the model is called with"):
        LogitMonitor(nn.Linear(2, 2), probe)
