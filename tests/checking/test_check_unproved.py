"""What the check did not show is not `ok`: logits or steps that are missing or no numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from check_runs import X_BTD, checked, stack
from models import PerHead, Separate
from quacklr import check
from quacklr.checking.report import CheckReport, LayerReport

NUMBERS = ("plain", "quack", "asked", "given")


def report_of(*layers: dict[str, Any]) -> CheckReport:
    good: dict[str, Any] = {"trains": True, "unmeasured": "", **{name: torch.ones(2) for name in NUMBERS}}
    return CheckReport(tuple(LayerReport(str(i), **good | each) for i, each in enumerate(layers)), (), 4.0, {})


def cases() -> Iterator[tuple[str, CheckReport]]:
    yield "rows that were not measured", report_of({}, {"unmeasured": "some experts had no token"})
    for name, value in itertools.product(("plain", "quack"), (math.nan, math.inf)):
        yield f"{name} {value}", report_of({}, {name: torch.tensor([1.0, value])})
    yield "no step", report_of({}, {"asked": torch.tensor([1.0, 0.0])})


CASES = dict(cases())


def test_what_is_shown_is_ok() -> None:
    assert report_of({}, {}).ok
    assert report_of({}, {"trains": False, **dict.fromkeys(NUMBERS, torch.zeros(2))}).ok


@pytest.mark.parametrize("case", CASES)
def test_what_is_not_shown_is_not_ok_and_the_last_line_says_so(case: str) -> None:
    assert not CASES[case].ok
    assert str(CASES[case]).splitlines()[-1] == "not shown: 1 of 2 layers"


class Hidden(Separate):
    """Its first head looks at nothing."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k = (each.transpose(1, 2) for each in self.qk(x_BTD))
        first = torch.arange(4).view(4, 1, 1) == 0
        shares = (q @ k.mT / 2).masked_fill(first, -1e9).softmax(-1)
        return (shares @ self.v(x_BTD).unflatten(2, (4, 4)).transpose(1, 2)).transpose(1, 2).flatten(2)


def test_a_head_without_logits_shows_nothing() -> None:
    report = check(model := stack(Hidden, 1), SGD(model.parameters(), lr=0.1), X_BTD, steps=1)
    assert not report.ok
    assert report.layers[0].quack.isnan().tolist() == [True, False, False, False]


def optimizers(model: Any) -> Iterator[tuple[Optimizer, Any]]:
    yield SGD(model.parameters(), lr=0.1), lambda model, x: model[0](x).square().mean()
    yield SGD([{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.0}], lr=0.1), None


def test_rows_that_take_no_step_though_they_train_are_not_shown_to_be_right() -> None:
    model = stack(Separate)
    for optimizer, loss in optimizers(model):
        report = check(model, optimizer, X_BTD, loss=loss, steps=1)
        assert not report.ok
        assert str(report).splitlines()[4].endswith("its rows took no step: no gradient, or lr is 0")


def test_frozen_rows_are_compared_with_the_measurement_and_are_ok() -> None:
    model = stack(PerHead)
    model[1].requires_grad_(False)
    report = checked(model, steps=1)
    assert report.ok
    assert "ok, but its rows took no step: they are frozen" in str(report)


class Calls(nn.Module):
    """An attention with inputs of an unusual form; the residual is added in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Nested() for _ in range(2))

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD.clone()
        for layer in self.layers:
            y_BTD = layer(x_BTD, others={"pair": (x_BTD, [x_BTD])})
            x_BTD = x_BTD.mul(0).add_(y_BTD)
        return x_BTD


class Nested(Separate):
    def forward(self, x_BTD: Tensor, *, others: dict[str, Any]) -> Tensor:  # type: ignore[override]
        assert others["pair"][0] is x_BTD
        assert others["pair"][1][0] is x_BTD
        return super().forward(x_BTD)


def test_modules_are_called_again_with_the_arguments_of_the_model() -> None:
    report = check(model := Calls(), SGD(model.parameters(), lr=0.1), X_BTD, steps=1)
    assert report.ok, report
