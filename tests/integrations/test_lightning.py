"""Lightning with QuacKCallback. Judges: a loop written by hand, the uninterrupted training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_model import BATCHES, EPOCHS, LR, Regression, batches
from models import assert_equal
from quacklr import Budget, Paper, QuacK, Rule, spectral
from quacklr.integrations.lightning import QuacKCallback

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated:FutureWarning"),  # Lightning calls torch as of old
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty:UserWarning"),
]


class ByHand(Regression):
    """The same with two optimizers, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        loss = self.loss(batch)
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        return two_optimizers(self)


def two_optimizers(model: nn.Module) -> list[Optimizer]:
    keys = [param for name, param in model.named_parameters() if ".k." in name]
    rest = [param for name, param in model.named_parameters() if ".k." not in name]
    return [torch.optim.SGD(keys, lr=LR, momentum=0.9), torch.optim.AdamW(rest, lr=LR)]


def make_trainer(folder: Path, *callbacks: Callback, **settings: Any) -> Trainer:
    left_out: dict[str, Any] = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    left_out["enable_checkpointing"] = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    return Trainer(default_root_dir=folder, callbacks=list(callbacks), **left_out | {"max_epochs": EPOCHS} | settings)


def fit(trainer: Trainer, model: LightningModule, ckpt_path: Path | None = None) -> Tensor:
    data: Any = DataLoader(batches(), batch_size=None)  # type: ignore[arg-type]
    trainer.fit(model, data, data, ckpt_path=ckpt_path)
    return weights(model)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def plain_loop(accumulate: int, attach: Callable[[nn.Module, Optimizer], object]) -> Tensor:
    model = Regression()
    ((optimizer,), (scheduler,)) = model.configure_optimizers()
    attach(model, optimizer)
    for _ in range(EPOCHS):
        for index, batch in enumerate(batches(), start=1):
            (model.loss(batch) / accumulate).backward()
            if index % accumulate == 0 or index == BATCHES:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
                scheduler["scheduler"].step()
    return weights(model)


def test_it_trains_as_a_loop_by_hand_with_quack_does(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    trained = fit(make_trainer(tmp_path, QuacKCallback(rule=Paper(0.5, norm=spectral)), **settings), Regression())
    assert_equal(trained, plain_loop(2, lambda *each: QuacK(*each, rule=Paper(0.5, norm=spectral))))
    assert (trained - plain_loop(2, lambda *_: None)).abs().max() > 1e-3


def test_several_optimizers_stepped_by_hand_are_scaled_as_in_a_loop_by_hand(tmp_path: Path) -> None:
    callback = QuacKCallback(0.5)
    trained = fit(make_trainer(tmp_path, callback), ByHand())
    model = ByHand()
    optimizers = two_optimizers(model)
    QuacK(model, optimizers, 0.5)
    for batch in batches() * EPOCHS:
        model.zero_grad()
        model.loss(batch).backward()
        for optimizer in optimizers:
            optimizer.step()
    assert_equal(trained, weights(model))
    assert callback.quack is not None
    assert [type(optimizer).__name__ for optimizer in callback.quack.optimizers] == ["SGD", "AdamW"]


def test_quack_itself_takes_what_lightning_wraps(tmp_path: Path) -> None:
    class Attached(Regression):
        def on_train_start(self) -> None:
            wrapped: Any = self.optimizers()
            assert isinstance(wrapped, LightningOptimizer)
            QuacK(self, wrapped, 0.5)

    assert_equal(fit(make_trainer(tmp_path), Attached()), fit(make_trainer(tmp_path, QuacKCallback(0.5)), Regression()))


@pytest.mark.parametrize(
    ("make_model", "rule"), [(Regression, Paper(2.0, norm=spectral)), (ByHand, Paper(2.0)), (Regression, Budget(1e-3))]
)
def test_a_resumed_fit_is_bitwise_the_uninterrupted_one(
    tmp_path: Path, make_model: Callable[[], Regression], rule: Rule
) -> None:
    settings = {} if make_model is ByHand else {"accumulate_grad_batches": 2}

    def make(*callbacks: Callback) -> Trainer:
        return make_trainer(tmp_path, QuacKCallback(rule=rule), *callbacks, **settings)

    whole = fit(make(ModelCheckpoint(tmp_path / "saved", "{epoch}", save_top_k=-1)), make_model())
    resumed = make(ModelCheckpoint(tmp_path / "saved"))
    assert_equal(fit(resumed, make_model(), tmp_path / "saved/epoch=0.ckpt"), whole)
    assert resumed.current_epoch == EPOCHS


def start(callback: QuacKCallback) -> Tensor:
    assert callback.quack is not None
    return callback.quack.state_dict()["sensitivity"]["attention.q"]


def key_norms(model: Regression) -> Tensor:
    """How far a unit change of a query can move its head's logits: what its rates are relative to."""
    return model.attention.k.weight.detach().view(4, -1).norm(dim=1)


def test_a_checkpoint_without_its_state_triggers_a_warning_and_rates_start_there(tmp_path: Path) -> None:
    first, model = make_trainer(tmp_path), Regression()
    fit(first, model)
    first.save_checkpoint(tmp_path / "without.ckpt")

    def continued(callback: QuacKCallback) -> None:
        fit(make_trainer(tmp_path, callback, max_epochs=EPOCHS + 2), Regression(), tmp_path / "without.ckpt")

    callback = QuacKCallback(tau=1.0)
    with pytest.warns(UserWarning, match="the checkpoint holds no state of QuacK, so all rates start again from tau"):
        continued(callback)
    torch.testing.assert_close(start(callback), key_norms(model))
    continued(QuacKCallback(rule=Budget(1e-3)))  # no warning: a budget has no state to miss


class SaveFirst(Callback):
    """Saves a checkpoint before the first step."""

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        trainer.save_checkpoint(f"{trainer.default_root_dir}/first.ckpt")


def test_a_checkpoint_from_before_the_first_step_has_no_state_to_miss(tmp_path: Path) -> None:
    fit(make_trainer(tmp_path, SaveFirst(), max_epochs=1), Regression())
    callback = QuacKCallback(tau=1.0)
    fit(make_trainer(tmp_path, callback, max_epochs=1), Regression(), tmp_path / "first.ckpt")  # no warning
    torch.testing.assert_close(start(callback), key_norms(Regression()))


def test_afterwards_optimizers_are_free_and_a_second_fit_starts_from_its_weights(tmp_path: Path) -> None:
    first, checkpoint = make_trainer(tmp_path, QuacKCallback(tau=1.0), max_epochs=1), tmp_path / "first.ckpt"
    fit(first, Regression())
    first.save_checkpoint(checkpoint)
    callback, model = QuacKCallback(tau=1.0), Regression()
    trainer, before = make_trainer(tmp_path, callback), key_norms(model)
    fit(trainer, model, checkpoint)
    torch.testing.assert_close(start(callback), before)
    assert is_free(model, trainer)
    trainer.fit_loop.max_epochs = EPOCHS + 2
    between = key_norms(model)
    fit(trainer, model)
    torch.testing.assert_close(start(callback), between)


def test_a_checkpoint_written_before_training_starts_keeps_the_state_it_was_given(tmp_path: Path) -> None:
    first, callback = QuacKCallback(tau=1.0), QuacKCallback(tau=1.0)
    fit(make_trainer(tmp_path, first), Regression())
    assert callback.state_dict() == {}
    callback.load_state_dict(first.state_dict())
    assert_equal(callback.state_dict()["sensitivity"], first.state_dict()["sensitivity"])


def is_free(model: nn.Module, trainer: Trainer) -> bool:
    """Whether no QuacK is on the trainer's optimizers, so that another one can be attached."""
    QuacK(model, trainer.optimizers).remove()
    return True


def test_loggers_get_the_changes_of_a_limit(tmp_path: Path) -> None:
    """TensorBoard's, read back."""
    callback, logger = QuacKCallback(), TensorBoardLogger(tmp_path)
    fit(make_trainer(tmp_path, callback, logger=logger, log_every_n_steps=BATCHES), Regression())
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    assert callback.quack is not None
    for name, change in callback.quack.changes().items():
        scalars = events.Scalars(f"quack/change/{name}")
        assert [event.step for event in scalars] == [BATCHES * (epoch + 1) for epoch in range(EPOCHS)]
        assert scalars[-1].value == change.asked.max().item() > 0
