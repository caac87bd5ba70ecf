"""Attentions as people write them: each way to mask, to scale and to take a softmax is measured as by hand.

Shapes: B batch, H heads, I queries, J keys, T tokens, D width, K head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, scaled_dot_product_attention, softmax

import by_hand
from quacklr import LogitMonitor, LogitPath, QKClip, check, mha, packed

B, T, D, H = 3, 7, 16, 4
MIN = torch.finfo(torch.float32).min
MASKS = {"-1e4": -1e4, "-1e9": -1e9, "finfo.min": MIN, "-inf": -math.inf}
Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # q, k, v (B, H, T, K), what may be seen (B, 1, T, T)


class Attention(nn.Module):
    """Projections, and an attention that is given; the logits are q . k / 2."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))
        self.attend, self.num_heads = attend, H

    def forward(self, x_BTD: Tensor, seen_BTT: Tensor) -> Tensor:
        q, k, v = (by_hand.heads(each(x_BTD), H) for each in (self.q, self.k, self.v))
        return self.o(self.attend(q, k, v, seen_BTT).transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x_BTD: Tensor, seen_BTT: Tensor) -> Tensor:
        return self.attention(x_BTD, seen_BTT)


def seen() -> Tensor:
    """Causal, with left padding in the second sequence and right padding in the third."""
    mask_BT = torch.ones(B, T)
    mask_BT[1, :3] = mask_BT[2, -2:] = 0
    return by_hand.allowed(mask_BT)


def inputs() -> Tensor:
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(1))


def written(a: Any, x_BTD: Tensor) -> by_hand.Written:
    q, k, v = (by_hand.heads(by_hand.linear(each, x_BTD.double()), H) for each in (a.q, a.k, a.v))
    return by_hand.Written(q @ k.mT / 2, v, a.o.weight.detach().double(), a.o.bias.detach().double())


@torch.no_grad()
def assert_as_by_hand(attention: Attention, scale: float = 2.0, pairs: Tensor | None = None) -> None:
    model, pairs = Model(attention), seen() if pairs is None else pairs
    for each in model.parameters():
        each.mul_(scale)
    monitor, before = LogitMonitor(model, (inputs(), pairs)), None
    for _ in range(2):
        now = written(model.attention, inputs())
        now.check(pairs, model(inputs(), pairs))
        stats = monitor.measure()
        assert list(stats) == ["attention"]
        by_hand.assert_measured(stats["attention"], by_hand.statistics(now, pairs, before), "attention")
        before = now
        for each in model.parameters():
            each.add_(0.1 * torch.randn(each.shape, generator=torch.Generator().manual_seed(2)))


def built(attend: Attend, kind: type[Attention] = Attention) -> Attention:
    torch.manual_seed(0)
    return kind(attend)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    "how", ["masked_fill", "where", "added", "added twice", "in place", "filled in place", "a view"]
)
def test_a_mask_in_numbers_is_a_mask(how: str, mask: str) -> None:
    """Queries that may look at nothing are among them: their softmax is over numbers that are all a mask's."""

    def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        value, scores = MASKS[mask], q @ k.mT / 2
        added = torch.zeros(seen.shape).masked_fill(~seen, value)
        if how == "masked_fill":
            scores = scores.masked_fill(~seen, value)
        elif how == "where":
            scores = torch.where(seen, scores, value)
        elif how == "in place":
            scores += added
        elif how == "filled in place":
            scores.masked_fill_(~seen, value)
        elif how == "a view":  # is filled, and the scores with it
            scores.view(B * H, T, T).masked_fill_(~seen.expand_as(scores).reshape(B * H, T, T), value)
        else:  # twice: padding and future, each with its own mask
            scores = scores + added + (added if how == "added twice" else 0)
        return scores.softmax(-1).nan_to_num() @ v

    assert_as_by_hand(built(attend))


def scaled_in_place(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    scores = q @ k.mT
    scores += torch.zeros(seen.shape).masked_fill(~seen, -1e9)
    scores /= math.sqrt(D // H)
    return scores.softmax(-1) @ v


def scaled_after_a_view(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    scores = torch.empty(B, H, T, T)
    torch.matmul(q, k.mT, out=scores)
    flat = scores.view(B * H, T, T)
    flat.div_(2.0)
    scores[~seen.expand_as(scores)] = -1e9
    return scores.softmax(-1) @ v


def reused(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """What the softmax was taken of is written over afterwards."""
    scores = (q @ k.mT / 2).masked_fill(~seen, -math.inf)
    shares = scores.softmax(-1).nan_to_num()
    scores.fill_(1000.0)
    return shares @ v


def multiplied_out(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """GPT's way: the mask's zeros multiply, and a large number is taken off in their place."""
    ones = seen.float()
    scores = q @ k.mT / 2
    return softmax(scores * ones - 1e4 * (1 - ones), dim=-1) @ v


def one_sequence_at_a_time(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    scores = torch.matmul(q, k.mT).mul_(0.5)
    for b in range(B):
        scores[b].masked_fill_(~seen[b], -1e9)
    return scores.softmax(-1) @ v


def alpha_of_an_addition(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    return torch.add(q @ k.mT / 2, (~seen).float(), alpha=-1e9).softmax(dim=-1) @ v


def of_an_unwritten_tensor(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """beta=0: what is in the tensor that is added to is of no account."""
    flat_q, flat_k, rubbish = (q.reshape(B * H, T, -1), k.reshape(B * H, T, -1), torch.full((B * H, T, T), -1e9))
    scores = torch.baddbmm(rubbish, flat_q, flat_k.mT, beta=0, alpha=0.5).view(B, H, T, T)
    return scores.masked_fill(~seen, -1e9).softmax(-1) @ v


def by_einsum(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    scores = torch.einsum("bhid,bhjd->bhij", q, k) * (D // H) ** -0.5
    return torch.einsum("bhij,bhjd->bhid", softmax(scores.masked_fill(~seen, -1e9), dim=3, dtype=torch.float32), v)


def stabilised(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """The row's maximum is taken away first; the logits are what was there before."""
    scores = (q @ k.mT / 2).masked_fill(~seen, MIN)
    return softmax(scores - scores.amax(dim=-1, keepdim=True), dim=-1) @ v


def logsumexp_beside(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Granite's way to a learned sink: a gate from the logsumexp, then a softmax of the same; here the gate is open."""
    scores = (q @ k.mT / 2).masked_fill(~seen, MIN)
    gate = (torch.logsumexp(scores, dim=-1) + 1e30).sigmoid()
    return softmax(scores, dim=-1) @ v * gate[..., None].clamp(min=1.0)


def scaled_first(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    return scaled_dot_product_attention(q / 2, k, v, torch.zeros(seen.shape).masked_fill(~seen, -1e4), scale=1.0)


def keywords(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    return scaled_dot_product_attention(query=q, key=k, value=v, attn_mask=seen, dropout_p=0.0)


@pytest.mark.parametrize(
    "attend",
    [
        *(
            scaled_in_place,
            scaled_after_a_view,
            reused,
            by_einsum,
            stabilised,
            logsumexp_beside,
            scaled_first,
            keywords,
        ),
        *(multiplied_out, one_sequence_at_a_time, alpha_of_an_addition, of_an_unwritten_tensor),
    ],
    ids=lambda attend: attend.__name__,
)
def test_logits_are_what_goes_into_the_softmax_however_they_were_made(attend: Attend) -> None:
    assert_as_by_hand(built(attend))


class WithSoftmax(Attention):
    """Its softmax is a module of its own; the attention is still this module's."""

    def __init__(self, attend: Attend) -> None:
        super().__init__(attend)
        self.softmax = nn.Softmax(dim=-1)
        self.attend = lambda q, k, v, seen: self.softmax((q @ k.mT / 2).masked_fill(~seen, -1e9)) @ v


def test_a_softmax_that_is_a_module_is_its_attentions() -> None:
    assert_as_by_hand(built(by_einsum, WithSoftmax))


def flat_bmm(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    flat_q, flat_k, flat_v = (each.reshape(len(q) * H, T, -1) for each in (q, k, v))
    mask = torch.zeros(len(q), H, T, T).masked_fill(~seen, -1e9).view(len(q) * H, T, T)
    return ((torch.bmm(flat_q, flat_k.mT) / 2 + mask).softmax(-1) @ flat_v).view(len(q), H, T, -1)


def flat_baddbmm(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    flat_q, flat_k, flat_v = (each.reshape(len(q) * H, T, -1) for each in (q, k, v))
    mask = torch.zeros(len(q), H, T, T).masked_fill(~seen, -math.inf).view(len(q) * H, T, T)
    shares = softmax(torch.baddbmm(mask, flat_q, flat_k.mT, beta=1, alpha=0.5), dim=-1).nan_to_num()
    return torch.bmm(shares, flat_v).view(len(q), H, T, -1)


@pytest.mark.parametrize("attend", [flat_bmm, flat_baddbmm], ids=lambda attend: attend.__name__)
def test_batch_times_heads_in_one_axis_is_measured_one_sequence_at_a_time(attend: Attend) -> None:
    assert_as_by_hand(built(attend))


@pytest.mark.parametrize("attend", [scaled_first, by_einsum, stabilised], ids=lambda attend: attend.__name__)
def test_shares_that_are_all_one_keys_have_no_entropy_and_are_numbers(attend: Attend) -> None:
    assert_as_by_hand(built(attend), scale=12.0)


@pytest.mark.parametrize("attend", [scaled_first, by_einsum], ids=lambda attend: attend.__name__)
def test_a_query_that_sees_one_key_does_not_count_for_the_sink(attend: Attend) -> None:
    pairs = torch.eye(T, dtype=torch.bool).expand(B, 1, T, T).clone()
    pairs[:, :, -1] = True
    assert_as_by_hand(built(attend), pairs=pairs)


ROUTERS: dict[str, Callable[[Tensor, nn.Linear], Tensor]] = {
    "a layer": lambda x_BTD, router: router(x_BTD),
    "matmul": lambda x_BTD, router: x_BTD @ router.weight.T,
    "einsum": lambda x_BTD, router: torch.einsum("btd,ed->bte", x_BTD, router.weight),
    "a cast weight": lambda x_BTD, router: (x_BTD.double() @ router.weight.double().T).float(),
    "cosines": lambda x_BTD, router: normalize(x_BTD, dim=-1) @ normalize(router.weight, dim=-1).T,
    "four axes": lambda x_BTD, router: router(x_BTD)[:, None].expand(B, 2, T, T),
}


class Router(nn.Module):
    """An attention, then experts chosen by a softmax over (B, T, E), as many experts as tokens, and a classifier's."""

    def __init__(self, attend: Attend, how: str) -> None:
        super().__init__()
        self.attention, self.router, self.how = Attention(attend), nn.Linear(D, T), how
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(T))

    def forward(self, x_BTD: Tensor, seen_BTT: Tensor) -> Tensor:
        x_BTD = self.attention(x_BTD, seen_BTT)
        shares = ROUTERS[self.how](x_BTD, self.router).softmax(-1)
        shares_BTE = shares[:, 0] if shares.ndim == 4 else shares
        each_BTED = torch.stack([expert(x_BTD) for expert in self.experts], dim=2)
        return (shares_BTE[..., None] * each_BTED).sum(2).log_softmax(-1)


@pytest.mark.parametrize("attend", [scaled_first, by_einsum], ids=lambda attend: attend.__name__)
@pytest.mark.parametrize("how", ROUTERS)
def test_a_router_is_no_attention(how: str, attend: Attend) -> None:
    torch.manual_seed(0)
    assert list(LogitMonitor(Router(attend, how), (inputs(), seen())).measure()) == ["attention"]


def test_a_model_with_only_a_router_is_refused() -> None:
    torch.manual_seed(0)
    with pytest.raises(ValueError, match="no attention"):
        LogitMonitor(nn.Sequential(nn.Linear(D, T), nn.Softmax(dim=-1)), inputs()).measure()


class Recurrent(nn.Module):
    """Linear attention: a product of queries and keys, and no softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.in_mix, self.out_mix = nn.Linear(D, 2 * D), nn.Linear(D, D)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k = self.in_mix(x_BTD).relu().chunk(2, -1)
        return self.out_mix(q @ (k.mT @ x_BTD))

    def logit_paths(self) -> list[LogitPath]:
        return mha(*packed(self.in_mix, ("q", H, D // H), ("k", H, D // H)))


def test_a_model_without_softmax_attention_is_told_that_it_may_have_none() -> None:
    torch.manual_seed(0)
    model = Recurrent()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told = "If (the model has no softmax attention|it has none) .*Mamba, RWKV"
    with pytest.raises(ValueError, match=told):
        LogitMonitor(model, inputs()).measure()
    with pytest.raises(ValueError, match=told):
        check(model, optimizer, inputs())
    QKClip(model, optimizer)
    model(inputs()).sum().backward()
    with pytest.raises(RuntimeError, match=told):
        optimizer.step()
