"""Training runs in other processes that wait at a step, so that a test can act in the middle of them.

    pause(run, step=25)                          # before the process is started
    process = subprocess.Popen(...)
    wait_until_paused(run, process.poll)         # the row of step 25 is written, and the run waits
    process.send_signal(signal.SIGTERM)          # a signal ends the waiting
    decode_step(run)                                   # and so does this, also for processes that are started later

The process must have been started by this one, directly or not: tests/pausing is on the PYTHONPATH that it inherits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from lab_runs import read_rows

MINUTES = 10  # for anything that another process does; it guards against waiting for ever, and nothing depends on it


def pause(run: Path, step: int, deaf: bool = False) -> None:
    """Make the run in this folder wait after it has written the row of this step; if `deaf`, whatever signal comes."""
    _file(run).parent.mkdir(parents=True, exist_ok=True)
    _file(run).write_text(f"{step} deaf" if deaf else str(step))


def is_at_pause(run: Path) -> bool:
    """Whether the run has written the row of the step at which it is to wait."""
    step = int(_file(run).read_text().split()[0])
    return any(row["step"] == step for row in read_rows(run))


def wait_until_paused(run: Path, ended: Callable[[], int | None] = lambda: None) -> None:
    """Wait for the run; `ended` says how its process has ended, None if it has not."""
    wait_for(lambda: is_at_pause(run), f"{run} has not come to its pause", ended)


def wait_for(event: Callable[[], bool], otherwise: str, ended: Callable[[], int | None] = lambda: None) -> None:
    """Wait for an event in another process."""
    end = time.monotonic() + 60 * MINUTES
    while not event():
        code = ended()
        assert code is None or event(), f"its process has ended with code {code}; {otherwise}"
        assert time.monotonic() < end, otherwise
        time.sleep(0.01)


def decode_step(run: Path) -> None:
    """Let the run go on, and do not make it wait again."""
    _file(run).unlink()


def _file(run: Path) -> Path:
    return run.with_name(f"{run.name}.pause")
