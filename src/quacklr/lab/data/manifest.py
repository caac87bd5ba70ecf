"""What a prepared folder says of itself: what was asked for, its tokenizer, and the size and hash of every shard.

No absolute path and no date: the same text and the same options give the same manifest, byte for byte.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from quacklr.lab.errors import UserError
from quacklr.lab.files import read_json, write_json
from quacklr.lab.typed import misfits

T = TypeVar("T")
FORMAT = 1
SPLITS = ("train", "val", "probe")
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
AGAIN = "remove the folder and prepare it again"


@dataclass(frozen=True, slots=True)
class Shard:
    """A file of tokens: raw little-endian uint16, nothing else."""

    name: str
    tokens: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Split:
    """Documents that are used for one thing. `bytes` are those of their UTF-8 text, and one for the end of each."""

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    shards: tuple[Shard, ...] = ()


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokenizer: `vocab` ids, of which `end` ends a document. Bytes need no file, so they have no hash."""

    name: str
    vocab: int
    end: int
    end_token: str
    sha256: str | None


@dataclass(frozen=True, slots=True)
class Manifest:
    """The whole of `manifest.json`, which is written last: a folder without it is not finished."""

    request: dict[str, Any]
    tokenizer: Vocabulary
    splits: dict[str, Split]

    def write(self, folder: Path) -> None:
        """Finish a folder."""
        write_json(folder / MANIFEST, {"format": FORMAT, **asdict(self)})


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a finished folder; UserError when it is damaged or of another format."""
    read = read_json(folder / MANIFEST)
    try:
        check_format(read, folder)
        splits = read_splits(read["splits"])
        if not all(split.tokens for split in splits.values()):
            raise ValueError("a split has no tokens")
        return Manifest(dict(read["request"]), made(Vocabulary, read["tokenizer"]), splits)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{folder / MANIFEST} is damaged; {AGAIN}") from error


def check_format(read: Mapping[str, Any], folder: Path) -> None:
    """UserError when a folder was written by another version, in a way that this one does not know."""
    if read["format"] != FORMAT:
        raise UserError(f"{folder} has format {read['format']}, and this quacklr reads {FORMAT}: prepare it again")


def made(kind: type[T], read: Any) -> T:
    """A dataclass from its JSON; TypeError if a field is missing, unknown, or of another type."""
    if not isinstance(read, dict) or misfits(read, kind):
        raise TypeError(f"it is no {kind.__name__}")
    return kind(**read)


def read_splits(read: Mapping[str, Any]) -> dict[str, Split]:
    """Splits, from their JSON."""
    return {name: _split(name, dict(read[name])) for name in SPLITS}


def _split(name: str, read: dict[str, Any]) -> Split:
    """A split; ValueError if its shards are not named as `shards.py` names them, or are not all of it."""
    shards = tuple(made(Shard, each) for each in read.pop("shards"))
    if [shard.name for shard in shards] != [shard_name(name, place) for place in range(len(shards))]:
        raise ValueError("shards of other names")
    split = replace(made(Split, read), shards=shards)
    if split.tokens != sum(shard.tokens for shard in shards) or any(shard.tokens < 1 for shard in shards):
        raise ValueError("shards of another size")
    return split


def shard_name(split: str, place: int) -> str:
    """The file of a split's shard, counted from 0."""
    return f"{split}-{place:05d}.bin"


def hash_of(path: Path) -> str:
    """The SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_hash(path: Path, sha256: str, way_out: str = AGAIN) -> Path:
    """The same path; UserError when there is no such file, or when it is not the one that was written."""
    if not path.exists():
        raise UserError(f"{path} is missing; {way_out}")
    if hash_of(path) != sha256:
        raise UserError(f"{path} is not what was written: its hash is another; {way_out}")
    return path
