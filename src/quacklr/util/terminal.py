"""Writing to stdout and stderr that may be full, closed or a broken pipe.

A command whose output is only for display (progress, a log, a summary) runs in `tolerant()`, which drops text that
cannot be written. A command whose stdout is its result writes to it as usual, so that a full disk is an error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

NAMES = ("stdout", "stderr")
UNWRITABLE = (OSError, ValueError, AttributeError)  # from the system, from a closed file, from None


class Tolerant:
    """A stream that drops text which the wrapped stream cannot write. The wrapped stream may be None."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Write text, or drop it. Characters that the encoding does not have are written as escapes."""
        with suppress(*UNWRITABLE):
            try:
                self.stream.write(text)
            except UnicodeEncodeError:
                self.stream.write(text.encode("ascii", "backslashreplace").decode())
        return len(text)

    def flush(self) -> None:
        """Flush the stream; on failure, the next write tries again."""
        with suppress(*UNWRITABLE):
            self.stream.flush()

    def isatty(self) -> bool:
        """Whether the wrapped stream is a terminal."""
        with suppress(*UNWRITABLE):
            return bool(self.stream.isatty())
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def tolerant(*names: str) -> Iterator[None]:
    """While entered, writing to stdout and stderr (or to the streams named) never raises."""
    before = {name: getattr(sys, name) for name in names or NAMES}
    for name, stream in before.items():
        setattr(sys, name, stream if isinstance(stream, Tolerant) else Tolerant(stream))
    try:
        yield
    finally:
        for name, stream in before.items():
            setattr(sys, name, stream)


def open_missing() -> None:
    """Open the standard descriptors that a process was started without, and their streams.

    Otherwise the next file to be opened would become descriptor 1 or 2, and receive what libraries print. Descriptors
    for output are opened for reading, and stdin for writing, so that using them fails with EBADF.
    """
    for descriptor, flag in ((0, os.O_WRONLY), (1, os.O_RDONLY), (2, os.O_RDONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, flag)  # the lowest free descriptor, which is this one
    for descriptor, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, mode, errors="backslashreplace", closefd=False))  # noqa: SIM115


def print_result(text: str) -> None:
    """Print the result of a command; OSError if it cannot be written."""
    try:
        print(text, flush=True)
    except OSError as error:
        raise OSError(error.errno, error.strerror, "stdout") from error


def os_error_message(error: OSError) -> str:
    """The message of an OSError, with the name of the file, shortened if it is long."""
    reason, name = error.strerror or str(error), str(error.filename or "")
    return f"cannot read or write {name if len(name) < 200 else f'{name[:100]}...'}: {reason}" if name else reason


def discard_unwritten() -> None:
    """Drop text that cannot be written at the end of a command; Python would report it at exit."""
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
