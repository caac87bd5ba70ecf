"""The bound and the measured change, by hand; and the lengths of inputs, in every way of multiplying.

Shapes: B batch, T tokens, D width, H heads.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from math import sqrt

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from quacklr import LogitPath, Weight, check, mha, packed
from quacklr.checking.steps import InputNorms
from quacklr.core.blocks import BlockRows

Matrix = npt.NDArray[np.float64]
HEADS, SIZE, WIDTH = 2, 3, 5
X_BTD = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(0))


class Attention(nn.Module):
    """Queries with a bias, keys without; `gain` is between weights and logit, where nothing should be."""

    def __init__(self, gain: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gain = gain
        self.q, self.k = nn.Linear(WIDTH, HEADS * SIZE), nn.Linear(WIDTH, HEADS * SIZE, bias=False)
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k = (of(x_BTD).unflatten(2, (HEADS, SIZE)).transpose(1, 2) for of in (self.q, self.k))
        mixed = F.scaled_dot_product_attention(self.gain * q, k, x_BTD.unsqueeze(1).expand(-1, HEADS, -1, -1))
        return self.out(mixed)

    def logit_paths(self) -> list[LogitPath]:
        return mha(*packed(self.q, ("q", HEADS, SIZE)), *packed(self.k, ("k", HEADS, SIZE)))


def loss(model: nn.Module, x_BTD: Tensor) -> Tensor:
    return (model(x_BTD) - 1).square().sum()


def by_head(model: Attention) -> list[tuple[Matrix, Matrix]]:
    """For each head [W b] of its query, and W of its key."""
    q: Matrix = torch.cat([model.q.weight, model.q.bias[:, None]], 1).detach().double().numpy()
    k: Matrix = model.k.weight.detach().double().numpy()
    return [(q[h * SIZE : (h + 1) * SIZE], k[h * SIZE : (h + 1) * SIZE]) for h in range(HEADS)]


def test_change_and_bound_are_those_computed_by_hand() -> None:
    model = Attention()
    report = check(model, SGD(model.parameters(), lr=0.1), X_BTD, loss=loss, steps=1)
    stepped = copy.deepcopy(model)
    optimizer = SGD(stepped.parameters(), lr=0.1)
    loss(stepped, X_BTD).backward()
    optimizer.step()
    for head, (old, new) in enumerate(zip(by_head(model), by_head(stepped), strict=True)):
        start = report.layers[0].start
        assert float(start.measured[head]) == pytest.approx(change_by_hand(*old, *new), rel=1e-3)
        assert float(start.bound[head]) == pytest.approx(bound_by_hand(*old, *new), rel=1e-4)


def change_by_hand(q: Matrix, k: Matrix, q_new: Matrix, k_new: Matrix) -> float:
    """The largest over all pairs of tokens of a sequence."""
    largest = 0.0
    for x_TD in X_BTD.double().numpy():
        for asking in x_TD:
            for asked in x_TD:
                x = np.append(asking, 1.0)
                change = (q_new @ x) @ (k_new @ asked) - (q @ x) @ (k @ asked)
                largest = max(largest, abs(change) / sqrt(SIZE))
    return largest


def bound_by_hand(q: Matrix, k: Matrix, q_new: Matrix, k_new: Matrix) -> float:
    longest = max(float(np.linalg.norm(x)) for x_TD in X_BTD.double().numpy() for x in x_TD)
    size_q, size_k, step_q, step_k = (float(np.linalg.norm(of, ord=2)) for of in (q, k, q_new - q, k_new - k))
    grows = (size_q + step_q) * (size_k + step_k) - size_q * size_k
    return grows * sqrt(longest**2 + 1) * longest / sqrt(SIZE)


def test_a_logit_that_moves_further_than_its_rows_steps_allow_is_wrong() -> None:
    model = Attention(gain=20.0)
    report = check(model, SGD(model.parameters(), lr=1e-3), X_BTD, loss=loss, steps=1)
    assert not report.ok
    assert "WRONG: above the bound: head 0-1" in str(report)
    assert str(report).endswith("wrong: 1 of 1 layer")


def test_rows_that_step_further_than_their_rates_say_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the hooks were lost on the way: the weights are grown, so the rates are not 1, but nothing is scaled."""
    model = Attention()
    assert check(model, SGD(model.parameters(), lr=1e-3), X_BTD, loss=loss, steps=1).ok
    monkeypatch.setattr(BlockRows, "scale_step", lambda *_: None)
    report = check(model, SGD(model.parameters(), lr=1e-3), X_BTD, loss=loss, steps=1)
    assert "steps larger than the rates: head 0-1" in str(report)
    assert not report.layers[0].start.exceeds_rate.any()


PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": lambda x, w: F.linear(x, w),
    "x @ w.T": lambda x, w: x @ w.T,
    "w @ x.T": lambda x, w: w @ x.mT,
    "mm": lambda x, w: torch.mm(x.flatten(0, 1), w.T),
    "addmm": lambda x, w: torch.addmm(torch.zeros(6), x.flatten(0, 1), w.T),
    "einsum": lambda x, w: torch.einsum("btd,od->bto", x, w),
    "einsum by heads": lambda x, w: torch.einsum("...d,hkd->...hk", x, w.view(2, 3, 5)),
    "einsum of each head": lambda x, w: torch.einsum(
        "bthd,hkd->bthk", x.unsqueeze(2).expand(-1, -1, 2, -1), w.view(2, 3, 5)
    ),
    "conv1d": lambda x, w: F.conv1d(x.mT, w.unsqueeze(2)),
}


@pytest.mark.parametrize("product", PRODUCTS)
def test_the_longest_input_is_seen_however_it_is_multiplied(product: str) -> None:
    param = torch.randn(6, WIDTH)
    weight = Weight("q", param, torch.arange(6) // 3)
    with InputNorms([weight]) as inputs:
        PRODUCTS[product](X_BTD, param)
        PRODUCTS[product](X_BTD / 2, param)
        F.linear(100 * X_BTD, torch.randn(6, WIDTH))
    assert inputs.of(weight) == pytest.approx(float(X_BTD.norm(dim=2).max()))


def test_a_bias_is_multiplied_with_one_and_what_was_not_seen_has_no_length() -> None:
    param = torch.randn(6, WIDTH)
    alone, biased = (Weight("q", param, torch.arange(6) // 3, bias=bias) for bias in (None, torch.zeros(6)))
    with InputNorms([alone, biased]) as inputs:
        assert np.isnan(inputs.of(alone))
        F.linear(2 * param, torch.eye(WIDTH))
        assert np.isnan(inputs.of(alone))
        F.linear(X_BTD, param)
    assert inputs.of(biased) == pytest.approx(sqrt(inputs.of(alone) ** 2 + 1))
    assert inputs.of(Weight("bias_k", torch.randn(6), torch.arange(6) // 3)) == 1.0


def test_a_parametrised_weight_has_no_bound_so_nothing_is_shown() -> None:
    model = Attention()
    vars(model)["logit_paths"] = None
    for of in (model.q, model.k):
        nn.utils.parametrize.register_parametrization(of, "weight", Doubled())
    q, k = (of.get_parameter("parametrizations.weight.original") for of in (model.q, model.k))
    blocks = torch.arange(HEADS * SIZE) // SIZE
    paths = [LogitPath((Weight("q", q, blocks, bias=model.q.bias), Weight("k", k, blocks)), HEADS)]
    report = check(model, SGD(model.parameters(), lr=0.1), X_BTD, paths=paths, loss=loss, steps=1)
    assert not report.ok
    assert report.layers[0].start.bound.isnan().all()
    assert str(report).endswith("not shown: 1 of 1 layer")


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight
