"""QK clip with LoRA, tied and frozen weights, forwards that raise, several optimizers, and QuacK."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from lab_runs import block
from models import assert_equal
from quacklr import LogitPath, QKClip, QuacK, logit_paths, mha, packed
from quacklr.lab.model import MHA, Decoder, Shape, build

SHAPE = Shape(d_model=32, layers=2, d_ff=48, context=12, vocab=50, init_std=0.4)
FULL = MHA(heads=4, kv_heads=4, head_dim=8)
TOKENS = torch.randint(0, 50, (3, 12), generator=torch.Generator().manual_seed(1))
X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(2))


class Attention(nn.Module):
    """Two heads, with or without an adapter on the query."""

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        self.q, self.k = (nn.Linear(8, 8, bias=False) for _ in range(2))
        self.a = nn.Linear(8, rank, bias=False) if rank else None
        self.b = nn.Linear(rank, 8, bias=False) if rank else None

    def logits(self, x: Tensor) -> Tensor:
        asked = self.q(x) + (self.b(self.a(x)) if self.a and self.b else 0)
        q, k = (each.unflatten(-1, (2, 4)).transpose(1, 2) for each in (asked, self.k(x)))
        return q @ k.mT

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(x).softmax(-1)

    def largest(self) -> Tensor:
        return self.logits(X).amax((0, 2, 3)).detach()

    def logit_paths(self) -> list[LogitPath]:
        (q,), (k,) = packed(self.q, ("q", 2, 4)), packed(self.k, ("k", 2, 4))
        if self.a is None or self.b is None:
            return mha(q, k)
        (b,), (a,) = packed(self.b, ("b", 2, 4)), packed(self.a, ("a", 1, self.a.out_features))
        return [*mha(q, k), LogitPath((a, b, k), heads=2)]


def clipped(model: nn.Module, threshold: float = 0.05) -> QKClip:
    """After a step of nothing but the clip."""
    optimizer = SGD(model.parameters(), lr=1e-12)
    clip = QKClip(model, optimizer, threshold)
    model(X).square().mean().backward()
    optimizer.step()
    return clip


def test_every_term_of_a_sum_is_scaled() -> None:
    """An adapter's product is a path of its own: the query is a sum, and all of it must shrink."""
    torch.manual_seed(0)
    model = Attention(rank=3)
    assert (model.largest() > 0.05).all()
    clipped(model)
    torch.testing.assert_close(model.largest(), torch.full((2,), 0.05))


def test_what_is_frozen_is_left_alone_and_its_share_is_taken_by_the_rest() -> None:
    torch.manual_seed(0)
    model = Attention()
    model.k.requires_grad_(False)
    before = model.k.weight.clone()
    clipped(model)
    assert_equal(model.k.weight, before)
    torch.testing.assert_close(model.largest(), torch.full((2,), 0.05))


def test_a_path_on_which_nothing_trains_is_told() -> None:
    model = Attention(rank=3)
    for frozen in (model.q, model.k):
        frozen.requires_grad_(False)
    with pytest.warns(UserWarning, match="cannot scale all terms of the logits of the model: .* is frozen"):
        QKClip(model, SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))


class Tied(nn.Module):
    """Two attentions with the same weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Attention(), Attention()
        self.second.q, self.second.k = self.first.q, self.first.k

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x).sum() + self.second(0.5 * x).sum() ** 2


def test_tied_weights_are_scaled_once_by_what_the_worst_attention_needs() -> None:
    torch.manual_seed(0)
    model = Tied()
    clipped(model)
    torch.testing.assert_close(model.first.largest(), torch.full((2,), 0.05))


def test_a_forward_that_is_not_a_number_does_not_hide_those_that_are() -> None:
    torch.manual_seed(0)
    model = Attention()
    optimizer = SGD(model.parameters(), lr=0.0)
    clip = QKClip(model, optimizer, 0.05)
    for x in (X, X * torch.nan, X * torch.inf):
        model(x)
    torch.testing.assert_close(clip.max_logits()[""], model.largest())
    optimizer.param_groups[0]["lr"] = 1e-12
    model(X).square().mean().backward()
    optimizer.step()
    torch.testing.assert_close(model.largest(), torch.full((2,), 0.05))


def test_each_optimizer_takes_the_maxima_since_its_own_last_step() -> None:
    torch.manual_seed(0)
    model = Attention()
    of_q, of_k = SGD([model.q.weight], lr=1e-12), SGD([model.k.weight], lr=1e-12)
    QKClip(model, [of_q, of_k], threshold=0.05)
    (0.1 * model(X).square().mean()).backward()
    of_k.step()  # k has its share; what it was taken from is not forgotten for q
    model(0.1 * X).square().mean().backward()
    of_q.step()
    torch.testing.assert_close(model.largest(), torch.full((2,), 0.05))


@pytest.mark.parametrize("clip_first", [False, True])
def test_with_quack_the_step_is_scaled_and_then_clipped_in_either_order(clip_first: bool) -> None:
    torch.manual_seed(0)
    model = Attention()
    optimizer = SGD(model.parameters(), lr=1e-12)
    kept = [
        QKClip(model, optimizer, 0.05) if clips else QuacK(model, optimizer, tau=0.1)
        for clips in (clip_first, not clip_first)
    ]
    model(X).square().mean().backward()
    optimizer.step()
    torch.testing.assert_close(model.largest(), torch.full((2,), 0.05))
    assert len(kept) == 2


def test_a_model_left_in_eval_mode_is_told_of() -> None:
    model: Decoder = build(SHAPE, FULL, seed=0)
    optimizer = SGD(model.parameters(), lr=0.01)
    clip = QKClip(model, optimizer, threshold=1.0)
    model(TOKENS).square().mean().backward()
    optimizer.step()
    assert clip.max_logits()
    model.eval()
    model(TOKENS).square().mean().backward()
    with pytest.warns(UserWarning, match="saw no training forward since the last step.*eval mode"):
        optimizer.step()
    assert clip.max_logits() == {}
    assert block(model).attention.q.weight.isfinite().all()


class Own(SGD):
    """Its step calls its parent's, so torch runs the hooks of a step twice."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_an_optimizer_whose_step_calls_its_parents_clips_once() -> None:
    torch.manual_seed(0)
    model = Attention()
    SGD(model.parameters(), lr=1.0)  # from here on torch runs the hooks of its step too
    optimizer = Own(model.parameters(), lr=1e-12)
    clip = QKClip(model, optimizer, 0.05)
    model(X).square().mean().backward()
    optimizer.step()
    torch.testing.assert_close(model.largest(), torch.full((2,), 0.05))
    assert clip.max_logits()


def test_data_parallel_is_refused() -> None:
    model = nn.DataParallel(Attention())
    with pytest.raises(ValueError, match="use DistributedDataParallel"):
        QKClip(model, SGD(model.parameters(), lr=0.1))


def test_paths_without_a_model_are_refused() -> None:
    model = Attention()
    with pytest.raises(ValueError, match=r"pass the model, or the paths that logit_paths\(model, batch\) returns"):
        QKClip(model.logit_paths(), SGD(model.parameters(), lr=0.1))


class Unknown(Attention):
    """A class that neither declares its paths nor is in a table."""

    logit_paths: Any = None


def test_attention_that_no_table_has_is_measured_before_and_clipped_in_the_first_step() -> None:
    torch.manual_seed(0)
    attention = Unknown()
    model = nn.Sequential(attention)
    optimizer = SGD(model.parameters(), lr=1e-12)
    with pytest.raises(ValueError, match=r"^0: no table has the class Unknown, .*logit_paths\(model, batch\)"):
        QKClip(model, optimizer, 0.05)
    QKClip(logit_paths(model, X), optimizer, 0.05)
    model(X).square().mean().backward()
    optimizer.step()
    torch.testing.assert_close(attention.largest(), torch.full((2,), 0.05))


def test_parameters_that_were_replaced_after_attaching_are_an_error() -> None:
    model = Attention()
    optimizer = SGD(model.parameters(), lr=0.1)
    QKClip(model, optimizer, 0.05)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    model(X).square().mean().backward()
    with pytest.raises(RuntimeError, match="q: 2 of 2 weights on the paths are no longer in the model"):
        optimizer.step()
