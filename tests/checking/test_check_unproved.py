"""What the check did not show is not `ok`: logits that are missing, rows that take no step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from check_runs import X_BTD, checked, stack
from models import PerHead, Separate
from quacklr import check


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
    assert str(report).endswith("no logits to compare\n\nnot shown: 1 of 1 layer")
    assert report.layers[0].measured.isnan().tolist() == [True, False, False, False]


def optimizers(model: Any) -> Iterator[tuple[Optimizer, Any]]:
    yield SGD(model.parameters(), lr=0.1), lambda model, x: model[0](x).square().mean()
    yield SGD([{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.0}], lr=0.1), None


def test_rows_that_take_no_step_though_they_train_are_not_shown_to_be_right() -> None:
    model = stack(Separate)
    for optimizer, loss in optimizers(model):
        report = check(model, optimizer, X_BTD, loss=loss, steps=1)
        assert not report.ok
        assert str(report).splitlines()[2].endswith("its rows took no step: no gradient, or lr is 0")


def test_frozen_rows_are_compared_with_the_measurement_and_are_ok() -> None:
    model = stack(PerHead)
    model[1].requires_grad_(False)
    report = checked(model, steps=1)
    assert report.ok
    assert "ok, but its rows took no step: they are frozen" in str(report)
