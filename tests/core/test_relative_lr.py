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


def changes_of_a_warmup(
    lrs: list[float], make: Callable[[Any], Any], by_hand: Callable[[Any, float], None]
) -> list[float]:
    """Relative changes in a run with these lrs, which the loop sets itself."""
    model, found = attention(), []
    optimizer = make(model)
    with QuacK(model, optimizer, rule=Budget(BUDGET)) as quack:
        for lr in lrs:
            by_hand(optimizer.param_groups[0], lr)
            train(model, optimizer, steps=1)
            found.append(relative_change(quack))
    return found


def set_number(group: dict[str, Any], lr: float) -> None:
    group["lr"] = lr


def set_tensor(group: dict[str, Any], lr: float) -> None:
    group["lr"].fill_(lr)


@pytest.mark.parametrize("first", [0.1, 0.0, 1e-4])
@pytest.mark.parametrize(
    ("start", "by_hand"), [(float, set_number), (torch.tensor, set_tensor)], ids=["number", "tensor"]
)
def test_a_loop_that_sets_lr_by_hand_never_gets_more_than_the_budget(first: float, start: Any, by_hand: Any) -> None:
    """`first` is lr when QuacK is attached. If that is the peak lr, the budget follows the warmup too."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lrs = [0.01, 0.05, 0.1, 0.05, 0.1, 0.01]
        found = changes_of_a_warmup(
            lrs, lambda model: AdamW(model.parameters(), lr=start(first), foreach=False), by_hand
        )
    assert found == pytest.approx([0.1, 0.5, 1, 0.5, 1, 0.1] if first == 0.1 else [1, 1, 1, 0.5, 1, 0.1], rel=1e-2)
    assert len(caught) == (first < 0.1)
    if caught:
        assert f"of AdamW is 0.01 now, and was {first:g} when QuacK was attached" in str(caught[0].message)
        assert "Budget(0.05) did not follow this rise: every step was allowed 0.05 nats" in str(caught[0].message)
        assert caught[0].filename.endswith("models.py")  # the line that called optimizer.step


def test_a_scheduler_may_be_made_after_quack_and_a_group_may_be_added() -> None:
    model: Any = attention()
    optimizer = AdamW(model.parameters(), lr=0.1)
    with QuacK(model, optimizer, rule=Budget(BUDGET)) as quack:
        OneCycleLR(optimizer, max_lr=0.2, total_steps=10, div_factor=10)  # lr is a tenth of max_lr now
        train(model, optimizer, steps=1)
        assert relative_change(quack) == pytest.approx(0.1, rel=1e-2)
    model = layers(2, Separate)
    optimizer = AdamW([{"params": model[0].parameters()}], lr=0.1)
    optimizer.add_param_group({"params": model[1].parameters(), "lr": 0.02})
    with QuacK(model, optimizer, rule=Budget(BUDGET)) as quack:
        optimizer.param_groups[1]["lr"] = 0.01
        train(model, optimizer, steps=1)
        assert [relative_change(quack, name) for name in "01"] == pytest.approx([1, 0.5], rel=1e-2)


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
