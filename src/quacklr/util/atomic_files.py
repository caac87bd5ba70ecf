"""A file that is whole or not there: written beside its place, flushed to disk, then renamed into it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO


@contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """A file to write to that takes its name only when all of it is on the disk; on any error it is removed.

    A process killed in between leaves `.<name>.part`, which nothing reads and the next write replaces.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        make_folder(path.parent)
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        flush_folder(path.parent)
    except BaseException:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def make_folder(folder: Path) -> None:
    """Create a folder and those above it, unless they exist, with their names on the disk."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in missing:
        flush_folder(each.parent)


def flush_folder(folder: Path) -> None:
    """A rename lives in the folder: it survives a power cut only when that is on the disk too."""
    if os.name == "nt":  # where a folder cannot be opened
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
