"""A history keeps what was measured, survives a resume, and refuses what it cannot draw."""

from __future__ import annotations

import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from histories import history
from quacklr import LogitMonitor, LogitStats
from quacklr.integrations.heatmap import History


def test_a_resumed_history_goes_on_where_it_was(tmp_path: Path) -> None:
    whole, stopped, resumed = History(), History(), History()
    for step in range(4):
        numbers: Any = {"max": {"a": [step + 1.0, None], "b": [step + 3.0]}} | (
            {"late": {"a": [1.0, 2.0], "b": [3.0]}} if step else {}
        )
        whole.add_tables(step, numbers)
        if step < 2:
            stopped.add_tables(step, numbers)
    torch.save(stopped.state_dict(), tmp_path / "state.pt")
    resumed.add_tables(99, {"max": {"c": [1.0]}})
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for step in (2, 3):
        resumed.add_tables(
            step, {"max": {"a": [step + 1.0, None], "b": [step + 3.0]}, "late": {"a": [1.0, 2.0], "b": [3.0]}}
        )
    assert resumed.steps == whole.steps == [0, 1, 2, 3]
    for name in ("max", "late"):
        torch.testing.assert_close(resumed.numbers(name), whole.numbers(name), rtol=0, atol=0, equal_nan=True)
    fresh = History()
    fresh.load_state_dict(History().state_dict())
    assert fresh.steps == []


def test_a_step_that_is_measured_again_is_replaced() -> None:
    found = history({0: {"a": [1.0]}, 5: {"a": [2.0]}})
    found.add_tables(5, {"max": {"a": [7.0]}})
    assert found.numbers("max").tolist() == [[1.0, 7.0]]


def test_a_loaded_history_does_not_change_with_the_state_that_it_was_loaded_from() -> None:
    found, state = History(), history({0: {"a": [1.0]}, 5: {"a": [2.0]}}).state_dict()
    found.load_state_dict(state)
    state["numbers"]["max"].zero_()
    assert found.numbers("max").tolist() == [[1.0, 2.0]]


def test_a_history_keeps_small_numbers_of_its_own_on_the_cpu() -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    monitor = LogitMonitor(torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(2, 6, 16))
    found = History()
    measured = [monitor.measure() for _ in range(2)]
    for step, each in enumerate(measured):
        found.add(step, each)
    state = found.state_dict()
    assert state["heads"] == dict.fromkeys(measured[0], 4)
    for field in fields(LogitStats):
        kept = state["numbers"][field.name]
        assert (kept.shape, kept.dtype, kept.device.type) == ((8, 2), torch.float32, "cpu")
        expected = torch.stack([torch.cat([getattr(each, field.name) for each in at.values()]) for at in measured], 1)
        torch.testing.assert_close(kept, expected, rtol=0, atol=0, equal_nan=True)


def test_a_file_that_cannot_be_written_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = history({0: {"a": [1.0]}})
    found.save(str(tmp_path / "logits.png"))
    before = (tmp_path / "logits.png").read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    found.add_tables(1, {"max": {"a": [5.0]}})
    with pytest.raises(OSError, match="No space left"):
        found.save(tmp_path / "logits.png")
    assert (tmp_path / "logits.png").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["logits.png"]


def test_what_cannot_be_drawn_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape("history.add(step, monitor.measure())")):
        History().figure()
    found = history({0: {"a": [1.0]}})
    with pytest.raises(ValueError, match="entropies: not measured; there are max"):
        found.figure("max", "entropies")
    with pytest.raises(ValueError, match=r"logits.jpg: a figure is written as one of \.pdf, \.png, \.svg"):
        found.save(tmp_path / "logits.jpg")
    with pytest.raises(ValueError, match="step 1: attentions with {'a': 2} heads, but before there were {'a': 1}"):
        found.add_tables(1, {"max": {"a": [1.0, 2.0]}})
    halfway: Any = 0.5
    with pytest.raises(ValueError, match=re.escape("step 0.5: a step is a whole number; history.add(step, stats)")):
        found.add_tables(halfway, {"max": {"a": [1.0]}})
    assert found.steps == [0]


def test_without_matplotlib_a_history_still_keeps_and_says_what_drawing_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in ("integrations.drawing", "util.figures"):
        monkeypatch.delitem(sys.modules, f"quacklr.{name}", raising=False)
    found = history({0: {"a": [1.0]}})
    with pytest.raises(ModuleNotFoundError, match="drawing a History needs matplotlib: pip install 'quacklr\\[lab\\]'"):
        found.save("never.png")
    assert found.steps == [0]
