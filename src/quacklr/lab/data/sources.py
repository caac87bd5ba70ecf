"""Where text comes from: files in a fixed order, read as a stream of documents that can begin at any place."""

from __future__ import annotations

import hashlib
import json
import platform
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from quacklr.lab.data.extra import fetch
from quacklr.lab.data.readers import READERS, Reader, parquet, source_code
from quacklr.lab.errors import UserError

Fractions = Mapping[str, float]
USUAL: Fractions = {"val": 0.02, "probe": 0.005}


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file and how to read it."""

    path: Path
    size: int
    reader: Reader
    column: str = "text"


@dataclass(frozen=True, slots=True)
class TextPosition:
    """How far a stream has been read: so many documents of file number `file`, and so many bytes in all."""

    file: int = 0
    document: int = 0
    read: float = 0.0


@dataclass(frozen=True, slots=True)
class Stdlib:
    """The running Python's standard library, a document a file: real text that is on every machine."""

    held_out: ClassVar[Fractions] = {"val": 0.04, "probe": 0.02}  # few documents: smaller shares may miss them all

    def describe(self) -> dict[str, Any]:
        """What a manifest says of it."""
        return {"kind": "stdlib", "python": platform.python_version()}

    def files(self) -> list[SourceFile]:
        """All its .py files; some systems install it without its tests, which are two thirds of it."""
        root = Path(sysconfig.get_path("stdlib"))
        inside = sorted(path.relative_to(root) for path in root.rglob("*.py"))
        paths = [root / path for path in inside if not {"site-packages", "dist-packages"} & set(path.parts)]
        if not paths:
            raise UserError(f"this Python has no source files in {root}; prepare other text")
        return [SourceFile(path, path.stat().st_size, source_code) for path in paths]


@dataclass(frozen=True, slots=True)
class Local:
    """Files, and all files in folders, of the kinds that have a reader."""

    paths: tuple[Path, ...]
    column: str = "text"
    held_out: ClassVar[Fractions] = USUAL

    def describe(self) -> dict[str, Any]:
        """What a manifest says of it: a hash of all names and sizes, so that a changed folder is noticed."""
        listed = [(name, file.size) for name, file in self._named()]
        return {
            "kind": "files",
            "names": [path.resolve().name for path in self.paths],
            "column": self.column,
            "files": len(listed),
            "bytes": sum(size for _, size in listed),
            "listing": hashlib.sha256(json.dumps(listed).encode()).hexdigest(),
        }

    def files(self) -> list[SourceFile]:
        """In the order given, and sorted by name within a folder."""
        return [file for _, file in self._named()]

    def _named(self) -> list[tuple[str, SourceFile]]:
        found = []
        for path in self.paths:
            below = list(self._below(path))
            if not below:
                raise UserError(f"no file to read in {path}; accepted are {', '.join(READERS)}")
            found += below
        return found

    def _below(self, path: Path) -> Iterator[tuple[str, SourceFile]]:
        """The files of one argument, each with its name relative to it."""
        if not path.exists():
            raise UserError(f"{path} does not exist; give files or folders, stdlib, or cosmopedia-v2")
        for below in sorted(path.rglob("*")) if path.is_dir() else [path]:
            reader = READERS.get(below.suffix.lower())
            if reader is not None and below.is_file():
                yield below.relative_to(path).as_posix(), SourceFile(below, below.stat().st_size, reader, self.column)


@dataclass(frozen=True, slots=True)
class Cosmopedia:
    """Cosmopedia-V2, the paper's text, by file: 104 parquet files of about 1.2 GB and 270M tokens each."""

    numbers: tuple[int, ...]
    held_out: ClassVar[Fractions] = USUAL
    COUNT: ClassVar[int] = 104

    def describe(self) -> dict[str, Any]:
        """What a manifest says of it."""
        return {"kind": "cosmopedia-v2", "files": list(self.numbers)}

    def files(self) -> list[SourceFile]:
        """Fetches them all first, into the hub's cache."""
        by_hand = "fetch it elsewhere and prepare it as a local file"
        names = [f"cosmopedia-v2/train-{number:05d}-of-{self.COUNT:05d}.parquet" for number in self.numbers]
        paths = [fetch("HuggingFaceTB/smollm-corpus", name, "dataset", by_hand) for name in names]
        return [SourceFile(path, path.stat().st_size, parquet) for path in paths]


TextSource = Stdlib | Local | Cosmopedia


def documents(files: Sequence[SourceFile], start: TextPosition) -> Iterator[tuple[bytes, TextPosition]]:
    """Every document from a place on, as UTF-8, and the place after it. Some are empty.

    NULs are dropped, since byte 0 ends a document, and half a surrogate pair (JSON can spell one) becomes a "?".
    """
    read = start.read
    for number, file in enumerate(files[start.file :], start.file):
        skip = start.document if number == start.file else 0
        for index, (text, size) in enumerate(file.reader(file.path, file.column, skip), skip + 1):
            read += size
            yield text.replace("\0", "").encode("utf-8", "replace"), TextPosition(number, index, read)


def split_of(document: bytes, held_out: Fractions) -> str:
    """The split of a document: a function of its text alone, so that copies of it fall on the same side."""
    point = int.from_bytes(hashlib.blake2b(document, digest_size=8).digest()) / 2**64
    if point < held_out["val"]:
        return "val"
    return "probe" if point < held_out["val"] + held_out["probe"] else "train"
