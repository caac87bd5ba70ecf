"""The figure `logits.png` of a run: logit statistics of every head over all steps, from `metrics.jsonl`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from quacklr.lab.files import atomic_write
from quacklr.lab.train.folder import Folder
from quacklr.lab.train.rows import Table

SHOWN = ("max", "step_change", "entropy", "sink")  # without `change`, which looks like `step_change`


def draw_logits(folder: Path) -> Path | None:
    """Write `logits.png` to the folder of a run, finished or not; None without matplotlib or measurements."""
    measured = {row["step"]: row["logits"] for row in Folder(folder).rows() if "logits" in row}
    if not measured or not find_spec("matplotlib"):
        return None
    from quacklr.lab.figures import drawn
    from quacklr.lab.train.heatmap import draw

    layers = len(next(iter(measured.values()))["max"])
    figure = draw(list(measured), numbers_of(list(measured.values())), layers)
    with atomic_write(folder / "logits.png") as file:
        file.write(drawn(figure, "png"))
    return folder / "logits.png"


def numbers_of(measured: list[dict[str, Table]]) -> dict[str, Tensor]:
    """For each statistic (heads of all layers, measurements); NaN for missing numbers."""
    missing: Table = [[None for _ in row] for row in measured[0]["max"]]
    return {
        name: torch.stack([_flat(tables.get(name, missing)) for tables in measured], dim=1)
        for name in SHOWN
        if any(name in tables for tables in measured)
    }


def _flat(table: Table) -> Tensor:
    return torch.tensor([torch.nan if value is None else value for row in table for value in row])
