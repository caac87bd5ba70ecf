"""The steps of `check`: the measured change of logits, by hand; and rows that do not step by their rates.

Shapes: B batch, T tokens, D width, H heads.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from check_runs import X_BTD as WIDE_BTD
from models import Separate
from quacklr import LogitPath, check, mha, packed
from quacklr.core.blocks import BlockRows

Matrix = npt.NDArray[np.float64]
HEADS, SIZE, WIDTH = 2, 3, 5
X_BTD = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(0))


class Attention(nn.Module):
    """Queries with a bias, keys without. `gain` is 1 at the start and on no path."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k = nn.Linear(WIDTH, HEADS * SIZE), nn.Linear(WIDTH, HEADS * SIZE, bias=False)
        self.out, self.gain = nn.Linear(WIDTH, 1), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k = (of(self.gain * x_BTD).unflatten(2, (HEADS, SIZE)).transpose(1, 2) for of in (self.q, self.k))
        return self.out(F.scaled_dot_product_attention(q, k, x_BTD.unsqueeze(1).expand(-1, HEADS, -1, -1)))

    def logit_paths(self) -> list[LogitPath]:
        return mha(*packed(self.q, ("q", HEADS, SIZE)), *packed(self.k, ("k", HEADS, SIZE)))


def loss(model: nn.Module, x_BTD: Tensor) -> Tensor:
    return (model(x_BTD) - 1).square().sum()


def logits_by_hand(model: Attention, head: int) -> Matrix:
    """Of all pairs of tokens of a sequence."""
    q, b, k = (each.detach().double().numpy() for each in (model.q.weight, model.q.bias, model.k.weight))
    rows = slice(head * SIZE, (head + 1) * SIZE)
    pairs = [(asking, asked) for x_TD in X_BTD.double().numpy() for asking in x_TD for asked in x_TD]
    return np.array([(q[rows] @ x + b[rows]) @ (k[rows] @ y) / SIZE**0.5 for x, y in pairs])


def test_the_change_of_logits_is_that_computed_by_hand() -> None:
    model = Attention()
    report = check(model, SGD(model.parameters(), lr=0.1), X_BTD, loss=loss, steps=1, growth=1.0)
    stepped = copy.deepcopy(model)
    optimizer = SGD(stepped.parameters(), lr=0.1)
    loss(stepped, X_BTD).backward()
    optimizer.step()
    for head in range(HEADS):
        change = logits_by_hand(stepped, head) - logits_by_hand(model, head)
        assert float(report.layers[0].measured[head]) == pytest.approx(float(np.sqrt((change**2).mean())), rel=1e-3)


class Residual(nn.Module):
    """Its second layer has inputs that the first layer changes, nested in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Nested() for _ in range(2))

    def forward(self, x_BTD: Tensor) -> Tensor:
        for layer in self.layers:
            x_BTD = layer(x_BTD, others={"pair": (x_BTD, [x_BTD])})
        return x_BTD


class Nested(Separate):
    def forward(self, x_BTD: Tensor, *, others: dict[str, Any]) -> Tensor:  # type: ignore[override]
        assert others["pair"][0] is x_BTD
        assert others["pair"][1][0] is x_BTD
        return super().forward(x_BTD)


def test_the_inputs_of_a_layer_are_those_before_the_step() -> None:
    torch.manual_seed(0)
    model = Residual()
    first, second = ([*layer.parameters()] for layer in model.layers)
    optimizers = [SGD(first, lr=1.0), SGD(second, lr=0.0)]
    report = check(model, optimizers, WIDE_BTD, steps=1)
    assert (report.layers[0].measured > 0).all()
    assert not report.layers[1].measured.any()


def test_rows_that_do_not_step_by_their_rates_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the hooks were lost on the way: the weights are grown, so the rates are not 1, but nothing is scaled."""
    model = Attention()
    assert check(model, SGD(model.parameters(), lr=1e-3), X_BTD, loss=loss, steps=1).ok
    monkeypatch.setattr(BlockRows, "scale_step", lambda *_: None)
    with pytest.raises(ValueError, match="^q: QuacK's rates are not applied to its step"):
        check(model, SGD(model.parameters(), lr=1e-3), X_BTD, loss=loss, steps=1)


def test_weights_that_are_nan_after_a_step_are_an_error() -> None:
    model = Attention()
    with pytest.raises(ValueError, match="weights are NaN or inf after a step"):
        check(model, SGD(model.parameters(), lr=1e-3), X_BTD, loss=lambda *of: loss(*of) * torch.inf, steps=1)
