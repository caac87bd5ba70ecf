"""How far a long job is: a bar on a terminal, a plain line now and then elsewhere. On stderr: stdout is for results.

What cannot be displayed is dropped: nothing that happens to the terminal ends a job.
"""

from __future__ import annotations

import math
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, final

from quacklr.util.terminal import Tolerant

SECONDS_A_LINE = 10.0


class Show(ABC):
    """Call it with what is done so far and a few words: `show(step, "loss 2.31")`. Cheap enough for every step."""

    def __init__(self, title: str, total: float | None, unit: str, done: float) -> None:
        self.title, self.total, self.unit = title, total, unit
        self._first, self._began = done, time.monotonic()

    @abstractmethod
    def __call__(self, done: float, text: str = "") -> None:
        """Say how much is done by now."""

    @abstractmethod
    def line(self, text: str) -> None:
        """Print a line that stays, on stdout."""

    def _status(self, done: float, text: str) -> str:
        """Such as `300/1,000 steps, 25.1/s, 0:00:28 left, loss 2.31`; the rate is the mean up to now."""
        seconds = time.monotonic() - self._began
        rate = (done - self._first) / seconds if seconds else 0.0
        parts = [f"{_number(done)}{'' if self.total is None else '/' + _number(self.total)} {self.unit}"]
        if rate > 0:
            parts += [f"{_number(rate)}/s"]
        if rate > 0 and self.total is not None and not math.isclose(done, self.total):
            parts += [f"{duration((self.total - done) / rate)} left"]
        else:
            parts += [f"{duration(seconds)} so far"]
        return ", ".join([*parts, *([text] if text else [])])


@final
class _Lines(Show):
    """For logs: no control characters, and not more than a line every ten seconds."""

    def __init__(self, title: str, total: float | None, unit: str, done: float) -> None:
        super().__init__(title, total, unit, done)
        self._said = self._began
        self._last: tuple[float, str] | None = None

    def __call__(self, done: float, text: str = "") -> None:
        self._last = (done, text)
        if time.monotonic() - self._said >= SECONDS_A_LINE:
            self.say()

    def say(self) -> None:
        """Print where it is, unless this has been said."""
        if self._last is not None:
            to_stderr(f"{self.title}: {self._status(*self._last)}")
            self._said, self._last = time.monotonic(), None

    def line(self, text: str) -> None:
        to_stdout(text)


@final
class _Bar(Show):
    """For people: one line that redraws itself at the foot of the terminal."""

    def __init__(self, title: str, total: float | None, unit: str, done: float) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        super().__init__(title, total, unit, done)
        status = TextColumn("{task.fields[status]}", markup=False, table_column=Column(no_wrap=True))
        columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=None), status)
        self.bar = Progress(
            *columns, console=Console(file=stderr()), expand=True, refresh_per_second=5, redirect_stdout=False
        )
        self._task = self.bar.add_task(title, total=total, status="")
        self.bar.update(self._task, completed=done)

    def __call__(self, done: float, text: str = "") -> None:
        self.bar.update(self._task, completed=done, status=self._status(done, text))

    def line(self, text: str) -> None:
        if Tolerant(sys.stdout).isatty():  # the bar must be told, or it would draw over the line
            self.bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            to_stdout(text)


@contextmanager
def progress(title: str, total: float | None = None, unit: str = "steps", done: float = 0) -> Iterator[Show]:
    """A display for a job of `total` units; `done` of them were done before, if it is a resumed one."""
    if is_terminal():
        show = _Bar(title, total, unit, done)
        with show.bar:
            yield show
    else:
        lines = _Lines(title, total, unit, done)
        yield lines
        lines.say()


def is_terminal() -> bool:
    """Whether people look at stderr on a screen that can be redrawn."""
    return Tolerant(sys.stderr).isatty() and os.environ.get("TERM") != "dumb"


def stderr() -> Any:
    """The stream for a display."""
    return Tolerant(sys.stderr)


def to_stderr(line: str) -> None:
    """Print a line of a display."""
    print(line, file=stderr(), flush=True)


def to_stdout(line: str) -> None:
    """Print a line of a display."""
    print(line, file=Tolerant(sys.stdout), flush=True)


def duration(seconds: float) -> str:
    """Such as `1:20:00`; at most thirty years, since a timedelta has an end."""
    return str(timedelta(seconds=round(min(seconds, 1e9))))


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"
