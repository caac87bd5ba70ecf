"""QuacK on what `accelerator.prepare` returns. Judges: the same loop without accelerate, the uninterrupted run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from accelerate.optimizer import AcceleratedOptimizer  # type: ignore[import-untyped]
from accelerate.state import AcceleratorState, GradientState  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR

from models import Separate, assert_equal
from quacklr import Paper, QuacK, spectral

STEPS, ACCUMULATE, LR = 6, 3, 0.05


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """Accelerate keeps its settings in globals."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def make_model() -> Separate:
    torch.manual_seed(0)
    return Separate()


def batches(step: int) -> Tensor:
    return torch.randn(ACCUMULATE, 4, 5, 16, generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, x_BTD: Tensor) -> Tensor:
    return (model(x_BTD) - x_BTD.roll(1, 1)).square().mean()


def weights(model: nn.Module) -> Tensor:
    return torch.cat([param.detach().flatten().clone() for param in model.parameters()])


def plain_loop(quack: bool) -> Tensor:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    scheduler = ExponentialLR(optimizer, 0.9)
    if quack:
        QuacK(model, optimizer, rule=Paper(2.0, norm=spectral))
    for step in range(STEPS):
        for x_BTD in batches(step):
            (loss_of(model, x_BTD) / ACCUMULATE).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return weights(model)


class Run:
    """A loop with accelerate, as its documentation writes it."""

    def __init__(self) -> None:
        self.accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATE, cpu=True)
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(
            model, optimizer, ExponentialLR(optimizer, 0.9)
        )
        self.quack = QuacK(self.model, self.optimizer, rule=Paper(2.0, norm=spectral))
        self.accelerator.register_for_checkpointing(self.quack)

    def train(self, steps: range) -> Tensor:
        for step in steps:
            for x_BTD in batches(step):
                with self.accelerator.accumulate(self.model):
                    self.accelerator.backward(loss_of(self.model, x_BTD))
                    if self.accelerator.sync_gradients:
                        self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
        return weights(self.model)


def test_a_prepared_optimizer_is_scaled_as_in_the_same_loop_without_accelerate() -> None:
    run = Run()
    trained = run.train(range(STEPS))
    assert isinstance(run.optimizer, AcceleratedOptimizer)
    assert run.quack.optimizers == [run.optimizer.optimizer]
    assert_equal(trained, plain_loop(quack=True))
    assert (trained - plain_loop(quack=False)).abs().max() > 1e-3


def test_a_state_loaded_by_accelerate_continues_bitwise(tmp_path: Path) -> None:
    first = Run()
    first.train(range(4))
    first.accelerator.save_state(str(tmp_path))
    resumed = Run()
    resumed.accelerator.load_state(str(tmp_path))
    assert_equal(resumed.train(range(4, STEPS)), plain_loop(quack=True))


def test_a_quack_attached_before_prepare_gets_no_warning_that_a_state_was_loaded() -> None:
    """Preparing loads the optimizer's own, still empty state; warnings are errors here."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    QuacK(model, optimizer, tau=1.0)
    accelerator: Any = Accelerator(cpu=True)
    prepared = accelerator.prepare(optimizer)
    loss_of(model, batches(0)[0]).backward()
    prepared.step()
