"""The rates: precision, biases, frozen and tied weights, rows on no path, and the options of QuacK."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from models import Separate, assert_equal, layers, train
from quacklr import ConstantTau, Paper, QuacK, Weight, frobenius, mha


def model_and_optimizer(bias: bool = False, lr: float = 0.1) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = layers(2, lambda: Separate(bias=bias))
    return model, torch.optim.AdamW(model.parameters(), lr=lr)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_weights_are_measured_in_fp32_and_scaled_by_the_exact_rate(dtype: torch.dtype) -> None:
    assert frobenius(torch.ones(1, 1, 100_000, dtype=dtype)).item() == pytest.approx(100_000**0.5, rel=1e-6)
    torch.manual_seed(0)
    q, k = (nn.Parameter(torch.randn(4, 300).to(dtype)) for _ in range(2))
    optimizer = torch.optim.SGD([q, k], lr=1.0)
    quack = QuacK(mha(*(Weight(n, p, torch.arange(4) // 2) for n, p in (("q", q), ("k", k)))), optimizer, tau=0.123)
    with torch.no_grad():
        k.mul_(3)
    exact = 0.123 / 3
    torch.testing.assert_close(quack.rates()["q"], torch.full((2,), exact), rtol=2e-3, atol=0)  # k's rounding after * 3
    rate, old = quack.rates()["q"].repeat_interleave(2).unsqueeze(1), q.detach().clone()
    q.grad, k.grad = torch.full_like(q, 8), torch.zeros_like(k)
    optimizer.step()
    stepped = (old - q.grad).float()
    assert_equal(q.detach(), (old.float() + rate * (stepped - old.float())).to(dtype))


def test_a_frozen_partner_counts_and_has_no_rate() -> None:
    model, _ = model_and_optimizer()
    attention: Any = model[0]
    attention.q.weight.requires_grad_(False)
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=0.1)
    quack = QuacK(model, optimizer, tau=1.0)
    before = attention.q.weight.clone()
    with torch.no_grad():
        attention.q.weight.mul_(4)
    assert "0.q" not in quack.rates()
    assert quack.rate_of(attention.q.weight) is None
    torch.testing.assert_close(quack.rates()["0.k"], torch.full((4,), 0.25))
    train(model, optimizer, steps=2)
    assert_equal(attention.q.weight, 4 * before)
    assert "0.q: frozen" in repr(quack)


def test_tied_layers_are_one_weight_on_several_paths() -> None:
    torch.manual_seed(0)
    shared = Separate()
    other = Separate()
    other.q.weight = shared.q.weight
    model = nn.Sequential(shared, other)
    quack = QuacK(model, torch.optim.SGD(model.parameters(), lr=0.1), tau=1.0)
    assert list(quack.rates()) == ["0.q", "0.k", "1.k"]
    with torch.no_grad():
        other.k.weight.mul_(10)
    start = quack.state_dict()["sensitivity"]["0.q"]
    loudest = torch.maximum(
        *(torch.linalg.vector_norm(m.k.weight.detach().view(4, -1), dim=1) for m in (shared, other))
    )
    torch.testing.assert_close(quack.rates()["0.q"], start / loudest)


def test_a_floor_bounds_every_norm_from_below() -> None:
    model, optimizer = model_and_optimizer()
    attention: Any = model[0]
    nn.init.zeros_(attention.k.weight)
    quack = QuacK(model, optimizer, rule=Paper(floor=2.0))
    assert quack.rates()["0.q"].tolist() == [1.0] * 4
    nn.init.constant_(attention.k.weight, 1.0)  # norm 8
    torch.testing.assert_close(quack.rates()["0.q"], torch.full((4,), 0.25))


def test_tau_can_be_scheduled_and_a_constant_tau_needs_no_partner() -> None:
    model, optimizer = model_and_optimizer()
    for rule in (Paper(1.0), ConstantTau(1.0)):
        if isinstance(rule, ConstantTau):
            nn.init.zeros_(model[0].k.weight)  # type: ignore[union-attr, arg-type]
        with QuacK(model, optimizer, rule=rule) as quack:
            rule.tau = 0.125
            assert quack.rates()["0.q"].tolist() == [0.125] * 4
            train(model, optimizer, steps=1)
            assert rule.rates.unique().tolist() == [0.125]
            with pytest.raises(ValueError, match="tau=-1"):
                rule.tau = -1
