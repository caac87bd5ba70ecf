"""The measured change, by hand; and steps that are not those of the rates.

Shapes: B batch, T tokens, D width.
"""

from __future__ import annotations

import copy
from math import sqrt

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from quacklr import LogitPath, check, mha, packed
from quacklr.core.blocks import BlockRows

Matrix = npt.NDArray[np.float64]
HEADS, SIZE, WIDTH = 2, 3, 5
X_BTD = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(0))


class Attention(nn.Module):
    """Queries with a bias, keys without."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k = nn.Linear(WIDTH, HEADS * SIZE), nn.Linear(WIDTH, HEADS * SIZE, bias=False)
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k = (of(x_BTD).unflatten(2, (HEADS, SIZE)).transpose(1, 2) for of in (self.q, self.k))
        mixed = F.scaled_dot_product_attention(q, k, x_BTD.unsqueeze(1).expand(-1, HEADS, -1, -1))
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


def test_the_change_is_that_computed_by_hand() -> None:
    model = Attention()
    report = check(model, SGD(model.parameters(), lr=0.1), X_BTD, loss=loss, steps=1, growth=1.0, tau=0.5)
    stepped = copy.deepcopy(model)
    loss(stepped, X_BTD).backward()
    SGD(stepped.parameters(), lr=0.1).step()
    for head, (old, new) in enumerate(zip(by_head(model), by_head(stepped), strict=True)):
        half = tuple((one + other) / 2 for one, other in zip(old, new, strict=True))
        assert float(report.layers[0].plain[head]) == pytest.approx(change_by_hand(*old, *new), rel=1e-3)
        assert float(report.layers[0].quack[head]) == pytest.approx(change_by_hand(*old, *half), rel=1e-3)


def change_by_hand(q: Matrix, k: Matrix, q_new: Matrix, k_new: Matrix) -> float:
    """The root mean square over all pairs of tokens of a sequence."""
    changes = []
    for x_TD in X_BTD.double().numpy():
        for asking in x_TD:
            for asked in x_TD:
                x = np.append(asking, 1.0)
                changes.append(((q_new @ x) @ (k_new @ asked) - (q @ x) @ (k @ asked)) / sqrt(SIZE))
    return float(np.sqrt(np.mean(np.square(changes))))


def test_rows_that_do_not_move_by_their_rates_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the hooks were lost on the way: the weights are grown, so the rates are not 1, but nothing is scaled."""
    model = Attention()
    assert check(model, SGD(model.parameters(), lr=1e-3), X_BTD, loss=loss, steps=1).ok
    monkeypatch.setattr(BlockRows, "scale_step", lambda *_: None)
    report = check(model, SGD(model.parameters(), lr=1e-3), X_BTD, loss=loss, steps=1)
    assert not report.ok
    assert report.wrong == ("k.weight", "q.bias", "q.weight")
    assert str(report).endswith("wrong: the steps of 3 parameters")


def test_a_step_of_rows_on_no_path_that_is_scaled_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Attention()
    scale_step = BlockRows.scale_step

    def too_much(self: BlockRows, old: Tensor, rate: Tensor) -> None:
        scale_step(self, old, rate)
        with torch.no_grad():
            attached[0].out.weight.mul_(1.01)

    attached: list[Attention] = []
    monkeypatch.setattr(BlockRows, "scale_step", too_much)

    def spying(model: nn.Module, x_BTD: Tensor) -> Tensor:
        attached.insert(0, model)  # type: ignore[arg-type]
        return loss(model, x_BTD)

    report = check(model, SGD(model.parameters(), lr=1e-3), X_BTD, loss=spying, steps=1)
    assert report.wrong == ("out.weight",)
