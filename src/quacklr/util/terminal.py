"""stdout and stderr that may be full, closed, or read by nobody: what cannot be displayed is dropped, not raised.

A command whose output is only a display (progress, a log, a closing sentence) runs in `tolerant()`. A command whose
stdout is its product writes to it as usual, so that its user learns of a full disk.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

NAMES = ("stdout", "stderr")
UNWRITABLE = (OSError, ValueError, AttributeError)  # of the system, of a closed file, of None


class Tolerant:
    """A stream that drops what the stream below cannot write. None stands for a descriptor closed from the start."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Write it, or drop it. Characters that the encoding does not have are written as escapes."""
        with suppress(*UNWRITABLE):
            try:
                self.stream.write(text)
            except UnicodeEncodeError:
                self.stream.write(text.encode("ascii", "backslashreplace").decode())
        return len(text)

    def flush(self) -> None:
        """What cannot be flushed now is tried again with the next write."""
        with suppress(*UNWRITABLE):
            self.stream.flush()

    def isatty(self) -> bool:
        """Whether the stream below is a terminal."""
        with suppress(*UNWRITABLE):
            return bool(self.stream.isatty())
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def tolerant(*names: str) -> Iterator[None]:
    """Nothing that happens to stdout and stderr (or to those named) raises in here."""
    before = {name: getattr(sys, name) for name in names or NAMES}
    for name, stream in before.items():
        setattr(sys, name, stream if isinstance(stream, Tolerant) else Tolerant(stream))
    try:
        yield
    finally:
        for name, stream in before.items():
            setattr(sys, name, stream)


def open_missing() -> None:
    """Give a process the standard descriptors that it was started without, and the streams of those.

    Without them the next file that is opened becomes descriptor 1 or 2, and what a library prints goes into it.
    They are opened the wrong way round: whoever writes to them learns that it is in vain (EBADF).
    """
    for descriptor, flag in ((0, os.O_WRONLY), (1, os.O_RDONLY), (2, os.O_RDONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, flag)  # the lowest that is free, which is this one
    for descriptor, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, mode, errors="backslashreplace", closefd=False))  # noqa: SIM115


def answer(text: str) -> None:
    """Print what a command was asked for; OSError if it cannot be written."""
    try:
        print(text, flush=True)
    except OSError as error:
        raise OSError(error.errno, error.strerror, "stdout") from error


def sentence(error: OSError) -> str:
    """What the system says, with the name of the file, or the beginning of a long one."""
    reason, name = error.strerror or str(error), str(error.filename or "")
    return f"cannot read or write {name if len(name) < 200 else f'{name[:100]}...'}: {reason}" if name else reason


def discard_unwritten() -> None:
    """At the end of a command: let go of text that cannot be written, which Python would report while it exits."""
    for name in NAMES:
        stream = getattr(sys, name)
        try:
            stream.flush()
        except UNWRITABLE:
            with suppress(*UNWRITABLE):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)
                stream.flush()
