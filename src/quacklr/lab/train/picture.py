"""The figure `logits.png` of a run: logit statistics of every head over all steps, from `metrics.jsonl`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from quacklr.integrations.heatmap import History
from quacklr.lab.errors import os_errors
from quacklr.lab.train.folder import Folder
from quacklr.lab.train.statistics import by_layer

SHOWN = ("max", "step_change", "entropy", "sink")  # without `change`, which looks like `step_change`


def history_of(folder: Path) -> History:
    """The logit statistics of a run so far."""
    history = History()
    for row in Folder(folder).rows():
        if "logits" in row:
            history.add_tables(row["step"], by_layer(row))
    return history


def draw_logits(folder: Path) -> Path | None:
    """Write `logits.png` to the folder of a run, finished or not; None without matplotlib or measurements."""
    history, path = history_of(folder), folder / "logits.png"
    if not history.steps or not find_spec("matplotlib"):
        return None
    with os_errors(f"cannot write {path}"):
        history.save(path, *(name for name in SHOWN if name in history.statistics))
    return path
