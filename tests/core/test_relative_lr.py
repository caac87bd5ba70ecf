"""A budget follows lr relative to the initial lr: after a resume too, in whatever order things are loaded."""

from __future__ import annotations

import warnings
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from models import Separate, train
from quacklr import Budget, QuacK

BUDGET = 0.05


def relative_change(quack: QuacK) -> float:
    """The largest change of a head by the last step, relative to the budget."""
    return float(quack.changes()["0"].given.max()) / BUDGET


def trained_at_a_tenth() -> dict[str, Any]:
    """The states of a run whose lr was 0.1, and was reduced to 0.01 by a scheduler that writes no initial_lr."""
    model = nn.Sequential(Separate())
    optimizer = AdamW(model.parameters(), lr=0.1)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
    with QuacK(model, optimizer, rule=Budget(BUDGET)) as quack:
        train(model, optimizer, steps=1)
        assert relative_change(quack) == pytest.approx(1, rel=1e-2)
        scheduler.step(1.0)
        scheduler.step(2.0)
        train(model, optimizer, steps=1)
        assert relative_change(quack) == pytest.approx(0.1, rel=1e-2)
    assert "initial_lr" not in optimizer.param_groups[0]
    return deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})


@pytest.mark.parametrize("attach_first", [True, False])
@pytest.mark.parametrize("lr", [0.1, 3e-4])
def test_a_resumed_run_has_the_initial_lr_of_the_run(attach_first: bool, lr: float) -> None:
    torch.manual_seed(0)
    saved = trained_at_a_tenth()
    model = nn.Sequential(Separate())
    optimizer = AdamW(model.parameters(), lr=lr)
    quack = QuacK(model, optimizer, rule=Budget(BUDGET)) if attach_first else None
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    with quack or QuacK(model, optimizer, rule=Budget(BUDGET)) as quack:
        train(model, optimizer, steps=1)
        assert relative_change(quack) == pytest.approx(0.1, rel=1e-2)


@pytest.mark.parametrize("attach_first", [True, False])
def test_the_initial_lr_of_a_run_that_had_no_quack_is_the_loaded_one(attach_first: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Separate())
    optimizer = AdamW(model.parameters(), lr=3e-4)
    train(model, optimizer, steps=1)
    saved = deepcopy(optimizer.state_dict())
    optimizer = AdamW(model.parameters())  # torch's default lr
    quack = QuacK(model, optimizer, rule=Budget(BUDGET)) if attach_first else None
    optimizer.load_state_dict(saved)
    with quack or QuacK(model, optimizer, rule=Budget(BUDGET)) as quack:
        train(model, optimizer, steps=1)
        assert relative_change(quack) == pytest.approx(1, rel=1e-2)


def test_a_tensor_that_is_0_is_an_error_and_one_that_rises_a_warning() -> None:
    model = nn.Sequential(Separate())
    with pytest.raises(ValueError, match="the lr of a param group of AdamW is 0"):
        QuacK(model, AdamW(model.parameters(), lr=torch.tensor(0.0)), rule=Budget(BUDGET))
    lr = torch.tensor(1e-8)
    optimizer = AdamW(model.parameters(), lr=lr)
    with QuacK(model, optimizer, rule=Budget(BUDGET)):
        train(model, optimizer, steps=1)
        lr.fill_(1e-2)
        with pytest.warns(UserWarning, match="1e\\+06 times its lr when QuacK was attached"):
            train(model, optimizer, steps=1)


def test_an_lr_that_goes_on_rising_is_warned_of_again() -> None:
    model = nn.Sequential(Separate())
    optimizer = SGD(model.parameters(), lr=1e-5)
    with QuacK(model, optimizer, rule=Budget(BUDGET)), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(1, 201):  # a warmup by hand
            optimizer.param_groups[0]["lr"] = step * 1e-5
            train(model, optimizer, steps=1)
    assert [str(each.message).partition(" times")[0].split()[-1] for each in caught] == ["2", "21"]
    assert "it is 1.05 now instead of 0.05, and grows with lr" in str(caught[1].message)


def test_an_optimizer_without_lr_has_the_budget() -> None:
    class NoLr(Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

        @torch.no_grad()
        def step(self, _: Any = None) -> None:  # type: ignore[override]
            for param in self.param_groups[0]["params"]:
                param.sub_(0.1 * param.grad)

    torch.manual_seed(0)
    model = nn.Sequential(Separate())
    optimizer = NoLr(model.parameters())
    with QuacK(model, optimizer, rule=Budget(BUDGET)) as quack:
        train(model, optimizer, steps=1)
        assert relative_change(quack) == pytest.approx(1, rel=1e-2)


def test_the_reported_change_of_a_step_with_lr_0_is_0() -> None:
    model = nn.Sequential(Separate())
    optimizer = SGD(model.parameters(), lr=0.1)
    with QuacK(model, optimizer, rule=Budget(BUDGET)) as quack:
        train(model, optimizer, steps=1)
        optimizer.param_groups[0]["lr"] = 0.0
        train(model, optimizer, steps=1)
        assert relative_change(quack) == 0
        assert float(quack.changes()["0"].asked.max()) == 0
        optimizer.param_groups[0]["lr"] = 0.1
        train(model, optimizer, steps=1)
        assert relative_change(quack) == pytest.approx(1, rel=1e-2)


def test_an_optimizer_with_lr_0_does_not_hide_the_change_by_another() -> None:
    model: Any = nn.Sequential(Separate())
    one, other = SGD([model[0].q.weight], lr=0.1), SGD([model[0].k.weight], lr=0.1)
    with QuacK(model, [one, other], rule=Budget(BUDGET)) as quack:
        other.param_groups[0]["lr"] = 0.0
        for _ in range(2):
            train(model, one, steps=1)
            train(model, other, steps=1)
            assert relative_change(quack) == pytest.approx(0.5, rel=1e-2)
