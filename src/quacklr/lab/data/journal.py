"""What makes a killed prepare go on: a file that says, after each set of shards, how far the source has been read.

It is also the claim on a folder. Other options may take over a folder as long as it has no shard.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from quacklr.lab.data.manifest import FORMAT, SPLITS, Split, Vocabulary, check_format, made, read_splits
from quacklr.lab.data.sources import TextPosition
from quacklr.lab.errors import UserError
from quacklr.lab.files import read_json, write_json

JOURNAL = "journal.json"


@dataclass(frozen=True, slots=True)
class Journal:
    """The state of an unfinished folder: all that `splits` names is whole, and holds the source up to `place`."""

    request: dict[str, Any]
    tokenizer: Vocabulary | None = None
    place: TextPosition = field(default_factory=TextPosition)
    splits: dict[str, Split] = field(default_factory=lambda: {name: Split() for name in SPLITS})

    def write(self, folder: Path) -> None:
        """Make this the place to go on from."""
        write_json(folder / JOURNAL, {"format": FORMAT, **asdict(self)})


def read_journal(folder: Path) -> Journal | None:
    """The journal of a folder, if it has one."""
    if not (folder / JOURNAL).exists():
        return None
    read = read_json(folder / JOURNAL)
    try:
        check_format(read, folder)
        tokenizer = read["tokenizer"] and made(Vocabulary, read["tokenizer"])
        return Journal(dict(read["request"]), tokenizer, made(TextPosition, read["place"]), read_splits(read["splits"]))
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{folder / JOURNAL} is damaged: remove the folder and begin again") from error


def begin(folder: Path, request: dict[str, Any]) -> Journal:
    """The journal to go on from, or a new one in a folder that has nothing to lose."""
    journal = read_journal(folder)
    if journal is not None and journal.request == request:
        return journal
    if journal is not None and any(split.shards for split in journal.splits.values()):
        refuse_other(folder, request, journal.request)
    if journal is None and any(not path.name.startswith(".") for path in folder.iterdir()):
        raise UserError(f"{folder} holds other files; choose another --out")
    new = Journal(request)
    new.write(folder)
    return new


def refuse_other(folder: Path, asked: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """UserError unless a folder was begun with the same options and the same source."""
    for option, value in found.items():
        if asked.get(option) != value:
            options = option.replace("_", " ")
            raise UserError(
                f"{folder} was begun with another {options} ({_short(value)}, now {_short(asked.get(option))}); "
                "choose another --out or remove it"
            )


def _short(value: object) -> str:
    text = ", ".join(f"{key} {each}" for key, each in value.items()) if isinstance(value, dict) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
