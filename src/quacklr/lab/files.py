"""Atomic writes, locks and JSON files; an OSError becomes a UserError that names the file."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from quacklr.lab.errors import UserError, os_errors


@contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that gets its name only after all of it is on the disk; UserError if it cannot be written.

    A process that is killed meanwhile leaves `.<name>.part`, which nothing reads and the next write replaces.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        with os_errors(f"cannot write {path}"):
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
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def locked(folder: Path, wait: bool = False) -> Iterator[None]:
    """Create a folder and hold its lock. If another process holds it, raise UserError, or with `wait` block.

    The system releases the lock when the process dies. On a file system without locks there is no protection.
    """
    with os_errors(f"cannot write to {folder}"):
        make_folder(folder)
        file = (folder / ".lock").open("w")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"another quacklr is at work in {folder}; wait for it or choose another folder") from error
        except OSError:
            pass
        yield


def write_json(path: Path, value: Any) -> None:
    """Write an indented JSON file atomically."""
    with atomic_write(path) as file:
        file.write((json.dumps(value, indent=2) + "\n").encode())


def parse_json(text: str | bytes) -> Any:
    """Parse JSON; ValueError if the text is not JSON, or nested too deeply for Python's parser."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_json(path: Path) -> Any:
    """Read a JSON file; UserError if it does not exist or is not JSON."""
    try:
        with os_errors(f"cannot read {path}"):
            return parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}") from error
