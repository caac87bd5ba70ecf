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
from pathlib import Path
from typing import Any

from quacklr.lab.config import Config, from_json, to_json
from quacklr.lab.errors import UserError
from quacklr.lab.files import read_json, whole, write_json
from quacklr.lab.train.session import Row


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
        if result is not None and not (
            isinstance(result, dict) and isinstance(result.get("step"), int) and "status" in result
        ):
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
        rows = []
        lines = self._text().splitlines()
        for place, line in enumerate(lines, start=1):
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                if place < len(lines):
                    raise UserError(f"{self.metrics}, line {place}, is damaged: {error}") from error
        return rows

    def _text(self) -> str:
        return self.metrics.read_text(encoding="utf-8", errors="replace") if self.metrics.exists() else ""

    def forget_after(self, step: int) -> None:
        """Drop the rows after a step: a resumed run makes them again."""
        rows = self.rows()
        kept = [row for row in rows if row["step"] <= step]
        if len(kept) == len(rows) and self._text().endswith("\n"):
            return
        with whole(self.metrics) as file:
            file.write("".join(line(row) for row in kept).encode())

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
        """Write down how it ended."""
        write_json(self.path / "result.json", result)


def line(row: Row) -> str:
    """A row as a line of JSON, which has no NaN: a number that is none becomes null."""
    plain = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()
    }
    return json.dumps(plain, allow_nan=False) + "\n"
