"""Errors that a user can fix: one sentence that names the option, exit code 2, no traceback."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

MAX_FLOAT = 1e30
"""Upper limit of every float option: the largest float32 is 3.4e38."""
MAX_INT = 10**12
"""Upper limit of every integer option."""


class UserError(Exception):
    """A sentence that names what is wrong and how to fix it."""


@contextmanager
def os_errors(failure: str) -> Iterator[None]:
    """Raise an OSError of the body as a UserError: `failure`, such as "cannot write PATH", and the system's reason."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{failure}: {error.strerror or error}") from error


def validate(holds: Callable[[float], bool], requirement: str, settings: Mapping[str, float]) -> None:
    """Raise UserError for the first setting that is not a finite number or for which `holds` is false."""
    for name, value in settings.items():
        if not (isinstance(value, int) or math.isfinite(value)) or not holds(value):
            raise UserError(f"--{name.replace('_', '-')} must be {requirement}, not {_format(value)}")


def validate_positive(**settings: float) -> None:
    """Raise UserError for a setting that is not above 0, or too large."""
    validate(lambda value: value > 0, "a positive number", settings)
    _validate_limits(settings)


def validate_non_negative(**settings: float) -> None:
    """Raise UserError for a setting that is below 0, or too large."""
    validate(lambda value: value >= 0, "0 or a positive number", settings)
    _validate_limits(settings)


def validate_below_1(**settings: float) -> None:
    """Raise UserError for a decay rate that is not in [0, 1)."""
    validate(lambda value: 0 <= value < 1, "at least 0 and below 1", settings)


def validate_at_most(limit: int, **settings: int | None) -> None:
    """Raise UserError for a setting above the limit. None means that the option was not given."""
    given = {name: value for name, value in settings.items() if value is not None}
    validate(lambda value: value <= limit, f"at most {limit:,}", given)


def _validate_limits(settings: Mapping[str, float]) -> None:
    integers = {name: value for name, value in settings.items() if isinstance(value, int)}
    validate(lambda value: value <= MAX_INT, f"at most {MAX_INT:g}", integers)
    validate(lambda value: value <= MAX_FLOAT, f"at most {MAX_FLOAT:g}", settings)


def _format(value: float) -> str:
    """Format a number for a message; an integer may be too large for a float."""
    return f"a number of {len(str(value))} digits" if isinstance(value, int) and abs(value) > 1e300 else f"{value:g}"


def one_line(error: BaseException) -> str:
    """The type of an error and the first line of its message."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def exit_code(command: str, call: Callable[[], int]) -> int:
    """Run a command and return its exit code: 2, with the message on stderr, for a UserError and for any OSError.

    OSErrors are mistakes that a user can fix: a name that is too long, a full disk, a folder without permission.
    """
    try:
        return call()
    except SystemExit as stop:  # tyro exits by itself after --help and after a wrong option
        return int(stop.code or 0)
    except BrokenPipeError:  # the reader of a pipe has closed it; quacklr.cli ends the command
        raise
    except (UserError, OSError) as error:
        print(f"{command}: {error}", file=sys.stderr)
        return 2
