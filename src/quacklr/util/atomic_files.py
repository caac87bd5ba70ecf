"""Atomic writes: a file is written under another name, flushed to disk, then renamed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO


@contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for writing that gets its name only after all of it is on the disk; on any error it is removed.

    A process that is killed meanwhile leaves `.<name>.part`, which nothing reads and the next write replaces.
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
    """Create a folder and its missing parents, and flush their entries to the disk."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in missing:
        flush_folder(each.parent)


def flush_folder(folder: Path) -> None:
    """Flush a folder to the disk. A rename survives a power cut only if the folder is flushed too."""
    if os.name == "nt":  # Windows cannot open a folder
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
