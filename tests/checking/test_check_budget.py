"""`check` with a budget: the root mean square of the changes of real logits, by hand."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Rprop

from models import Separate, logits
from quacklr import QuacK, check

BUDGET = 0.05
X_BTD = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))


def loss(model: nn.Module, x_BTD: Tensor) -> Tensor:
    return (model(x_BTD) - 1).square().sum()


def logits_of(model: nn.Sequential) -> Tensor:
    attention = model[0]
    assert isinstance(attention, Separate)
    with torch.no_grad():
        return logits(*attention.qk(X_BTD))


def test_the_report_has_the_root_mean_square_of_the_changes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Separate())
    report = check(model, SGD(model.parameters(), lr=0.1), X_BTD, budget=BUDGET, loss=loss, steps=1, growth=2.0)
    assert report.ok
    grown = copy.deepcopy(model)
    with torch.no_grad():
        for name in ("0.q.weight", "0.k.weight"):
            grown.get_parameter(name).mul_(2)
    before = logits_of(grown)
    optimizer = SGD(grown.parameters(), lr=0.1)
    with QuacK(grown, optimizer, budget=BUDGET):
        loss(grown, X_BTD).backward()
        optimizer.step()
    wanted = (logits_of(grown) - before).square().mean((0, 2, 3)).sqrt()
    torch.testing.assert_close(report.layers[0].quack.root_mean_square, wanted, rtol=1e-4, atol=0)
    assert 0.2 * BUDGET < float(wanted.max()) < 3 * BUDGET
    within = int(bool((wanted <= BUDGET).all()))
    line = f"budget 0.05: the root mean square of a step's changes is within it in {within} of 1 layer; the largest is"
    assert line in str(report)
    assert "RMS, QuacK" in str(report)


def test_without_a_budget_there_is_no_such_column() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Separate())
    report = check(model, SGD(model.parameters(), lr=0.1), X_BTD, loss=loss, steps=1)
    assert "RMS" not in str(report)
    assert "budget" not in str(report)


def test_a_budget_and_tau_together_are_an_error() -> None:
    model = nn.Sequential(Separate())
    with pytest.raises(ValueError, match="with a budget, tau must be left out"):
        check(model, SGD(model.parameters(), lr=0.1), X_BTD, budget=BUDGET, tau=0.5, loss=loss)


def test_an_optimizer_that_is_not_linear_in_lr_can_be_checked() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Separate())
    report = check(model, Rprop(model.parameters(), lr=0.01), X_BTD, budget=BUDGET, loss=loss, steps=1)
    assert report.layers[0].quack.root_mean_square.max() > 0
    with pytest.raises(ValueError, match="Rprop"):
        check(model, Rprop(model.parameters(), lr=0.01), X_BTD, loss=loss, steps=1)
