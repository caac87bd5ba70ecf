"""Sources of text: files in a fixed order, read as a stream of documents that can start at any position."""

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
HELD_OUT: Fractions = {"val": 0.02, "probe": 0.005}


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file and its reader."""

    path: Path
    size: int
    reader: Reader
    column: str = "text"


@dataclass(frozen=True, slots=True)
class TextPosition:
    """A position in a stream: `document` documents of file number `file` are read, and `read` bytes of all files."""

    file: int = 0
    document: int = 0
    read: float = 0.0


@dataclass(frozen=True, slots=True)
class Stdlib:
    """The source of the running Python's standard library, one document per file: text that every machine has."""

    held_out: ClassVar[Fractions] = {"val": 0.04, "probe": 0.02}  # few documents: a smaller fraction may select none

    def describe(self) -> dict[str, Any]:
        """The entry of this source in a manifest."""
        return {"kind": "stdlib", "python": platform.python_version()}

    def files(self) -> list[SourceFile]:
        """All .py files. Some systems install the library without its tests, which are two thirds of it."""
        root = Path(sysconfig.get_path("stdlib"))
        inside = sorted(path.relative_to(root) for path in root.rglob("*.py"))
        paths = [root / path for path in inside if not {"site-packages", "dist-packages"} & set(path.parts)]
        if not paths:
            raise UserError(f"this Python has no source files in {root}; prepare other text")
        return [SourceFile(path, path.stat().st_size, source_code) for path in paths]


@dataclass(frozen=True, slots=True)
class Local:
    """Local files and folders; of a folder, all files of a type that has a reader."""

    paths: tuple[Path, ...]
    column: str = "text"
    held_out: ClassVar[Fractions] = HELD_OUT

    def describe(self) -> dict[str, Any]:
        """The entry of this source in a manifest, with a hash of all names and sizes: it changes with the folder."""
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
        """Files in the given order, sorted by name within a folder."""
        return [file for _, file in self._named()]

    def _named(self) -> list[tuple[str, SourceFile]]:
        found = {path: list(self._below(path)) for path in self.paths}
        for path, below in found.items():
            if not below:
                raise UserError(f"no file to read in {path}; accepted are {', '.join(READERS)}")
        return [file for path in self.paths for file in found[path]]

    def _below(self, path: Path) -> Iterator[tuple[str, SourceFile]]:
        """The files of one argument, each with its path relative to the argument."""
        if not path.exists():
            raise UserError(f"{path} does not exist; give files or folders, stdlib, or cosmopedia-v2")
        for below in sorted(path.rglob("*")) if path.is_dir() else [path]:
            reader = READERS.get(below.suffix.lower())
            if reader is not None and below.is_file():
                yield below.relative_to(path).as_posix(), SourceFile(below, below.stat().st_size, reader, self.column)


@dataclass(frozen=True, slots=True)
class Cosmopedia:
    """Files of Cosmopedia-V2, the paper's text: 104 parquet files of about 1.2 GB and 270M tokens each."""

    numbers: tuple[int, ...]
    held_out: ClassVar[Fractions] = HELD_OUT
    COUNT: ClassVar[int] = 104

    def describe(self) -> dict[str, Any]:
        """The entry of this source in a manifest."""
        return {"kind": "cosmopedia-v2", "files": list(self.numbers)}

    def files(self) -> list[SourceFile]:
        """The files, downloaded to the cache of the hub."""
        by_hand = "fetch it elsewhere and prepare it as a local file"
        names = [f"cosmopedia-v2/train-{number:05d}-of-{self.COUNT:05d}.parquet" for number in self.numbers]
        paths = [fetch("HuggingFaceTB/smollm-corpus", name, "dataset", by_hand) for name in names]
        return [SourceFile(path, path.stat().st_size, parquet) for path in paths]


TextSource = Stdlib | Local | Cosmopedia


def documents(files: Sequence[SourceFile], start: TextPosition) -> Iterator[tuple[bytes, TextPosition]]:
    """Every document from a position on, as UTF-8, with the position after it. Documents may be empty.

    NUL characters are removed, because byte 0 ends a document. A lone surrogate, which JSON allows, becomes "?".
    """
    read = start.read
    for number, file in enumerate(files[start.file :], start.file):
        skip = start.document if number == start.file else 0
        for index, (text, size) in enumerate(file.reader(file.path, file.column, skip), skip + 1):
            read += size
            yield text.replace("\0", "").encode("utf-8", "replace"), TextPosition(number, index, read)


def split_of(document: bytes, held_out: Fractions) -> str:
    """The split of a document, from a hash of its text: copies of a document are in the same split."""
    point = int.from_bytes(hashlib.blake2b(document, digest_size=8).digest()) / 2**64
    if point < held_out["val"]:
        return "val"
    return "probe" if point < held_out["val"] + held_out["probe"] else "train"
