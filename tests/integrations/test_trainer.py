"""transformers' Trainer with QuacKCallback. Judges: a loop written by hand, the uninterrupted training."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import Trainer, TrainerCallback, TrainingArguments

from models import Separate, assert_equal
from quacklr import Budget, ConstantTau, LogitPath, Paper, QuacK, Rule, spectral
from quacklr.integrations.transformers import QuacKCallback

STEPS, LR = 9, 0.05


class Repeater(nn.Module):
    """Guesses the token before; in the form that Trainer wants."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding, self.attention, self.out = nn.Embedding(8, 16), Separate(), nn.Linear(16, 8)
        self.dropout = nn.Dropout(dropout)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits_BTV = self.out(self.attention(self.dropout(self.embedding(input_ids))))
        return {"loss": nn.functional.cross_entropy(logits_BTV.flatten(0, 1), labels.flatten()), "logits": logits_BTV}


def make_model(dropout: float = 0.0) -> Repeater:
    torch.manual_seed(0)
    return Repeater(dropout)


def make_data() -> list[dict[str, Tensor]]:
    tokens = torch.randint(8, (24, 6), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row.roll(1)} for row in tokens]


def make_trainer(folder: Path, *callbacks: TrainerCallback, model: nn.Module | None = None, **settings: Any) -> Trainer:
    made_by_hand = settings.pop("optimizers", (None, None))
    quiet: dict[str, Any] = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "logging_steps": 1}
    steps: dict[str, Any] = {"max_steps": STEPS, "save_steps": 4, "learning_rate": LR, "per_device_train_batch_size": 2}
    return Trainer(
        model=make_model() if model is None else model,
        args=TrainingArguments(output_dir=str(folder), **quiet | steps | settings),
        train_dataset=make_data(),
        eval_dataset=make_data()[:4],
        callbacks=list(callbacks),
        optimizers=made_by_hand,
    )


def weights(trainer: Trainer) -> Tensor:
    assert isinstance(trainer.model, nn.Module)
    return torch.cat([param.detach().flatten().clone() for param in trainer.model.parameters()])


def plain_loop(accumulate: int, attach: Callable[[nn.Module, Optimizer], object]) -> Tensor:
    model, data = make_model(), make_data() * 10
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, fused=True)
    attach(model, optimizer)
    batches = [{key: torch.stack([a[key], b[key]]) for key in a} for a, b in zip(data[::2], data[1::2], strict=True)]
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = LR * (STEPS - step) / STEPS
        for batch in batches[step * accumulate : (step + 1) * accumulate]:
            (model(**batch)["loss"] / accumulate).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([param.detach().flatten() for param in model.parameters()])


@pytest.mark.parametrize(
    ("accumulate", "rule"),
    [(3, Paper(2.0, norm=spectral)), (1, ConstantTau(2.0)), (2, Budget(1e-3))],
)
def test_it_trains_as_a_loop_by_hand_with_quack_does(tmp_path: Path, accumulate: int, rule: Rule) -> None:
    settings: dict[str, Any] = {"train_sampling_strategy": "sequential", "gradient_accumulation_steps": accumulate}
    trainer = make_trainer(tmp_path, QuacKCallback(rule=rule), **settings)
    trainer.train()
    assert_equal(weights(trainer), plain_loop(accumulate, lambda *each: QuacK(*each, rule=rule)))
    assert (weights(trainer) - plain_loop(accumulate, lambda *_: None)).abs().max() > 1e-3


def test_what_to_control_can_be_said_by_a_function_of_the_model(tmp_path: Path) -> None:
    def paths(model: Any) -> list[LogitPath]:
        return model.attention.logit_paths()

    callback = QuacKCallback(tau=0.5, paths=paths)
    trainer = make_trainer(tmp_path, callback, train_sampling_strategy="sequential")
    trainer.train()
    assert_equal(weights(trainer), plain_loop(1, lambda model, optimizer: QuacK(paths(model), optimizer, 0.5)))
    assert callback.quack is not None
    assert list(callback.quack.rates()) == ["q", "k"]


def own_optimizers(model: nn.Module) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    return {"optimizers": (optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))}


@pytest.mark.parametrize(
    ("rule", "settings", "own"),
    [
        (Paper(2.0), {"gradient_accumulation_steps": 3}, False),
        (Paper(2.0, norm=spectral), {"gradient_accumulation_steps": 2}, True),
        (Budget(1e-3), {"lr_scheduler_type": "cosine"}, False),
    ],
    ids=["accumulating", "own-optimizer", "budget"],
)
def test_a_resumed_training_is_bitwise_the_uninterrupted_one(
    tmp_path: Path, rule: Rule, settings: dict[str, Any], own: bool
) -> None:
    def make(folder: str) -> Trainer:
        model = make_model(dropout=0.2)
        more = own_optimizers(model) if own else {}
        return make_trainer(tmp_path / folder, QuacKCallback(rule=rule), model=model, **settings, **more)

    whole = make("run")
    whole.train()
    shutil.rmtree(tmp_path / f"run/checkpoint-{STEPS}")
    last = make("run")
    last.train(resume_from_checkpoint=True)
    assert_equal(weights(last), weights(whole))
    moved = shutil.move(tmp_path / "run/checkpoint-4", tmp_path / "moved")
    elsewhere = make("elsewhere")
    elsewhere.train(resume_from_checkpoint=str(moved))
    assert_equal(weights(elsewhere), weights(whole))
    assert [len(trainer.state.log_history) for trainer in (whole, last, elsewhere)] == [STEPS + 1] * 3


def key_norms(model: Any) -> Tensor:
    """How far a unit change of a query can move its head's logits: what its rates are relative to."""
    return model.attention.k.weight.detach().view(4, -1).norm(dim=1)


def start(callback: QuacKCallback) -> Tensor:
    assert callback.quack is not None
    return callback.quack.state_dict()["sensitivity"]["attention.q"]


def test_a_checkpoint_without_its_state_triggers_a_warning_and_rates_start_there(tmp_path: Path) -> None:
    first = make_trainer(tmp_path, QuacKCallback(tau=1.0), save_only_model=True)
    first.train()
    callback = QuacKCallback(tau=1.0)
    resumed = make_trainer(tmp_path, callback, max_steps=STEPS + 3)
    with pytest.warns(UserWarning, match="the checkpoint holds no state of QuacK, so all rates start again from tau"):
        resumed.train(resume_from_checkpoint=True)
    torch.testing.assert_close(start(callback), key_norms(first.model))


def is_free(trainer: Trainer) -> bool:
    """Whether no QuacK is on the trainer's optimizer: another one can be attached, and no state of one is saved."""
    assert isinstance(trainer.model, nn.Module)
    assert trainer.optimizer is not None
    QuacK(trainer.model, trainer.optimizer).remove()
    states: Any = trainer.state.stateful_callbacks
    states.pop("quack", None)
    trainer.optimizer.state_dict()
    return "quack" not in states


def test_a_state_of_another_norm_is_refused_and_nothing_stays_attached(tmp_path: Path) -> None:
    make_trainer(tmp_path, QuacKCallback(tau=1.0)).train()
    callback = QuacKCallback(rule=Paper(norm=spectral))
    trainer = make_trainer(tmp_path, callback)
    with pytest.raises(ValueError, match="made with norm=frobenius, but this QuacK has norm=spectral"):
        trainer.train(resume_from_checkpoint=True)
    assert callback.quack is None
    assert is_free(trainer)


def test_settings_are_refused_when_given_and_a_model_when_training_begins(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tau"):
        QuacKCallback(tau=-1.0)
    callback, model = QuacKCallback(tau=1.0), make_model()
    model.attention = nn.Identity()  # type: ignore[assignment]
    with pytest.raises(ValueError, match="Repeater has no attention that QuacK can control"):
        make_trainer(tmp_path, callback, model=model).train()


def test_afterwards_the_optimizer_is_free_and_a_second_training_starts_from_its_weights(tmp_path: Path) -> None:
    callback = QuacKCallback(tau=1.0)
    trainer = make_trainer(tmp_path, callback)
    trainer.train()
    torch.testing.assert_close(start(callback), key_norms(make_model()))
    assert is_free(trainer)
    between = key_norms(trainer.model)
    trainer.train()
    torch.testing.assert_close(start(callback), between)
    assert is_free(trainer)


class Interrupt(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        if state.global_step == 6:
            raise KeyboardInterrupt


def test_after_a_training_that_raised_the_same_trainer_resumes(tmp_path: Path) -> None:
    whole = make_trainer(tmp_path / "whole", QuacKCallback(tau=1.0))
    whole.train()
    trainer = make_trainer(tmp_path / "interrupted", QuacKCallback(tau=1.0), Interrupt())
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.remove_callback(Interrupt)
    trainer.train(resume_from_checkpoint=True)
    assert_equal(weights(trainer), weights(whole))
    assert is_free(trainer)


class Tracker(TrainerCallback):
    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        self.rows.append(kwargs["logs"])


def test_the_range_of_rates_is_logged_with_the_loss(tmp_path: Path) -> None:
    callback, tracker = QuacKCallback(tau=0.5), Tracker()
    trainer = make_trainer(tmp_path, callback, tracker)
    trainer.train()
    assert callback.quack is not None
    rates = torch.cat(list(callback.quack.rates().values()))
    for row in (tracker.rows[STEPS - 1], trainer.state.log_history[STEPS - 1]):
        assert (row["quack/rate_min"], row["quack/rate_max"]) == (rates.min().item(), rates.max().item())
    assert "quack/rate_min" not in tracker.rows[-1], "the summary of the training is no step"


def test_a_limit_logs_the_largest_change_and_the_history_has_it_by_attention(tmp_path: Path) -> None:
    callback, tracker = QuacKCallback(), Tracker()
    trainer = make_trainer(tmp_path, callback, tracker)
    trainer.train()
    assert callback.quack is not None
    asked = {f"quack/change/{name}": each.asked.max().item() for name, each in callback.quack.changes().items()}
    assert asked
    row = trainer.state.log_history[STEPS - 1]
    assert {name: row[name] for name in row if name.startswith("quack/change/")} == asked
    assert tracker.rows[STEPS - 1]["quack/change_max"] == row["quack/change_max"] == max(asked.values())


def test_a_state_that_the_training_went_on_without_is_not_taken(tmp_path: Path) -> None:
    make_trainer(tmp_path, QuacKCallback(tau=1.0)).train()
    make_trainer(tmp_path, max_steps=STEPS + 2).train(resume_from_checkpoint=True)
    with pytest.warns(UserWarning, match="the checkpoint holds no state of QuacK"):
        make_trainer(tmp_path, QuacKCallback(tau=1.0), max_steps=STEPS + 4).train(resume_from_checkpoint=True)
