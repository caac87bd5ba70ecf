"""The ledger of a study: one line of JSON for each run that has ended, with the data of all figures and claims.

Lines are only appended. The key of a run is the fingerprint of its configuration, computed when the line is read, so a
ledger stays valid when configurations get new fields. Of two lines with the same key, the later one is used.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import IO, Any, Literal, TypedDict

from quacklr.lab.config import Config, fingerprint, from_json, to_json
from quacklr.lab.errors import UserError, os_errors
from quacklr.lab.files import flush_folder, make_folder, parse_json
from quacklr.lab.train.folder import Folder
from quacklr.lab.train.rows import MeasuredRow, Row, Table
from quacklr.lab.typed import fits

DIGITS = 3
"""Significant digits of logits, of their changes and of training losses; few, to keep the file small."""
LOSS_DIGITS = 4
"""Significant digits of validation losses during training, and of times. The final losses have all digits."""
MEASURED = ("step", "val_loss", "logits", "change_steps", "norm", "rate")
"""The keys of a row of metrics.jsonl that an entry keeps, if the row has measurements."""
NEEDED = {"step": None, "val_loss": None, "logits": ("max", "step_change"), "change_steps": None}
"""The keys that claims and figures use. For `logits`, the statistics that they use."""


@dataclass(frozen=True)
class Entry:
    """One run that has ended."""

    config: Config
    status: str
    """finished, diverged or crashed."""
    reason: str | None = None
    """Why it did not finish."""
    result: Row = field(default_factory=dict)
    """The content of its result.json."""
    history: list[Row] = field(default_factory=list)
    """The rows with measurements: the validation loss with LOSS_DIGITS, all others with DIGITS."""
    losses: list[float | None] = field(default_factory=list)
    """The training loss of every step, with DIGITS."""
    step_seconds: float | None = None
    """Median time of a step; depends on the load of the machine."""
    environment: Row = field(default_factory=dict)
    """Versions, hardware, and the fingerprint of the corpus."""

    @cached_property
    def key(self) -> str:
        """The fingerprint of its configuration."""
        return fingerprint(self.config)

    def curve(self, *names: str) -> Iterator[tuple[int, Any]]:
        """(step, value) of every measurement, such as curve("val_loss") or curve("logits", "max")."""
        for row in self.history:
            value: Any = row
            for name in names:
                value = value.get(name) if value is not None else None
            if value is not None:
                yield row["step"], value

    def tables(self) -> Iterator[Table]:
        """Every logit table (layers x heads) in the history."""
        return (table for row in self.history for table in row.get("logits", {}).values())

    def without_details(self) -> Entry:
        """The entry with only the measurements that claims and figures use. Its line is less than half as long."""
        history = [
            {
                name: row[name] if parts is None else {part: row[name][part] for part in parts if part in row[name]}
                for name, parts in NEEDED.items()
                if name in row
            }
            for row in self.history
        ]
        return replace(self, history=history)

    def to_json(self) -> Row:
        """A line of the ledger."""
        return {"key": self.key} | vars(self) | {"config": to_json(self.config)}


class Result(TypedDict, total=False):
    """The keys of a result that are read from a ledger."""

    step: int
    tokens: int
    val_loss: float | None
    val_bpb: float | None
    best_val_loss: float | None
    max_logit: float | None


class FinishedResult(TypedDict):
    """The keys that the result of a finished run must have."""

    val_loss: float
    max_logit: float | None


class Line(TypedDict):
    """A line of a ledger."""

    config: dict[str, Any]
    status: Literal["finished", "diverged", "crashed"]
    reason: str | None
    result: Result
    history: list[MeasuredRow]
    losses: list[float | None]
    step_seconds: float | None
    environment: dict[str, Any]


def entry_from_json(saved: Any) -> Entry:
    """Inverse of `Entry.to_json`; ValueError or UserError if the JSON is not an entry."""
    if not fits(saved, Line):
        raise ValueError("something is missing, or of another type")
    others = {name: value for name, value in saved.items() if name not in ("key", "config")}
    entry = Entry(config=from_json(saved["config"]), **others)
    size = (entry.config.shape.layers, entry.config.attention.heads)
    if any((len(table), *{len(row) for row in table}) != size for table in entry.tables()):
        raise ValueError("its logits are not those of {} layers with {} heads".format(*size))
    if entry.status == "finished" and not fits(entry.result, FinishedResult):
        raise ValueError("it has finished, but its result has no validation loss")
    return entry


def entry_of(config: Config, path: Path) -> Entry:
    """The entry of a run that has ended, from its folder."""
    folder = Folder(path)
    rows, result = folder.rows(), folder.result
    if result is None:
        raise UserError(f"{path} has no result.json: the run in it has not ended")
    return Entry(config, result["status"], result.get("reason"), result, **measurements(config, folder, rows))


def crashed(config: Config, path: Path, reason: str) -> Entry:
    """The entry of a run that crashed, with the measurements before the crash."""
    folder = Folder(path)
    try:
        found = measurements(config, folder, folder.rows())
    except UserError:  # the folder may be damaged
        found = {}
    return Entry(config, "crashed", reason, **found)


def measurements(config: Config, folder: Folder, rows: list[Row]) -> dict[str, Any]:
    """The fields of an entry that are computed from the rows of the run."""
    speeds = [row["tokens_per_second"] for row in rows if row.get("tokens_per_second")]
    return {
        "history": [
            {
                name: rounded(row[name], LOSS_DIGITS if name == "val_loss" else DIGITS)
                for name in MEASURED
                if name in row
            }
            for row in rows
            if "val_loss" in row or "logits" in row
        ],
        "losses": [rounded(row["loss"], DIGITS) for row in rows if "loss" in row],
        "step_seconds": rounded(config.training.batch_tokens / median(speeds), LOSS_DIGITS) if speeds else None,
        "environment": folder.environment,
    }


def rounded(value: Any, digits: int) -> Any:
    """Round every float in nested lists and dicts to significant digits; None if it is not finite."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: rounded(part, digits) for name, part in value.items()}
    return [rounded(part, digits) for part in value] if isinstance(value, list) else value


class Ledger:
    """The file `ledger.jsonl`.

    With `details` it keeps all measurements of a run, also entropies and the norms and rates of blocks.
    """

    def __init__(self, path: Path, details: bool = False) -> None:
        self.path, self.details = path, details

    def entries(self) -> dict[str, Entry]:
        """All runs by fingerprint, in the order of their first lines."""
        found: dict[str, Entry] = {}
        for number, line in enumerate(self._lines(), start=1):
            try:
                entry = entry_from_json(parse_json(line))
            except (ValueError, TypeError, UserError) as error:
                raise UserError(
                    f"{self.path}, line {number}, is not what quacklr writes: {error}; restore the file from a copy, "
                    "or remove the line to have its run done again"
                ) from error
            found[entry.key] = entry
        return found

    def _lines(self) -> list[str]:
        """All complete lines; a killed process may have left an incomplete one at the end."""
        try:
            text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        except (OSError, ValueError) as error:
            raise UserError(f"cannot read {self.path}: {error}") from error
        *lines, last = text.split("\n")
        return [*lines, last] if is_json(last) else lines

    def validate_writable(self) -> None:
        """Create the file if it is missing; UserError if it cannot be written."""
        with self._opened():
            pass

    def append(self, entry: Entry) -> None:
        """Append a line and flush it to disk; an incomplete last line is removed first."""
        entry = entry if self.details else entry.without_details()
        text = json.dumps(entry.to_json(), allow_nan=False, separators=(",", ":")) + "\n"
        with self._opened() as file:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            before, newline, last = file.read().rpartition(b"\n")
            if is_json(last):  # a complete line without a newline, as some editors leave it
                text = f"\n{text}"
            else:
                file.truncate(len(before + newline))
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())

    @contextmanager
    def _opened(self) -> Iterator[IO[bytes]]:
        with os_errors(f"cannot write {self.path}"):
            make_folder(self.path.parent)
            new = not self.path.exists()
            with self.path.open("ab+") as file:
                if new:
                    flush_folder(self.path.parent)
                yield file


def is_json(text: str | bytes) -> bool:
    """Whether a line is complete: a part of a JSON object is not JSON."""
    with suppress(ValueError):
        parse_json(text)
        return True
    return False
