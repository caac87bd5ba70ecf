"""What is written to TensorBoard and Weights & Biases is what was measured: their own code takes it."""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch.utils.tensorboard import SummaryWriter

from quacklr import LogitStats
from quacklr.integrations.writers import to_tensorboard, to_wandb


def stats(largest: dict[str, list[float]], **others: float) -> dict[str, LogitStats]:
    """Given numbers for `max`, and for each other statistic the same number plus that of the head."""

    def each(field: str, values: list[float]) -> torch.Tensor:
        if field == "max":
            return torch.tensor(values)
        return others.get(field, 0.5) + torch.arange(len(values)).float()

    return {
        name: LogitStats(**{field.name: each(field.name, values) for field in fields(LogitStats)})
        for name, values in largest.items()
    }


def shown(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
        EventAccumulator,
    )

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_gets_the_largest_max_of_an_attention_and_the_mean_of_everything_else(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        to_tensorboard(writer, stats({"a": [1.0, 7.0, 4.0], "b": [-3.0, -2.0]}, entropy=2.0), 10)
        to_tensorboard(writer, stats({"a": [1.0, 8.0, 4.0], "b": [-3.0, -5.0]}, entropy=1.0), 25)
    found = shown(tmp_path)
    assert set(found) == {f"logits_{field.name}/{name}" for field in fields(LogitStats) for name in "ab"}
    assert found["logits_max/a"] == [(10, 7.0), (25, 8.0)]
    assert found["logits_max/b"] == [(10, -2.0), (25, -3.0)]
    assert found["logits_entropy/a"] == [(10, 3.0), (25, 2.0)]


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_every_head_has_a_scalar_of_its_own_without_numbers_that_are_not_finite(broken: float, tmp_path: Path) -> None:
    """A model that is itself an attention has the name "model"."""
    with SummaryWriter(str(tmp_path)) as writer:
        given = stats({"": [1.0, broken, 4.0], "b": [broken]}, mean_change=math.nan)
        to_tensorboard(writer, given, 0, heads=True)
    found = shown(tmp_path)
    assert not any("change" in tag for tag in found)
    assert {tag: values for tag, values in found.items() if tag.startswith("logits_max")} == {
        "logits_max/model": [(0, 4.0)],
        "logits_max_by_head/model/head_0": [(0, 1.0)],
        "logits_max_by_head/model/head_2": [(0, 4.0)],
    }
    assert all(math.isfinite(value) for values in found.values() for _, value in values)


@pytest.mark.filterwarnings("ignore")  # wandb's own
def test_wandb_gets_the_same_scalars_at_the_same_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its offline mode: the real client takes what it would upload."""
    import wandb

    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    first, later = (stats({"a.0": [1.0, math.nan], "a.1": [9.0]}, mean_change=change) for change in (math.nan, 0.25))
    rows: dict[int, dict[str, float]] = {}
    log = wandb.Run.log

    def logged(run: wandb.Run, data: dict[str, float], step: int) -> None:
        rows[step] = data
        log(run, data, step)

    monkeypatch.setattr(wandb.Run, "log", logged)
    with wandb.init(mode="offline", dir=str(tmp_path), project="ducks") as run:
        to_wandb(run, first, 3)
        to_wandb(wandb, later, 8, heads=True)
    wandb.teardown()
    assert set(rows) == {3, 8}
    assert rows[3]["logits_max/a.0"] == 1.0
    assert len(rows[3]) == (len(fields(LogitStats)) - 1) * 2
    assert "logits_mean_change/a.1" not in rows[3]
    assert rows[8]["logits_mean_change_by_head/a.1/head_0"] == 0.25
