"""A run's logits as a picture, made from its `metrics.jsonl`: every head, from the first step to the last."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from quacklr.integrations.heatmap import History
from quacklr.lab.errors import UserError
from quacklr.lab.train.folder import Folder
from quacklr.lab.train.statistics import by_layer

SHOWN = ("max", "step_change", "entropy", "sink")  # `change` is since the measurement before, and looks much the same


def history_of(folder: Path) -> History:
    """What was measured of a run's logits so far."""
    history = History()
    for row in Folder(folder).rows():
        if "logits" in row:
            history.add_tables(row["step"], by_layer(row))
    return history


def draw_logits(folder: Path) -> Path | None:
    """Write `logits.png` into a run's folder, whether it has ended or not; None without matplotlib or measurements."""
    history, path = history_of(folder), folder / "logits.png"
    if not history.steps or not find_spec("matplotlib"):
        return None
    try:
        history.save(path, *(name for name in SHOWN if name in history.statistics))
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    return path
