"""The manifest of a prepared folder: the request, the tokenizer, and the size and SHA-256 of every shard.

It has no absolute path and no date: equal text and equal options give an equal file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from quacklr.lab.errors import UserError
from quacklr.lab.files import read_json, write_json
from quacklr.lab.typed import mismatched_keys

T = TypeVar("T")
FORMAT = 1
SPLITS = ("train", "val", "probe")
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
PREPARE_AGAIN = "remove the folder and prepare it again"


@dataclass(frozen=True, slots=True)
class Shard:
    """A file of token ids: raw little-endian uint16."""

    name: str
    tokens: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Split:
    """The documents of train, val or probe. `bytes` counts their UTF-8 text and one byte for the end of each."""

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    shards: tuple[Shard, ...] = ()


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokenizer: `vocab` ids, of which `end` ends a document. The byte tokenizer has no file and no hash."""

    name: str
    vocab: int
    end: int
    end_token: str
    sha256: str | None


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of `manifest.json`. It is written last: a folder without it is not finished."""

    request: dict[str, Any]
    tokenizer: Vocabulary
    splits: dict[str, Split]

    def write(self, folder: Path) -> None:
        """Write `manifest.json`, which finishes the folder."""
        write_json(folder / MANIFEST, {"format": FORMAT, **asdict(self)})


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a finished folder; UserError if it is damaged or of another format."""
    read = read_json(folder / MANIFEST)
    try:
        check_format(read, folder)
        splits = read_splits(read["splits"])
        if not all(split.tokens for split in splits.values()):
            raise ValueError("a split has no tokens")
        return Manifest(dict(read["request"]), from_dict(Vocabulary, read["tokenizer"]), splits)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{folder / MANIFEST} is damaged; {PREPARE_AGAIN}") from error


def check_format(read: Mapping[str, Any], folder: Path) -> None:
    """Raise UserError if a folder has a format that this version does not read."""
    if read["format"] != FORMAT:
        raise UserError(f"{folder} has format {read['format']}, and this quacklr reads {FORMAT}: prepare it again")


def from_dict(kind: type[T], read: Any) -> T:
    """A dataclass from its JSON; TypeError if a field is missing, unknown, or of the wrong type."""
    if not isinstance(read, dict) or mismatched_keys(read, kind):
        raise TypeError(f"it is no {kind.__name__}")
    return kind(**read)


def read_splits(read: Mapping[str, Any]) -> dict[str, Split]:
    """All splits from their JSON."""
    return {name: _split(name, dict(read[name])) for name in SPLITS}


def _split(name: str, read: dict[str, Any]) -> Split:
    """A split from its JSON; ValueError if its shards have wrong names, or their tokens do not sum to its tokens."""
    shards = tuple(from_dict(Shard, each) for each in read.pop("shards"))
    if [shard.name for shard in shards] != [shard_name(name, index) for index in range(len(shards))]:
        raise ValueError("shards of other names")
    split = replace(from_dict(Split, read), shards=shards)
    if split.tokens != sum(shard.tokens for shard in shards) or any(shard.tokens < 1 for shard in shards):
        raise ValueError("shards of another size")
    return split


def shard_name(split: str, index: int) -> str:
    """File name of a shard; the index counts from 0 within its split."""
    return f"{split}-{index:05d}.bin"


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_hash(path: Path, sha256: str, way_out: str = PREPARE_AGAIN) -> Path:
    """Return the path if the file has this SHA-256; otherwise raise UserError."""
    if not path.exists():
        raise UserError(f"{path} is missing; {way_out}")
    if sha256_of(path) != sha256:
        raise UserError(f"{path} is not what was written: its hash is another; {way_out}")
    return path
