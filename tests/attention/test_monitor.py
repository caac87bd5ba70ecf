"""The monitor's statistics equal those of logits computed by hand, and monitoring does not change a run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right

import quacklr.attention.accumulator
import quacklr.attention.logits
from lab_runs import block
from models import assert_equal
from quacklr import LogitMonitor
from quacklr.lab.model import MHA, MLA, Decoder, Shape, build

SHAPE = Shape(d_model=32, layers=2, d_ff=48, context=12, vocab=50, init_std=0.3)
GQA = MHA(heads=4, kv_heads=2, head_dim=8)
LATENT = MLA(heads=3, nope_dim=8, rope_dim=4, v_head_dim=8, d_cq=16, d_ckv=8)


def probe() -> Tensor:
    return torch.randint(0, 50, (3, 12), generator=torch.Generator().manual_seed(1))


def inputs_of_first_attention(model: Decoder) -> Tensor:
    normed: Tensor = block(model).attention_norm(model.embedding(probe()))
    return normed


def logits_by_hand(model: Decoder) -> Tensor:
    """(B, H, I, J) of the first block, for both kinds, before any mask."""
    a, x = block(model).attention, inputs_of_first_attention(model)
    if hasattr(a, "q"):
        q, k = model.rotary(a.q(x).unflatten(-1, (4, 8))), model.rotary(a.k(x).unflatten(-1, (2, 8)))
        return torch.stack([q[:, :, h] @ k[:, :, h // 2].mT for h in range(4)], dim=1) / 8**0.5
    nope = torch.einsum("bihd,bjhd->bhij", a.uq(a.dq(x)).unflatten(-1, (3, 8)), a.uk(a.dkv(x)).unflatten(-1, (3, 8)))
    q, k = model.rotary(a.qr(a.dq(x)).unflatten(-1, (3, 4))), model.rotary(a.kr(x)[:, :, None])[:, :, 0]
    return (nope + torch.einsum("bihd,bjd->bhij", q, k)) / 12**0.5


def statistics_by_hand(logit: Tensor) -> tuple[list[float], list[float]]:
    """Largest logit and mean entropy of each head, one query at a time."""
    largest, entropy = [], []
    for head in range(logit.shape[1]):
        seen = [logit[b, head, i, : i + 1] for b in range(logit.shape[0]) for i in range(logit.shape[2])]
        largest.append(max(float(each.max()) for each in seen))
        shares = [each.softmax(0) for each in seen]
        entropy.append(sum(float(-(share * share.log()).sum()) for share in shares) / len(shares))
    return largest, entropy


@pytest.mark.parametrize("spec", [GQA, LATENT], ids=["GQA", "MLA"])
@pytest.mark.parametrize("cap", [None, 2.0], ids=["plain", "capped"])
@torch.no_grad()
def test_statistics_are_those_of_logits_made_by_hand(spec: MHA | MLA, cap: float | None) -> None:
    model = build(SHAPE, spec, seed=0)
    for attention in model.attentions().values():
        attention.cap = cap
    stats = LogitMonitor(model, probe()).measure()
    assert list(stats) == ["blocks.0.attention", "blocks.1.attention"]
    logit = logits_by_hand(model)
    largest, entropy = statistics_by_hand(logit if cap is None else cap * (logit / cap).tanh())
    assert max(largest) > 1
    torch.testing.assert_close(stats["blocks.0.attention"].max, torch.tensor(largest))
    torch.testing.assert_close(stats["blocks.0.attention"].entropy, torch.tensor(entropy))


def moved(model: Decoder, seed: int) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn(param.shape, generator=torch.Generator().manual_seed(seed)) * 0.05)


@torch.no_grad()
def test_the_change_is_since_the_last_kept_measurement() -> None:
    model = build(SHAPE, GQA, seed=0)
    monitor, seen = LogitMonitor(model, probe()), [logits_by_hand(model)]
    assert monitor.measure()["blocks.0.attention"].mean_change.isnan().all()
    for step, (keep, since) in enumerate([(False, 0), (True, 0), (True, 2)]):
        moved(model, step)
        seen.append(logits_by_hand(model))
        measured = monitor.measure(keep)["blocks.0.attention"].mean_change
        lower = torch.ones(12, 12).tril().bool()
        expected = (seen[-1] - seen[since])[:, :, lower].abs().mean((0, 2))
        torch.testing.assert_close(measured, expected)


def test_a_resumed_monitor_measures_its_first_change_from_where_it_was() -> None:
    model = build(SHAPE, GQA, seed=0)
    first, second = LogitMonitor(model, probe()), LogitMonitor(model, probe())
    first.measure()
    second.load_state_dict(first.state_dict())
    moved(model, 0)
    name = "blocks.1.attention"
    assert_equal(first.measure()[name].mean_change, second.measure()[name].mean_change)


def test_small_chunks_and_a_small_sample_give_the_same_maxima(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(SHAPE, GQA, seed=0)
    whole = LogitMonitor(model, probe()).measure()["blocks.0.attention"]
    monkeypatch.setattr(quacklr.attention.logits, "CHUNK", 4 * 12 * 5)  # five queries at a time
    monkeypatch.setattr(quacklr.attention.accumulator, "KEPT", 3 * 4 * 12 * 4)  # four of them kept
    monitor = LogitMonitor(model, probe())
    parts = monitor.measure()["blocks.0.attention"]
    torch.testing.assert_close(parts.max, whole.max)
    torch.testing.assert_close(parts.entropy, whole.entropy)
    assert monitor.state_dict()["blocks.0.attention"].shape == (3, 4, 4, 12)


class Dropping(nn.Module):
    """A model with dropout, some of it even in eval mode, whose training depends on the random state."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder, self.drop = build(SHAPE, GQA, seed=0), nn.Dropout(0.5)
        self.frozen = nn.Dropout(0.5).eval()

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.drop(self.frozen(self.decoder(tokens)))
        return nn.functional.dropout(logits, 0.1, training=True)


def trained(watched: bool) -> Dropping:
    torch.manual_seed(0)
    model = Dropping()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = LogitMonitor(model, probe())
    for _ in range(3):
        if watched:
            monitor.measure()
        model(probe()).square().mean().backward()
        if watched:
            monitor.measure()
        optimizer.step()
        optimizer.zero_grad()
    assert model.training
    assert model.drop.training
    assert not model.frozen.training
    return model


def test_a_watched_run_is_bitwise_the_unwatched_one() -> None:
    for one, other in zip(trained(True).parameters(), trained(False).parameters(), strict=True):
        assert_equal(one, other)


@pytest.mark.parametrize("form", ["dict", "tuple"])
def test_a_probe_is_what_the_model_takes(form: str) -> None:
    model = build(SHAPE, GQA, seed=0)
    given = {"tokens_BT": probe()} if form == "dict" else (probe(), probe())
    one, other = LogitMonitor(model, given).measure(), LogitMonitor(model, probe()).measure()
    assert_equal(one["blocks.1.attention"].max, other["blocks.1.attention"].max)


def test_a_mask_a_query_that_may_look_at_nothing_and_a_scale_are_respected() -> None:
    class Masked(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            mask = torch.tensor([[False, False, False], [True, True, False], [True, False, True]])
            return nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask, scale=2.0)

    q = torch.randn(1, 1, 3, 4, generator=torch.Generator().manual_seed(0))
    logit = 2 * q[0, 0] @ q[0, 0].mT
    stats = LogitMonitor(Masked(), q).measure()[""]
    seen = [logit[1, :2], logit[2, [0, 2]]]
    assert float(stats.max) == pytest.approx(max(float(each.max()) for each in seen))
    entropy = [float(-(each.softmax(0) * each.log_softmax(0)).sum()) for each in seen]
    assert float(stats.entropy) == pytest.approx(sum(entropy) / 2)


def test_a_model_without_attention_is_refused() -> None:
    with pytest.raises(ValueError, match="no attention was seen in a forward of Linear"):
        LogitMonitor(nn.Linear(3, 3), torch.ones(2, 3)).measure()


def test_the_logits_of_torchs_own_attention_are_seen() -> None:
    """Judge: its parameters, cut by hand. torch hides the inside of it from function modes, so it is opened."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 16, batch_first=True)
    x = torch.randn(2, 5, 16)
    attention = layer.self_attn
    q, k = (attention.in_proj_weight[i : i + 16] for i in (0, 16))
    q_BHID, k_BHID = ((x @ w.T).unflatten(2, (4, 4)).transpose(1, 2) for w in (q, k))
    largest = (q_BHID @ k_BHID.mT / 2).amax((0, 2, 3))
    torch.testing.assert_close(LogitMonitor(layer, x).measure()["self_attn"].max, largest.detach())


@pytest.mark.parametrize("by_hand", [False, True], ids=["linear", "matmul"])
def test_learned_queries_attend_too(by_hand: bool) -> None:
    """A pooling head asks with a parameter: projected, it is a query like any other."""

    class Pooling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ask, self.q, self.k = nn.Parameter(torch.randn(1, 3, 8)), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            asked = self.ask.float() @ self.q.weight.T if by_hand else self.q(self.ask.float()) - self.q.bias
            q, k = (each.unflatten(-1, (2, 4)).transpose(1, 2) for each in (asked, self.k(x)))
            return (q @ k.mT).softmax(-1) @ k

    torch.manual_seed(0)
    model, x = Pooling(), torch.randn(2, 5, 8)
    q, k = (each.unflatten(-1, (2, 4)).transpose(1, 2) for each in (model.ask @ model.q.weight.T, model.k(x)))
    torch.testing.assert_close(LogitMonitor(model, x).measure()[""].max, (q @ k.mT).amax((0, 2, 3)).detach())


def entropy_of(logits: Tensor) -> Tensor:
    """(H,): the mean over queries."""
    share = logits.softmax(-1)
    return -torch.special.xlogy(share, share).sum(-1).mean((0, 2))


def test_a_mask_is_remembered_through_changes_of_shape() -> None:
    class Reshaping(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            logits = (q.flatten(0, 1) @ q.flatten(0, 1).mT).masked_fill(~torch.ones(5, 5).tril().bool(), -1e4)
            return logits.view(-1, 3, 5, 5).transpose(1, 2).contiguous().transpose(1, 2).softmax(-1)

    q = torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(0))
    monitor = LogitMonitor(Reshaping(), q)
    monitor.measure()
    monitor.probe = q + 0.1
    stats = monitor.measure()[""]
    seen = torch.ones(5, 5).tril().bool()
    before, now = (each @ each.mT for each in (q, q + 0.1))
    torch.testing.assert_close(stats.mean_change, (now - before)[..., seen].abs().mean((0, 2)))
    torch.testing.assert_close(stats.entropy, entropy_of(now.masked_fill(~seen, -torch.inf)))


def test_torchs_own_causal_masks_are_respected() -> None:
    class Aligned(nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            mask = causal_lower_right(3, 5)
            return nn.functional.scaled_dot_product_attention(q, k, k, attn_mask=mask)

    q, k = (torch.randn(2, 2, size, 4, generator=torch.Generator().manual_seed(size)) for size in (3, 5))
    logits = (q @ k.mT / 2).masked_fill(~torch.ones(3, 5).tril(2).bool(), -torch.inf)
    stats = LogitMonitor(Aligned(), (q, k)).measure()[""]
    torch.testing.assert_close(stats.max, logits.amax((0, 2, 3)))
    torch.testing.assert_close(stats.entropy, entropy_of(logits))


def test_what_a_model_counts_in_a_buffer_is_not_counted_up() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, q: Tensor) -> Tensor:
            self.get_buffer("calls").add_(1)
            return nn.functional.scaled_dot_product_attention(q, q, q)

    model = Counting()
    LogitMonitor(model, torch.randn(1, 1, 3, 4)).measure()
    assert float(model.get_buffer("calls")) == 0
