"""The journal of an unfinished folder: after each set of shards it records how far the source has been read.

A killed `quacklr prepare` continues from it. A folder without shards may be reused with other options.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from quacklr.lab.data.manifest import FORMAT, SPLITS, Split, Vocabulary, check_format, from_dict, read_splits
from quacklr.lab.data.sources import TextPosition
from quacklr.lab.errors import UserError
from quacklr.lab.files import read_json, write_json

JOURNAL = "journal.json"


@dataclass(frozen=True, slots=True)
class Journal:
    """`splits` are complete on disk and hold the documents of the source up to `place`."""

    request: dict[str, Any]
    tokenizer: Vocabulary | None = None
    place: TextPosition = field(default_factory=TextPosition)
    splits: dict[str, Split] = field(default_factory=lambda: {name: Split() for name in SPLITS})

    def write(self, folder: Path) -> None:
        """Write `journal.json`."""
        write_json(folder / JOURNAL, {"format": FORMAT, **asdict(self)})


def read_journal(folder: Path) -> Journal | None:
    """The journal of a folder, or None if it has none."""
    if not (folder / JOURNAL).exists():
        return None
    read = read_json(folder / JOURNAL)
    try:
        check_format(read, folder)
        tokenizer = read["tokenizer"] and from_dict(Vocabulary, read["tokenizer"])
        place, splits = from_dict(TextPosition, read["place"]), read_splits(read["splits"])
        return Journal(dict(read["request"]), tokenizer, place, splits)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{folder / JOURNAL} is damaged: remove the folder and begin again") from error


def open_journal(folder: Path, request: dict[str, Any]) -> Journal:
    """The journal of an earlier start with the same request, or a new one if nothing in the folder would be lost."""
    journal = read_journal(folder)
    if journal is not None and journal.request == request:
        return journal
    if journal is not None and any(split.shards for split in journal.splits.values()):
        validate_same_request(folder, request, journal.request)
    if journal is None and any(not path.name.startswith(".") for path in folder.iterdir()):
        raise UserError(f"{folder} holds other files; choose another --out")
    new = Journal(request)
    new.write(folder)
    return new


def validate_same_request(folder: Path, request: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Raise UserError unless the folder was begun with the same options and the same source."""
    for option, value in found.items():
        if request.get(option) != value:
            before, now = _abbreviate(value), _abbreviate(request.get(option))
            raise UserError(
                f"{folder} was begun with another {option.replace('_', ' ')} ({before}, now {now}); "
                "choose another --out or remove it"
            )


def _abbreviate(value: object) -> str:
    text = ", ".join(f"{key} {each}" for key, each in value.items()) if isinstance(value, dict) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
