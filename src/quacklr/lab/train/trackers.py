"""Experiment trackers: TensorBoard if it is installed, Weights & Biases if requested. Both log the same scalars."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any

from quacklr.lab.config import Config, to_json
from quacklr.lab.errors import UserError
from quacklr.lab.train.rows import Row


def trackers(folder: Path, config: Config, first_step: int, project: str | None) -> list[Tracker]:
    """The trackers that are installed and requested."""
    found: list[Tracker] = []
    if find_spec("tensorboard"):
        found.append(TensorBoard(folder / "tensorboard", first_step))
    if project is not None:
        found.append(WandB(folder, config, project))
    return found


def scalars(row: Row) -> Iterator[tuple[str, float]]:
    """The scalars of a row, named `train/...` and `validation/...`; logits over the heads of a layer."""
    for key, value in row.items():
        if isinstance(value, float) and key not in ("val_loss", "val_bpb"):
            yield f"train/{key}", value
    for key in ("val_loss", "val_bpb"):
        if row.get(key) is not None:
            yield f"validation/{key.removeprefix('val_')}", row[key]
    for statistic, layers in row.get("logits", {}).items():
        for layer, heads in enumerate(layers):
            if finite := [value for value in heads if value is not None]:
                yield f"logits_{statistic}/layers.{layer}", max(finite) if statistic == "max" else fmean(finite)


class TensorBoard:
    """Event files in the folder of the run. A resumed run purges the events after its checkpoint."""

    def __init__(self, folder: Path, first_step: int) -> None:
        self.folder, self.first_step = folder, first_step
        self._writer: Any = None

    def write(self, row: Row) -> None:
        """Log the scalars of a row."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            purge = self.first_step + 1 if self.first_step else None
            self._writer = SummaryWriter(str(self.folder), purge_step=purge, flush_secs=10)
        for name, value in scalars(row):
            self._writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        """Flush and close the event file."""
        if self._writer is not None:
            self._writer.close()


class WandB:
    """A run in a project of Weights & Biases; WANDB_MODE=offline writes to disk only."""

    def __init__(self, folder: Path, config: Config, project: str) -> None:
        if not find_spec("wandb"):
            raise UserError("--wandb needs the package wandb: pip install 'quacklr[track]'")
        import wandb

        identity = folder.resolve().name
        try:
            self._run = wandb.init(
                project=project, id=identity, name=identity, dir=str(folder), resume="allow", config=to_json(config)
            )
        except wandb.Error as error:
            raise UserError(
                f"--wandb {project}: {str(error).splitlines()[0]}; WANDB_MODE=offline needs no key"
            ) from error

    def write(self, row: Row) -> None:
        """Log the scalars of a row."""
        self._run.log(dict(scalars(row)), step=row["step"])

    def close(self) -> None:
        """Finish the upload."""
        self._run.finish()


Tracker = TensorBoard | WandB
