"""QK clip: which forwards count, which weights share a head's factor, in any loop and with any optimizer.

That a step is Kimi K2's is tested in test_attention_models.py.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from lab_runs import block
from models import assert_equal
from quacklr import LogitPath, QKClip, QuacK, logit_paths, mha, packed
from quacklr.lab.model import MLA, Shape, build

X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(2))
THRESHOLD = 0.05


class Attention(nn.Module):
    """Two heads, with or without an adapter on the query."""

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k = (nn.Linear(8, 8, bias=False) for _ in range(2))
        self.a = nn.Linear(8, rank, bias=False) if rank else None
        self.b = nn.Linear(rank, 8, bias=False) if rank else None

    def logits(self, x: Tensor) -> Tensor:
        asked = self.q(x) + (self.b(self.a(x)) if self.a and self.b else 0)
        q, k = (each.unflatten(-1, (2, 4)).transpose(1, 2) for each in (asked, self.k(x)))
        return q @ k.mT

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(x).softmax(-1)

    def largest(self, x: Tensor = X) -> Tensor:
        return self.logits(x).amax((0, 2, 3)).detach()

    def logit_paths(self) -> list[LogitPath]:
        (q,), (k,) = packed(self.q, ("q", 2, 4)), packed(self.k, ("k", 2, 4))
        if self.a is None or self.b is None:
            return mha(q, k)
        (b,), (a,) = packed(self.b, ("b", 2, 4)), packed(self.a, ("a", 1, self.a.out_features))
        return [*mha(q, k), LogitPath((a, b, k), heads=2)]


def step(model: nn.Module, *optimizers: torch.optim.Optimizer, x: Tensor = X) -> None:
    """A step of nothing but the clip, if the learning rate is tiny."""
    model(x).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()


def assert_clipped(model: Attention) -> None:
    torch.testing.assert_close(model.largest(), torch.full((2,), THRESHOLD))


def tiny(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=1e-12)


@pytest.mark.parametrize("frozen", [False, True])
def test_every_term_of_a_sum_is_scaled(frozen: bool) -> None:
    """An adapter's product is a path of its own: the query is a sum, and all of it must shrink, by the same factor."""
    model = Attention(rank=3)
    model.q.requires_grad_(not frozen)
    optimizer = tiny(model)
    assert (model.largest() > THRESHOLD).all()
    QKClip(model, optimizer, THRESHOLD)
    step(model, optimizer)
    assert_clipped(model)


def test_what_is_frozen_is_left_alone_and_its_share_is_taken_by_the_rest() -> None:
    model = Attention()
    model.k.requires_grad_(False)
    before, optimizer = model.k.weight.clone(), tiny(model)
    QKClip(model, optimizer, THRESHOLD)
    step(model, optimizer)
    assert_equal(model.k.weight, before)
    assert_clipped(model)


def test_a_path_on_which_nothing_trains_is_told() -> None:
    model = Attention(rank=3)
    for frozen in (model.q, model.k):
        frozen.requires_grad_(False)
    with pytest.warns(UserWarning, match="cannot scale all terms of the logits of the model: .* is frozen"):
        QKClip(model, SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))


def test_mla_with_one_head_is_scaled_as_with_many() -> None:
    spec = MLA(heads=1, nope_dim=8, rope_dim=4, v_head_dim=8, d_cq=16, d_ckv=8)
    model = build(Shape(d_model=32, layers=1, d_ff=48, context=12, vocab=50, init_std=0.4), spec, seed=0)
    optimizer, before = tiny(model), {name: value.clone() for name, value in model.state_dict().items()}
    clip = QKClip(model, optimizer, THRESHOLD)
    step(model, optimizer, x=torch.arange(12)[None])
    gamma = THRESHOLD / float(clip.max_logits()["blocks.0.attention"])
    for role, factor in (("uq", gamma**0.5), ("uk", gamma**0.5), ("qr", gamma), ("dq", 1), ("dkv", 1), ("kr", 1)):
        weight = getattr(block(model).attention, role).weight.detach()
        torch.testing.assert_close(weight, factor * before[f"blocks.0.attention.{role}.weight"], msg=role)


class Tied(nn.Module):
    """Two attentions with the same weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Attention(), Attention()
        self.second.q, self.second.k = self.first.q, self.first.k

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x).sum() + self.second(0.5 * x).sum() ** 2


def test_tied_weights_are_scaled_once_by_what_the_worst_attention_needs() -> None:
    model = Tied()
    optimizer = tiny(model)
    QKClip(model, optimizer, THRESHOLD)
    step(model, optimizer)
    assert_clipped(model.first)


def test_a_factor_of_16_bit_weights_is_not_rounded_to_16_bits() -> None:
    model = Attention().bfloat16()
    optimizer, before = tiny(model), model.q.weight.detach().float()
    clip = QKClip(model, optimizer, THRESHOLD)
    step(model, optimizer, x=X.bfloat16())
    factor = (THRESHOLD / clip.max_logits()[""]).sqrt().repeat_interleave(4)[:, None]
    assert_equal(model.q.weight, (before * factor).bfloat16())
    assert not torch.equal(model.q.weight, before.bfloat16() * factor.bfloat16())


def test_training_forwards_since_the_last_step_count_and_no_others() -> None:
    """All micro-batches; not those in eval mode or without gradients. NaN and inf hide no other."""
    model = Attention()
    optimizer = tiny(model)
    clip = QKClip(model, optimizer, threshold=1e4)
    for x in (X, X * torch.nan, 2 * X, X * torch.inf):
        model(x)
    with torch.no_grad():
        model(4 * X)
    model.eval()(4 * X)
    torch.testing.assert_close(clip.max_logits()[""], model.largest(2 * X))
    step(model.train(), optimizer)
    model(X)
    torch.testing.assert_close(clip.max_logits()[""], model.largest())


def test_under_autocast_the_maxima_are_in_float32() -> None:
    model = Attention()
    clip = QKClip(model, tiny(model))
    with torch.autocast("cpu", torch.bfloat16):
        model(X)
    largest = clip.max_logits()[""]
    assert largest.dtype == torch.float32
    torch.testing.assert_close(largest, model.largest(), rtol=0.02, atol=0.02)


def test_heads_below_the_threshold_stay_bitwise_also_if_their_largest_logit_is_negative() -> None:
    model = Attention()
    with torch.no_grad():
        model.k.weight[4:] = -model.q.weight[4:]
    x = torch.randn(2, 1, 8)  # one token: -|q|^2 in the second head
    optimizer, before = tiny(model), model.q.weight.detach().clone()
    clip = QKClip(model, optimizer, 1e-3)
    step(model, optimizer, x=x)
    assert float(clip.max_logits()[""][1]) < 0
    assert_equal(model.q.weight[4:], before[4:])


def test_a_second_step_without_a_training_forward_does_not_clip_again() -> None:
    model = Attention()
    optimizer = tiny(model)
    clip = QKClip(model, optimizer, THRESHOLD)
    step(model, optimizer)
    with pytest.warns(UserWarning, match="saw no training forward since the last step.*eval mode"):
        step(model.eval(), optimizer)
    assert clip.max_logits() == {}
    assert_clipped(model)


def test_an_attention_that_is_never_heard_is_named_once() -> None:
    model = nn.ModuleList([Attention(), Attention()])
    optimizer = tiny(model)
    QKClip(model, optimizer)
    for expected in (1, 0):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step(model[0], optimizer)
        assert ["saw no logits of 1 before" in str(each.message) for each in caught] == [True] * expected


def test_each_optimizer_takes_the_maxima_since_its_own_last_step() -> None:
    model = Attention()
    of_q, of_k = SGD([model.q.weight], lr=1e-12), SGD([model.k.weight], lr=1e-12)
    QKClip(model, [of_q, of_k], THRESHOLD)
    step(model, of_k)  # k has its share; what it was taken from is not forgotten for q
    step(model, of_q, x=0.1 * X)
    assert_clipped(model)


@pytest.mark.parametrize("clip_first", [False, True])
def test_with_quack_the_step_is_scaled_and_then_clipped_in_either_order(clip_first: bool) -> None:
    model = Attention()
    optimizer = tiny(model)
    kept = [
        QKClip(model, optimizer, THRESHOLD) if clips else QuacK(model, optimizer, tau=0.1)
        for clips in (clip_first, not clip_first)
    ]
    step(model, optimizer)
    assert_clipped(model)
    assert len(kept) == 2


class Own(SGD):
    """Its step calls its parent's, so torch runs the hooks of a step twice; then it writes the weights itself."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        params = self.param_groups[0]["params"]
        kept = [param.clone() for param in params]
        super().step(closure)
        for param, value in zip(params, kept, strict=True):
            param.copy_(value)


def test_an_optimizer_whose_step_calls_its_parents_clips_once_at_the_end() -> None:
    model = Attention()
    tiny(model)  # from here on torch runs the hooks of its step too
    optimizer = Own(model.parameters(), lr=1e-12)
    clip = QKClip(model, optimizer, THRESHOLD)
    step(model, optimizer)
    assert_clipped(model)
    assert clip.max_logits()


class Unknown(Attention):
    """A class that neither declares its paths nor is in a table."""

    logit_paths: Any = None


def test_attention_that_no_table_has_is_measured_before_and_clipped_in_the_first_step() -> None:
    attention = Unknown()
    model = nn.Sequential(attention)
    optimizer = tiny(model)
    with pytest.raises(ValueError, match=r"^0: no table has the class Unknown, .*logit_paths\(model, batch\)"):
        QKClip(model, optimizer, THRESHOLD)
    QKClip(logit_paths(model, X), optimizer, THRESHOLD)
    step(model, optimizer)
    assert_clipped(attention)


def test_parameters_that_were_replaced_after_attaching_are_an_error() -> None:
    model = Attention()
    optimizer = tiny(model)
    QKClip(model, optimizer)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    with pytest.raises(RuntimeError, match="q: 2 of 2 weights on the paths are no longer in the model"):
        step(model, optimizer)


def test_what_cannot_be_clipped_is_refused() -> None:
    model = Attention()
    optimizer = tiny(model)
    with pytest.raises(ValueError, match="use DistributedDataParallel"):
        QKClip(nn.DataParallel(model), optimizer)
    with pytest.raises(ValueError, match=r"pass the model, or the paths that logit_paths\(model, batch\) returns"):
        QKClip(model.logit_paths(), optimizer)
    with pytest.raises(ValueError, match="threshold=-1"):
        QKClip(model, optimizer, threshold=-1)
    with QKClip(model, optimizer), pytest.raises(ValueError, match=r"another QKClip is attached to its .*remove\(\)"):
        QKClip(model, optimizer)
    QKClip(model, optimizer)
