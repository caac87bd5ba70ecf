"""A run's folder: what was asked for, on what machine, every row that came out, how it ended, and its checkpoints.

    config.json  environment.json  metrics.jsonl  result.json  checkpoints/  tensorboard/  logits.png
    vocabulary.json  tokenizer.json

`metrics.jsonl` is the truth about the run, a row a line; everything else that shows numbers is made from it.
`result.json` is there once the run has ended; the tokenizer, so that nobody needs the corpus to read what the model
writes (bytes need no file). Each of the `checkpoints/` is a folder itself, see checkpoint.py.
"""

from __future__ import annotations

import json
import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypedDict

from quacklr.lab.config import Config, from_json, to_json
from quacklr.lab.errors import UserError
from quacklr.lab.files import atomic_write, parse_json, read_json, write_json
from quacklr.lab.train.session import Row
from quacklr.lab.train.statistics import Table
from quacklr.lab.typed import fits
from quacklr.util.atomic_files import flush_folder

RESTORE = "restore the file from a copy, or train anew in another --out"


class _Step(TypedDict):
    step: int


class Measured(_Step, total=False):
    """A row, as far as it is read again."""

    loss: float | None
    val_loss: float | None
    val_bpb: float | None
    tokens: int
    tokens_per_second: float | None
    logits: dict[str, Table]
    norm: dict[str, Table]
    rate: dict[str, Table]
    diverged: str


class Finished(_Step):
    """The result of a run that has reached its end."""

    status: Literal["finished"]
    val_loss: float
    val_bpb: float


class Diverged(_Step):
    """The result of a run that was lost."""

    status: Literal["diverged"]
    reason: str


class Folder:
    """The files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"

    @property
    def taken(self) -> bool:
        """Whether a run was begun here."""
        return (self.path / "config.json").exists()

    @property
    def result(self) -> Row | None:
        """How the run ended, if it has."""
        path = self.path / "result.json"
        result = read_json(path) if path.exists() else None
        if result is not None and not fits(result, Finished | Diverged):
            raise UserError(f"{path} is damaged: it is not what quacklr writes; remove it")
        return result

    def refuse_unless_new(self, resume: bool) -> None:
        """UserError if a run was begun here, unless it is to be resumed."""
        if self.taken and not resume:
            raise UserError(
                f"{self.path} already holds a run; go on with it by `quacklr train --resume {self.path}`, or choose "
                "another --out"
            )

    def config(self) -> Config:
        """What the run was asked to do."""
        if not self.taken:
            what = "is not the folder of a run: it has no config.json" if self.path.exists() else "does not exist"
            raise UserError(f"{self.path} {what}")
        return from_json(read_json(self.path / "config.json"))

    @property
    def environment(self) -> dict[str, Any]:
        """On what machine it ran last; empty if no run was begun here."""
        found = read_json(self.path / "environment.json") if self.taken else {}
        if not isinstance(found, dict):
            raise UserError(f"{self.path / 'environment.json'} is damaged: it is not what quacklr writes")
        return found

    def begin(self, config: Config, environment: dict[str, Any]) -> None:
        """Write down what is asked for, and on what machine."""
        write_json(self.path / "environment.json", environment)
        write_json(self.path / "config.json", to_json(config))

    def rows(self) -> list[Row]:
        """All rows so far. A last line that a killed process left unfinished is not one."""
        lines = self._lines()
        rows = [self._row(lines, place) for place in range(len(lines) - 1)]
        with suppress(ValueError):
            parse_json(lines[-1] if lines else "")
            rows.append(self._row(lines, len(lines) - 1))
        return rows

    def _lines(self) -> list[str]:
        text = self.metrics.read_text(encoding="utf-8", errors="replace") if self.metrics.exists() else ""
        return text.removesuffix("\n").split("\n") if text else []

    def _row(self, lines: list[str], place: int) -> Row:
        """The row of a line; UserError if it is none."""
        try:
            row = parse_json(lines[place])
        except ValueError as error:
            raise UserError(f"{self.metrics}, line {place + 1}, is damaged: {error}; {RESTORE}") from error
        if not fits(row, Measured):
            raise UserError(f"{self.metrics}, line {place + 1}, is damaged: it is no row of a run; {RESTORE}")
        return dict(row)

    def refuse_gaps(self, step: int, ended: bool = False) -> None:
        """UserError unless the rows begin with those of steps 0 to `step`: each of them, once, in this order.

        Of a run that has ended there must be no others. One that was killed may have some, or a part of one.
        """
        lines = self._lines()
        if ended and len(lines) > step + 1:
            raise UserError(f"{self.metrics} has rows after step {step}, where the run has ended; {RESTORE}")
        for place in range(step + 1):
            if place == len(lines):
                found = (
                    f"ends before step {place}" if lines else "has no rows" if self.metrics.exists() else "is missing"
                )
                raise UserError(f"{self.metrics} {found}, but the run has reached step {step}; {RESTORE}")
            if (other := self._row(lines, place)["step"]) != place:
                raise UserError(
                    f"{self.metrics}, line {place + 1}, is the row of step {other}, not that of step {place}: "
                    f"rows are missing, repeated or in another order; {RESTORE}"
                )

    def forget_after(self, step: int) -> None:
        """Drop all that follows the row of a step: a resumed run makes it again. `refuse_gaps` has been called."""
        kept = "".join(f"{line}\n" for line in self._lines()[: step + 1]).encode()
        if self.metrics.exists() and self.metrics.read_bytes() != kept:
            with atomic_write(self.metrics) as file:
                file.write(kept)

    def flush(self) -> None:
        """Return when all rows are on the disk, where a power cut does not reach them, and not only with the system."""
        try:
            with self.metrics.open("rb") as file:
                os.fsync(file.fileno())
            flush_folder(self.path)
        except OSError as error:
            raise UserError(f"cannot write {self.metrics}: {error.strerror or error}") from error

    def reopen(self) -> None:
        """Forget the ending of a run that goes on."""
        (self.path / "result.json").unlink(missing_ok=True)

    def append(self, row: Row) -> None:
        """Add a row; it is with the system before this returns, so that a killed process loses none."""
        try:
            with self.metrics.open("a", encoding="utf-8") as file:
                file.write(line(row))
        except OSError as error:
            raise UserError(f"cannot write {self.metrics}: {error.strerror or error}") from error

    def end(self, result: Row) -> None:
        """Write down how it ended, after all its rows."""
        self.flush()
        write_json(self.path / "result.json", result)


def line(row: Row) -> str:
    """A row as a line of JSON, which has no NaN: a number that is none becomes null."""
    plain = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()
    }
    return json.dumps(plain, allow_nan=False) + "\n"
