"""The display of a sweep: a live rich table on a terminal, otherwise a plain line for each run that ends."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quacklr.lab.config import Config, fingerprint
from quacklr.lab.files import parse_json
from quacklr.lab.ledger import Entry
from quacklr.lab.progress import duration, is_terminal, to_stderr
from quacklr.lab.studies.names import describe, readable_number
from quacklr.lab.sweep.sweep import State, Task

TAIL = 2**16
"""Bytes at the end of metrics.jsonl that are read to find the last step."""
LOG_INTERVAL = 60.0
"""Seconds between two summary lines in a log."""


def describe_ending(entry: Entry) -> str:
    """How a run ended: its validation loss and largest logit, or why it did not finish."""
    if entry.status != "finished":
        return f"{entry.status}: {entry.reason}"
    top = entry.result["max_logit"]
    return f"validation loss {entry.result['val_loss']:.4f}" + (
        "" if top is None else f", largest logit {readable_number(top)}"
    )


def last_step(path: Path) -> int:
    """The last step of the run in this folder, from the last complete line of its metrics; 0 if there is none."""
    try:
        with (path / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - TAIL))
            lines = file.read().split(b"\n")[:-1]
        return int(parse_json(lines[-1])["step"])
    except (OSError, ValueError, LookupError, TypeError, OverflowError):  # not begun, or the line is longer than TAIL
        return 0


class TimeEstimate:
    """Estimates the remaining time of a sweep from how long its runs have taken so far.

    `step_cost` is the time of a step of a run relative to other runs; by default it is the same for all runs.
    """

    def __init__(self, step_cost: Callable[[Config], float] = lambda _: 1.0) -> None:
        self.began, self._step_cost = time.monotonic(), step_cost
        self._first: dict[str, int] = {}  # fingerprint -> step of the run when the sweep started it

    def observe(self, state: State) -> None:
        """Keep the first step of runs that have started. Call it often, or their first steps are not counted."""
        for task in state.running:
            if task.path.name not in self._first:
                self._first[task.path.name] = last_step(task.path)

    def left(self, state: State) -> str:
        """Such as `1:20:00 left`."""
        self.observe(state)
        done, remaining = 0.0, sum(self._cost(task.config) for task in state.waiting)
        for entry in state.ended:
            done += self._cost(entry.config, max(0, entry.result.get("step", 0) - self._first.get(entry.key, 0)))
        for task in state.running:
            step = last_step(task.path)
            done += self._cost(task.config, max(0, step - self._first[task.path.name]))
            remaining += self._cost(task.config, task.config.training.steps - step)
        seconds = time.monotonic() - self.began
        if not done or seconds < 1:
            return "time left unknown yet"
        return f"{duration(seconds * remaining / done)} left"

    def _cost(self, config: Config, steps: int | None = None) -> float:
        """The cost of some steps of a run, or of all."""
        return self._step_cost(config) * (config.training.steps if steps is None else steps)


def summary(state: State, known: int, estimate: TimeEstimate) -> str:
    """One line: runs done, running and failed, and the time left."""
    total = known + len(state.ended) + len(state.running) + len(state.waiting)
    troubled = sum(entry.status != "finished" for entry in state.ended)
    parts = [f"{known + len(state.ended)} of {total} runs done", f"{len(state.running)} running"]
    parts += [f"{troubled} diverged or crashed"] if troubled else []
    ending = "stopping: every run saves a checkpoint" if state.stopped is not None else estimate.left(state)
    return ", ".join([*parts, ending if state.running or state.waiting else "finished"])


@contextmanager
def display(
    title: str, known: int, step_cost: Callable[[Config], float] = lambda _: 1.0
) -> Iterator[Callable[[State], None]]:
    """A function that displays the state of a sweep; `known` runs were in the ledger before.

    `step_cost` is the time of a step of a run, relative to other runs.
    """
    estimate = TimeEstimate(step_cost)
    if not is_terminal():
        yield _lines(title, known, estimate)
        return
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(file=sys.stderr), refresh_per_second=2, transient=False) as live:
        yield lambda state: live.update(_table(title, state, known, estimate))


def _lines(title: str, known: int, estimate: TimeEstimate) -> Callable[[State], None]:
    """Print each run when it ends, and a summary once a minute and at the end."""
    printed, summarized = 0, time.monotonic()

    def show(state: State) -> None:
        nonlocal printed, summarized
        estimate.observe(state)
        new, printed = state.ended[printed:], len(state.ended)
        for entry in new:
            to_stderr(f"{describe(entry.config)}: {describe_ending(entry)}")
        finished = new and not state.running and not state.waiting
        if finished or time.monotonic() - summarized > LOG_INTERVAL:
            to_stderr(f"{title}: {summary(state, known, estimate)}")
            summarized = time.monotonic()

    return show


def _table(title: str, state: State, known: int, estimate: TimeEstimate) -> Any:
    """The running runs, the last that ended, and the summary as caption."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), caption=Text(summary(state, known, estimate)), expand=True)
    for name in ("run", "state"):
        table.add_column(name, ratio=1)
    for entry in state.ended[-8:]:
        style = "dim" if entry.status == "finished" else "red"
        table.add_row(Text(describe(entry.config), style), Text(describe_ending(entry), style))
    for task in state.running:
        table.add_row(Text(describe(task.config)), Text(_running(task)))
    return table


def _running(task: Task) -> str:
    steps, step = task.config.training.steps, last_step(task.path)
    filled = "#" * round(20 * step / steps)
    retried = f", attempt {task.attempts}" if task.attempts > 1 else ""
    return f"{filled:.<20} {step}/{steps} steps{retried}"


def listing(configs: list[Config], known: dict[str, Entry]) -> str:
    """One line per run and how it ended, for `--dry-run`."""
    lines = []
    for config in configs:
        entry = known.get(fingerprint(config))
        lines.append(f"{fingerprint(config)}  {describe(config)}: {describe_ending(entry) if entry else 'to do'}")
    return "\n".join(lines)
