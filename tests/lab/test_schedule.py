"""Learning rate schedules. Judge: values worked out by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from quacklr.lab.errors import UserError
from quacklr.lab.optim import WSD, Constant, Cosine, Schedule, factor, set_lr, validate_schedule

ROOT_HALF = 0.5**0.5
BY_HAND: list[tuple[Schedule, list[float]]] = [
    (Constant(0), [1, 1, 1, 1]),
    (Constant(4), [0.25, 0.5, 0.75, 1, 1, 1]),
    (Constant(2), [0.5, 1]),
    (Cosine(0, 0.0), [1, (1 + ROOT_HALF) / 2, 0.5, (1 - ROOT_HALF) / 2]),
    (Cosine(2, 0.1), [0.5, 1, 1, 0.55 + 0.45 * ROOT_HALF, 0.55, 0.55 - 0.45 * ROOT_HALF]),
    (Cosine(2), [0.5, 1]),
    (Cosine(0, 1.0), [1, 1, 1]),
    (WSD(2, 4), [0.5, 1, 1, 1, 1, 0.75, 0.5, 0.25]),
    (WSD(0, 2, 0.5), [1, 1, 1, 0.75]),
    (WSD(1, 0), [1, 1, 1]),
    (WSD(2, 2), [0.5, 1, 1, 0.5]),
]


@pytest.mark.parametrize(("schedule", "expected"), BY_HAND, ids=str)
def test_a_schedule_is_what_one_works_out_by_hand(schedule: Schedule, expected: list[float]) -> None:
    steps = len(expected)
    validate_schedule(schedule, steps)
    assert [factor(schedule, step, steps) for step in range(steps)] == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize(
    ("schedule", "end"),
    [(Constant(3), 1.0), (Cosine(3), 0.1), (Cosine(3, 0.3), 0.3), (WSD(3, 2), 0.0)],
)
def test_the_final_factor_is_reached_when_the_run_ends_and_kept(schedule: Schedule, end: float) -> None:
    assert factor(schedule, 20, 20) == pytest.approx(end)
    assert factor(schedule, 30, 20) == pytest.approx(end)


@pytest.mark.parametrize("schedule", [Constant(7), Cosine(7), WSD(7, 5)], ids=str)
def test_every_schedule_warms_up_in_a_straight_line(schedule: Schedule) -> None:
    assert [factor(schedule, step, 20) for step in range(7)] == [(step + 1) / 7 for step in range(7)]


def test_every_group_gets_the_factor_of_its_own_peak() -> None:
    params = [nn.Parameter(torch.ones(1)) for _ in range(3)]
    one = torch.optim.SGD([{"params": [params[0]], "peak_lr": 0.5}, {"params": [params[1]], "peak_lr": 2.0}], lr=9.0)
    two = torch.optim.SGD([{"params": [params[2]], "peak_lr": 4.0}], lr=9.0)
    for multiplier in (0.5, 0.25):  # of the peak, not of what was there
        set_lr([one, two], multiplier)
    assert [group["lr"] for optimizer in (one, two) for group in optimizer.param_groups] == [0.125, 0.5, 1.0]


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (Constant(11), "--warmup 11 is longer than the run of 10 steps"),
        (Cosine(11), "--warmup 11 is longer than the run of 10 steps"),
        (WSD(11, 0), "--warmup 11 is longer than the run of 10 steps"),
        (WSD(6, 5), "--warmup 6 and --decay 5 together are longer than the run of 10 steps"),
    ],
)
def test_a_schedule_longer_than_the_run_is_refused(schedule: Schedule, message: str) -> None:
    validate_schedule(schedule, 11)
    with pytest.raises(UserError, match=f"^{message}$"):
        validate_schedule(schedule, 10)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Constant(-1), "--warmup must be 0 or a positive number, not -1"),
        (lambda: Cosine(-2), "--warmup must be 0 or a positive number, not -2"),
        (lambda: Cosine(0, float("nan")), "--final must be between 0 and 1, not nan"),
        (lambda: Cosine(0, 1.5), "--final must be between 0 and 1, not 1.5"),
        (lambda: WSD(-1, 0), "--warmup must be 0 or a positive number, not -1"),
        (lambda: WSD(0, -3), "--decay must be 0 or a positive number, not -3"),
        (lambda: WSD(0, 0, -0.1), "--final must be between 0 and 1, not -0.1"),
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused_in_a_sentence(make: Callable[[], Schedule], message: str) -> None:
    with pytest.raises(UserError, match=f"^{message}$"):
        make()
