"""What a user can mend: told in one sentence that names the option, with exit code 2, and no traceback."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping

from quacklr.util import terminal

LARGEST = 1e30
"""Options are at most this large: float32, in which models train, ends at 3.4e38."""
MOST = 10**12
"""Options that are whole numbers are at most this large."""


class UserError(Exception):
    """A sentence that names the thing that is wrong and the way out."""


def refuse_unless(holds: Callable[[float], bool], what: str, settings: Mapping[str, float]) -> None:
    """UserError for the first of these settings that is no finite number, or for which it does not hold."""
    for name, value in settings.items():
        if not (isinstance(value, int) or math.isfinite(value)) or not holds(value):
            raise UserError(f"{option(name)} must be {what}, not {shown(value)}")


def refuse_unless_positive(**settings: float) -> None:
    """UserError for one that is not above 0, or too large."""
    refuse_unless(lambda value: value > 0, "a positive number", settings)
    _refuse_too_large(settings)


def refuse_negative(**settings: float) -> None:
    """UserError for one that is below 0, or too large."""
    refuse_unless(lambda value: value >= 0, "0 or a positive number", settings)
    _refuse_too_large(settings)


def refuse_unless_below_1(**settings: float) -> None:
    """UserError for one that is not at least 0 and below 1: what a running mean keeps of the past."""
    refuse_unless(lambda value: 0 <= value < 1, "at least 0 and below 1", settings)


def refuse_above(most: int, **settings: int | None) -> None:
    """UserError for one that is larger than this; None is not given."""
    given = {name: value for name, value in settings.items() if value is not None}
    refuse_unless(lambda value: value <= most, f"at most {most:,}", given)


def _refuse_too_large(settings: Mapping[str, float]) -> None:
    for name, value in settings.items():
        most = MOST if isinstance(value, int) else LARGEST
        refuse_unless(lambda value, most=most: value <= most, f"at most {most:g}", {name: value})  # type: ignore[misc]


def option(name: str) -> str:
    """A field as an option of the command line: `d_model` is `--d-model`."""
    return f"--{name.replace('_', '-')}"


def shown(value: float) -> str:
    """A number, for a sentence; a whole number may be too large for a float."""
    return f"a number of {len(str(value))} digits" if isinstance(value, int) and abs(value) > 1e300 else f"{value:g}"


def exit_code(command: str, call: Callable[[], int]) -> int:
    """What a command returns, or the code for how it ended otherwise: 2 for what a user can mend, told in a sentence.

    Every OSError is such: a name that is too long, a disk that is full, a folder that may not be read.
    """
    with terminal.tolerant("stderr"):
        try:
            code = call()
        except SystemExit as stop:  # tyro exits by itself after --help and mistakes
            code = int(stop.code or 0)
        except BrokenPipeError:  # somebody reads the first lines only
            code = 1
        except UserError as error:
            print(f"{command}: {error}", file=sys.stderr)
            code = 2
        except OSError as error:
            print(f"{command}: {terminal.sentence(error)}", file=sys.stderr)
            code = 2
    terminal.discard_unwritten()
    return code
