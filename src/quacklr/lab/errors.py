"""What a user can mend: told in one sentence that names the option, with exit code 2, and no traceback."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable


class UserError(Exception):
    """A sentence that names the thing that is wrong and the way out."""


def refuse_unless(holds: Callable[[float], bool], what: str, settings: dict[str, float]) -> None:
    """UserError for the first of these settings that is no finite number, or for which it does not hold."""
    for name, value in settings.items():
        if not math.isfinite(value) or not holds(value):
            raise UserError(f"--{name.replace('_', '-')} must be {what}, not {value:g}")


def refuse_unless_positive(**settings: float) -> None:
    """UserError for one that is not above 0."""
    refuse_unless(lambda value: value > 0, "a positive number", settings)


def refuse_negative(**settings: float) -> None:
    """UserError for one that is below 0."""
    refuse_unless(lambda value: value >= 0, "0 or a positive number", settings)


def refuse_unless_below_1(**settings: float) -> None:
    """UserError for one that is not at least 0 and below 1: what a running mean keeps of the past."""
    refuse_unless(lambda value: 0 <= value < 1, "at least 0 and below 1", settings)


def exit_code(command: str, call: Callable[[], int]) -> int:
    """What a command returns, or the code for how it ended otherwise: 2 for a UserError, told in its sentence."""
    try:
        return call()
    except SystemExit as stop:  # tyro exits by itself after --help and mistakes
        return int(stop.code or 0)
    except BrokenPipeError:  # somebody reads the first lines only
        return 1
    except UserError as error:
        print(f"{command}: {error}", file=sys.stderr)
        return 2
