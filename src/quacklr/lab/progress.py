"""Progress of a long job on stderr: a rich progress bar on a terminal, otherwise a plain line every ten seconds.

stdout is for results.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

LOG_INTERVAL = 10.0
"""Seconds between two lines in a log."""


class ProgressDisplay:
    """Call it with the amount done so far and a short text: `show(step, "loss 2.31")`. Cheap enough for every step."""

    def __init__(self, title: str, total: float | None, unit: str, done: float, bar: Any = None) -> None:
        self.title, self.total, self.unit, self.bar = title, total, unit, bar
        self._first, self._began = done, time.monotonic()
        self._printed = self._began
        self._pending: tuple[float, str] | None = None
        if bar:
            bar.add_task(title, total=total, completed=done, status="")

    def __call__(self, done: float, text: str = "") -> None:
        """Update the bar, or print a line if the last one is ten seconds old."""
        if self.bar:
            self.bar.update(self.bar.task_ids[0], completed=done, status=self._status(done, text))
            return
        self._pending = (done, text)
        if time.monotonic() - self._printed >= LOG_INTERVAL:
            self.flush()

    def flush(self) -> None:
        """Print the last status to the log, unless it was printed."""
        if self._pending is not None:
            to_stderr(f"{self.title}: {self._status(*self._pending)}")
            self._printed, self._pending = time.monotonic(), None

    def line(self, text: str) -> None:
        """Print a line to stdout, above the bar if both are on the terminal."""
        if self.bar and sys.stdout.isatty():
            self.bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, flush=True)

    def _status(self, done: float, text: str) -> str:
        """Such as `300/1,000 steps, 25.1/s, 0:00:28 left, loss 2.31`; the rate is the mean so far."""
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


@contextmanager
def progress(title: str, total: float | None = None, unit: str = "steps", done: float = 0) -> Iterator[ProgressDisplay]:
    """A display for a job of `total` units; a resumed job starts with `done` of them."""
    bar = _rich_bar() if is_terminal() else None
    show = ProgressDisplay(title, total, unit, done, bar)
    with bar or nullcontext():
        yield show
    show.flush()


def _rich_bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn
    from rich.table import Column

    status = TextColumn("{task.fields[status]}", markup=False, table_column=Column(no_wrap=True))
    columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=None), status)
    return Progress(
        *columns, console=Console(file=sys.stderr), expand=True, refresh_per_second=5, redirect_stdout=False
    )


def is_terminal() -> bool:
    """Whether stderr is a terminal that can be redrawn."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def to_stderr(line: str) -> None:
    """Print a line of a display."""
    print(line, file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """Such as `1:20:00`; limited to thirty years, because a timedelta has a maximum."""
    return str(timedelta(seconds=round(min(seconds, 1e9))))


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"
