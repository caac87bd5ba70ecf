"""The lab's files: whole or not there, locked while a run is at work beside them, and told about in sentences."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from quacklr.lab.errors import UserError
from quacklr.util import atomic_files as files


@contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """A file that takes its name only when all of it is on the disk.

    What the system says about a full disk or a forbidden directory becomes a UserError.
    """
    try:
        with files.atomic_write(path) as file:
            yield file
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error


@contextmanager
def locked(folder: Path, wait: bool = False) -> Iterator[None]:
    """Make a folder and keep other processes of quacklr out of it; the system lets go of it when the process dies.

    On a file system without locks nobody is kept out.
    """
    try:
        files.make_folder(folder)
        file = (folder / ".lock").open("w")
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror or error}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"another quacklr is at work in {folder}; wait for it or choose another folder") from error
        except OSError:
            pass
        yield


def write_json(path: Path, value: Any) -> None:
    """A small JSON file, indented for people, whole or not there."""
    with atomic_write(path) as file:
        file.write((json.dumps(value, indent=2) + "\n").encode())


def parse_json(text: str | bytes) -> Any:
    """What a JSON text says; ValueError if it is not JSON, or nested more deeply than Python can read."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_json(path: Path) -> Any:
    """A JSON file; UserError if it is not there or not JSON."""
    try:
        return parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}") from error
