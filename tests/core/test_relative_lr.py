"""A budget follows lr relative to the initial lr: after a resume too, in whatever order things are loaded."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau

from models import Separate, assert_equal, layers, train
from quacklr import Budget, QuacK

BUDGET = 0.05


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def attention() -> Any:
    """A model of one attention."""
    return nn.Sequential(Separate())


def relative_change(quack: QuacK, name: str = "0") -> float:
    """The largest change of a head by the last step, relative to the budget."""
    return float(quack.changes()[name].given.max()) / BUDGET


@pytest.mark.parametrize(
    ("scheduler", "factors"),
    [
        (lambda optimizer: LambdaLR(optimizer, lambda step: [0.25, 0.5, 1.0, 0.1, 0.0][step]), [0.25, 0.5, 1.0, 0.1]),
        (lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=10, pct_start=0.3), [0.04, 0.52, 1]),
    ],
    ids=["lambda", "one cycle"],
)
def test_the_budget_follows_the_schedule_of_lr(scheduler: Callable[[Optimizer], Any], factors: list[float]) -> None:
    """One cycle begins at a 25th of max_lr."""
    model = attention()
    optimizer = AdamW(model.parameters(), lr=0.1)
    schedule, lrs, found = scheduler(optimizer), [], []
    with QuacK(model, optimizer, rule=Budget(BUDGET)) as quack:
        for _ in factors:
            train(model, optimizer, steps=1)
            lrs.append(optimizer.param_groups[0]["lr"] / 0.1)
            found.append(relative_change(quack))
            schedule.step()
    assert found == pytest.approx(lrs, rel=1e-2)
    assert lrs == pytest.approx(factors, rel=1e-2)


def test_groups_follow_their_own_lr() -> None:
    model = layers(2, Separate)
    optimizer = SGD([{"params": model[0].parameters()}, {"params": model[1].parameters()}], lr=0.1)
    with QuacK(model, optimizer, rule=Budget(BUDGET)) as quack:
        optimizer.param_groups[1]["lr"] = 0.05
        train(model, optimizer, steps=1)
        assert [relative_change(quack, name) for name in "01"] == pytest.approx([1, 1 / 2], rel=1e-2)


def trained_at_a_tenth() -> dict[str, Any]:
    """The states of a run whose lr was 0.1, and was reduced to 0.01 by a scheduler that writes no initial_lr."""
    model = attention()
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
def test_a_resumed_run_has_the_initial_lr_of_the_run(attach_first: bool) -> None:
    saved = trained_at_a_tenth()
    model = attention()
    optimizer = AdamW(model.parameters(), lr=3e-4)
    quack = QuacK(model, optimizer, rule=Budget(BUDGET)) if attach_first else None
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    with quack or QuacK(model, optimizer, rule=Budget(BUDGET)) as quack:
        train(model, optimizer, steps=1)
        assert relative_change(quack) == pytest.approx(0.1, rel=1e-2)


@pytest.mark.parametrize("attach_first", [True, False])
def test_the_initial_lr_of_a_run_that_had_no_quack_is_the_loaded_one(attach_first: bool) -> None:
    model = attention()
    optimizer = AdamW(model.parameters(), lr=3e-4)
    train(model, optimizer, steps=1)
    saved = deepcopy(optimizer.state_dict())
    optimizer = AdamW(model.parameters())  # torch's default lr
    quack = QuacK(model, optimizer, rule=Budget(BUDGET)) if attach_first else None
    optimizer.load_state_dict(saved)
    with quack or QuacK(model, optimizer, rule=Budget(BUDGET)) as quack:
        train(model, optimizer, steps=1)
        assert relative_change(quack) == pytest.approx(1, rel=1e-2)


@pytest.mark.parametrize("lr", [0.0, torch.tensor(0.0)], ids=["number", "tensor"])
def test_an_lr_of_0_is_an_error_when_attaching_only_for_weights_on_paths(lr: Any) -> None:
    model = attention()
    with pytest.raises(ValueError, match="the lr of a param group of AdamW is 0. A budget follows lr"):
        QuacK(model, AdamW(model.parameters(), lr=lr), rule=Budget(BUDGET))
    others: dict[str, Any] = {"params": [model[0].v.weight], "lr": 0.0}
    optimizer = SGD([{"params": [model[0].q.weight, model[0].k.weight]}, others], lr=0.1)
    with QuacK(model, optimizer, rule=Budget(BUDGET)) as quack:
        train(model, optimizer, steps=1)
        assert relative_change(quack) == pytest.approx(1, rel=1e-2)


def test_a_later_lr_of_0_changes_nothing_and_the_reported_change_is_0() -> None:
    model = attention()
    optimizer = SGD(model.parameters(), lr=0.1)
    with QuacK(model, optimizer, rule=Budget(BUDGET)) as quack:
        train(model, optimizer, steps=1)
        optimizer.param_groups[0]["lr"] = 0.0
        before = deepcopy(dict(model.state_dict()))
        train(model, optimizer, steps=1)
        assert_equal(dict(model.state_dict()), before)
        assert relative_change(quack) == 0
        assert float(quack.changes()["0"].asked.max()) == 0
        optimizer.param_groups[0]["lr"] = 0.1
        train(model, optimizer, steps=1)
        assert relative_change(quack) == pytest.approx(1, rel=1e-2)


def test_an_optimizer_with_lr_0_does_not_hide_the_change_by_another() -> None:
    model = attention()
    one, other = SGD([model[0].q.weight], lr=0.1), SGD([model[0].k.weight], lr=0.1)
    with QuacK(model, [one, other], rule=Budget(BUDGET)) as quack:
        other.param_groups[0]["lr"] = 0.0
        for _ in range(2):
            train(model, one, steps=1)
            train(model, other, steps=1)
            assert relative_change(quack) == pytest.approx(0.5, rel=1e-2)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_an_lr_that_goes_on_rising_is_warned_of_again(as_tensor: bool) -> None:
    model = attention()
    lr: Any = torch.tensor(1e-5) if as_tensor else 1e-5
    optimizer = AdamW(model.parameters(), lr=lr, foreach=False)
    with QuacK(model, optimizer, rule=Budget(BUDGET)), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(1, 51):  # a warmup by hand
            optimizer.param_groups[0]["lr"] = step * lr
            train(model, optimizer, steps=1)
    assert [str(each.message).partition(" times")[0].split()[-1] for each in caught] == ["2", "21"]
    assert "21 times its lr when QuacK was attached" in str(caught[1].message)
    assert "it is 1.05 now instead of 0.05, and grows with lr" in str(caught[1].message)
    assert caught[0].filename.endswith("models.py")  # the line that called optimizer.step


def test_an_optimizer_without_lr_has_the_budget() -> None:
    class NoLr(Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

        @torch.no_grad()
        def step(self, _: Any = None) -> None:  # type: ignore[override]
            for param in self.param_groups[0]["params"]:
                param.sub_(0.1 * param.grad)

    model = attention()
    optimizer = NoLr(model.parameters())
    with QuacK(model, optimizer, rule=Budget(BUDGET)) as quack:
        train(model, optimizer, steps=1)
        assert relative_change(quack) == pytest.approx(1, rel=1e-2)
