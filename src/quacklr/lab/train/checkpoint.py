"""Checkpoints: whole or not there, checked for damage before they are used, the last few kept.

A file is a zip (torch's own format) of plain tensors and numbers, loaded with `weights_only`. Its checksums, which
torch writes and does not read, are read here: a flipped bit is found before it trains on.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch

from quacklr.lab.errors import UserError
from quacklr.lab.files import whole

FORMAT = 1


def save(folder: Path, step: int, config: str, state: dict[str, Any], keep: int) -> Path:
    """Write the state of a run at a step, then remove all but the last `keep` checkpoints."""
    path = folder / f"step-{step:07}.pt"
    with whole(path) as file:
        try:
            torch.save({"format": FORMAT, "config": config, "state": state}, file)
        except RuntimeError as error:  # torch's words for a write that failed; the system's are behind them
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise
    for old in checkpoints(folder)[:-keep]:
        old.unlink(missing_ok=True)
    return path


def checkpoints(folder: Path) -> list[Path]:
    """All that are there, oldest first."""
    return sorted(folder.glob("step-*.pt"))


def load(path: Path, config: str) -> dict[str, Any]:
    """The state in a checkpoint of the run with this `<configuration>-<corpus>`; UserError if there is none in it."""
    damage = damage_of(path)
    if damage:
        older = [other.name for other in checkpoints(path.parent) if other < path]
        way = f"remove it to go on from {older[-1]}" if older else "there is no older one, so start the run anew"
        raise UserError(f"the checkpoint {path} is damaged ({damage}); {way}")
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        if saved["format"] == FORMAT and saved["config"] == config:
            return dict(saved["state"])
        same_run = saved["config"].rpartition("-")[0] == config.rpartition("-")[0]
    except Exception as error:  # whatever a file that is no checkpoint of ours makes torch say
        raise UserError(f"{path} is not a checkpoint of quacklr: {str(error).splitlines()[0]}") from error
    if same_run:
        raise UserError(f"the checkpoint {path} was trained on other text: the corpus has changed since")
    raise UserError(f"the checkpoint {path} is of another run: its configuration is not that of this folder")


def damage_of(path: Path) -> str | None:
    """What is wrong with the file, if anything is."""
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
    except Exception as error:  # a damaged zip makes zipfile say all kinds of things
        return str(error)
    return f"the checksum of {broken} is wrong" if broken else None
