"""What people see of a sweep: on a terminal a table that redraws itself, elsewhere a plain line for what ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quacklr.lab.config import Config, fingerprint
from quacklr.lab.files import parse_json
from quacklr.lab.progress import duration, is_terminal, stderr, to_stderr
from quacklr.lab.studies.names import describe, readable_number
from quacklr.lab.sweep.ledger import Entry
from quacklr.lab.sweep.sweep import State, Task

TAIL = 2**16
SECONDS_A_LINE = 60.0


def verdict(entry: Entry) -> str:
    """How a run ended, in a few words."""
    if entry.status != "finished":
        return f"{entry.status}: {entry.reason}"
    top = entry.result["max_logit"]
    return f"validation loss {entry.result['val_loss']:.4f}" + (
        "" if top is None else f", largest logit {readable_number(top)}"
    )


def step_of(path: Path) -> int:
    """The step that the run in this folder has reached: the last whole line of its metrics."""
    try:
        with (path / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - TAIL))
            lines = file.read().split(b"\n")[:-1]
        return int(parse_json(lines[-1])["step"])
    except (OSError, ValueError, LookupError, TypeError, OverflowError):  # not begun, or a line longer than we read
        return 0


class Meter:
    """How much is done, in steps of all runs, and how long the rest will take at the pace so far."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self._first: dict[str, int] = {}  # by fingerprint: the step at which a run was first seen

    def left(self, state: State) -> str:
        """Such as `1:20:00 left`."""
        done = sum(entry.result.get("step", 0) - self._first.get(entry.key, 0) for entry in state.ended)
        remaining = sum(task.config.training.steps for task in state.waiting)
        for task in state.running:
            step = step_of(task.path)
            done += step - self._first.setdefault(task.path.name, step)
            remaining += task.config.training.steps - step
        seconds = time.monotonic() - self.began
        if not done or seconds < 1:
            return "time left unknown yet"
        return f"{duration(seconds * remaining / done)} left"


def summary(state: State, known: int, meter: Meter) -> str:
    """One line about all of it."""
    total = known + len(state.ended) + len(state.running) + len(state.waiting)
    troubled = sum(entry.status != "finished" for entry in state.ended)
    parts = [f"{known + len(state.ended)} of {total} runs done", f"{len(state.running)} running"]
    parts += [f"{troubled} diverged or crashed"] if troubled else []
    ending = "stopping: every run saves a checkpoint" if state.stopped is not None else meter.left(state)
    return ", ".join([*parts, ending if state.running or state.waiting else "finished"])


@contextmanager
def display(title: str, known: int) -> Iterator[Callable[[State], None]]:
    """A function to call with the state, as often as you like; `known` runs were in the ledger before."""
    if not is_terminal():
        yield _lines(title, known)
        return
    from rich.console import Console
    from rich.live import Live

    meter = Meter()
    with Live(console=Console(file=stderr()), refresh_per_second=2, transient=False) as live:
        yield lambda state: live.update(_table(title, state, known, meter))


def _lines(title: str, known: int) -> Callable[[State], None]:
    """Each run as it ends, and where the sweep is once a minute."""
    meter, told, said = Meter(), [0], [time.monotonic()]

    def show(state: State) -> None:
        for entry in state.ended[told[0] :]:
            to_stderr(f"{describe(entry.config)}: {verdict(entry)}")
        if time.monotonic() - said[0] > SECONDS_A_LINE or (
            len(state.ended) > told[0] and not state.running and not state.waiting
        ):
            to_stderr(f"{title}: {summary(state, known, meter)}")
            said[0] = time.monotonic()
        told[0] = len(state.ended)

    return show


def _table(title: str, state: State, known: int, meter: Meter) -> Any:
    """What runs now, the last that ended, and a line about the whole."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), caption=Text(summary(state, known, meter)), expand=True)
    for name in ("run", "state"):
        table.add_column(name, ratio=1)
    for entry in state.ended[-8:]:
        style = "dim" if entry.status == "finished" else "red"
        table.add_row(Text(describe(entry.config), style), Text(verdict(entry), style))
    for task in state.running:
        table.add_row(Text(describe(task.config)), Text(_running(task)))
    return table


def _running(task: Task) -> str:
    steps, step = task.config.training.steps, step_of(task.path)
    filled = round(20 * step / steps)
    again = f", attempt {task.attempts}" if task.attempts > 1 else ""
    return f"{'#' * filled}{'.' * (20 - filled)} {step}/{steps} steps{again}"


def listing(configs: list[Config], known: dict[str, Entry]) -> str:
    """What a sweep would do: every run of the study and how it ended, for `--dry-run`."""
    lines = []
    for config in configs:
        entry = known.get(fingerprint(config))
        lines.append(f"{fingerprint(config)}  {describe(config)}: {verdict(entry) if entry else 'to do'}")
    return "\n".join(lines)
