"""The folder of a run: configuration, environment, metrics of every step, result, and checkpoints.

    config.json  environment.json  metrics.jsonl  result.json  checkpoints/  tensorboard/  logits.png
    vocabulary.json  tokenizer.json

`metrics.jsonl` has one row per step and is the source of all figures and summaries. `result.json` exists when the run
has ended. `vocabulary.json` and `tokenizer.json` are a copy of the tokenizer, so that inference does not need the
corpus; the byte tokenizer has no `tokenizer.json`. checkpoint.py describes `checkpoints/`.
"""

from __future__ import annotations

import json
import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from quacklr.lab.config import Config, from_json, to_json
from quacklr.lab.errors import UserError, os_errors
from quacklr.lab.files import atomic_write, flush_folder, parse_json, read_json, write_json
from quacklr.lab.train.rows import MeasuredRow, Row, Step
from quacklr.lab.typed import fits

RESTORE = "restore the file from a copy, or train anew in another --out"


class Finished(Step):
    """The result of a run that reached its last step."""

    status: Literal["finished"]
    val_loss: float
    val_bpb: float


class Diverged(Step):
    """The result of a run that diverged."""

    status: Literal["diverged"]
    reason: str


class Folder:
    """The files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"
        self._config, self._environment, self._result = (
            path / name for name in ("config.json", "environment.json", "result.json")
        )

    @property
    def has_run(self) -> bool:
        """Whether a run was started in this folder."""
        return self._config.exists()

    @property
    def result(self) -> Row | None:
        """The result of the run, or None if it has not ended."""
        result = read_json(self._result) if self._result.exists() else None
        if result is not None and not fits(result, Finished | Diverged):
            raise UserError(f"{self._result} is damaged: it is not what quacklr writes; remove it")
        return result

    def validate_new(self, resume: bool) -> None:
        """Raise UserError if a run was started in this folder, unless it is resumed."""
        if self.has_run and not resume:
            raise UserError(
                f"{self.path} already holds a run; go on with it by `quacklr train --resume {self.path}`, or choose "
                "another --out"
            )

    def config(self) -> Config:
        """The configuration of the run."""
        if not self.has_run:
            reason = "is not the folder of a run: it has no config.json" if self.path.exists() else "does not exist"
            raise UserError(f"{self.path} {reason}")
        return from_json(read_json(self._config))

    @property
    def environment(self) -> dict[str, Any]:
        """Versions and hardware of the last start; empty if there is no run."""
        found = read_json(self._environment) if self.has_run else {}
        if not isinstance(found, dict):
            raise UserError(f"{self._environment} is damaged: it is not what quacklr writes")
        return found

    def write_config(self, config: Config, environment: dict[str, Any]) -> None:
        """Write configuration and environment: from now on the folder has a run."""
        write_json(self._environment, environment)
        write_json(self._config, to_json(config))

    def rows(self) -> list[Row]:
        """All rows so far, without a last line that a killed process left incomplete."""
        lines = self._lines()
        rows = [self._row(lines, index) for index in range(len(lines) - 1)]
        with suppress(ValueError):
            parse_json(lines[-1] if lines else "")
            rows.append(self._row(lines, len(lines) - 1))
        return rows

    def _lines(self) -> list[str]:
        text = self.metrics.read_text(encoding="utf-8", errors="replace") if self.metrics.exists() else ""
        return text.removesuffix("\n").split("\n") if text else []

    def _row(self, lines: list[str], index: int) -> Row:
        """The row of a line; UserError if it is damaged."""
        try:
            row = parse_json(lines[index])
            if not fits(row, MeasuredRow):
                raise ValueError("it is no row of a run")
        except ValueError as error:
            raise UserError(f"{self.metrics}, line {index + 1}, is damaged: {error}; {RESTORE}") from error
        return dict(row)

    def validate_rows(self, step: int, ended: bool = False) -> None:
        """Raise UserError unless the file begins with the rows of steps 0 to `step`, each once and in order.

        If the run has `ended`, there must be no further rows. A killed run may have some, or a part of one.
        """
        lines = self._lines()
        if ended and len(lines) > step + 1:
            raise UserError(f"{self.metrics} has rows after step {step}, where the run has ended; {RESTORE}")
        for index in range(step + 1):
            if index == len(lines):
                missing = "has no rows" if self.metrics.exists() else "is missing"
                found = f"ends before step {index}" if lines else missing
                raise UserError(f"{self.metrics} {found}, but the run has reached step {step}; {RESTORE}")
            if (other := self._row(lines, index)["step"]) != index:
                raise UserError(
                    f"{self.metrics}, line {index + 1}, is the row of step {other}, not that of step {index}: "
                    f"rows are missing, repeated or in another order; {RESTORE}"
                )

    def truncate_after(self, step: int) -> None:
        """Remove the rows after a step, which a resumed run writes again. Call `validate_rows` first."""
        kept = "".join(f"{line}\n" for line in self._lines()[: step + 1]).encode()
        if self.metrics.exists() and self.metrics.read_bytes() != kept:
            with atomic_write(self.metrics) as file:
                file.write(kept)

    def flush(self) -> None:
        """Flush all rows to disk, so that they survive a power failure."""
        with os_errors(f"cannot write {self.metrics}"):
            with self.metrics.open("rb") as file:
                os.fsync(file.fileno())
            flush_folder(self.path)

    def remove_result(self) -> None:
        """Remove the result of a run that continues."""
        self._result.unlink(missing_ok=True)

    def append(self, row: Row) -> None:
        """Append a row and hand it to the operating system, so that a killed process loses no row."""
        with os_errors(f"cannot write {self.metrics}"), self.metrics.open("a", encoding="utf-8") as file:
            file.write(json_line(row))

    def write_result(self, result: Row) -> None:
        """Write the result, after flushing the rows."""
        self.flush()
        write_json(self._result, result)


def json_line(row: Row) -> str:
    """A row as a line of JSON; NaN and infinity become null."""
    plain = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()
    }
    return json.dumps(plain, allow_nan=False) + "\n"
