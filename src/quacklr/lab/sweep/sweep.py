"""The loop of a sweep: what the ledger does not have is started, asked about, and written down as it ends.

Nothing is lost when it stops, in whatever way: runs have checkpoints in their folders, and the ledger has what ended.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from quacklr.lab.config import Config, fingerprint
from quacklr.lab.signals import signals
from quacklr.lab.sweep.ledger import Entry, Ledger, crashed
from quacklr.lab.sweep.place import Crashed, Executor, Halted, Job, Lost, Outcome

ATTEMPTS = 3
"""How often a run is started before a death of its process counts as its end."""


@dataclass
class Task:
    """A run that the ledger does not have yet."""

    config: Config
    path: Path
    attempts: int = 0
    job: Job | None = None


@dataclass
class State:
    """How far the sweep is; what its display shows."""

    waiting: deque[Task]
    running: list[Task] = field(default_factory=list)
    ended: list[Entry] = field(default_factory=list)
    stopped: int | None = None
    """The signal that ended it early."""


def missing(configs: Iterable[Config], known: dict[str, Entry], retry: bool = False) -> list[Config]:
    """Of these runs the ones to do: each once, those that are in no ledger, and with `retry` those that crashed."""
    wanted = {fingerprint(config): config for config in configs}
    done = {key for key, entry in known.items() if not (retry and entry.status == "crashed")}
    return [config for key, config in wanted.items() if key not in done]


def sweep(
    configs: Iterable[Config],
    ledger: Ledger,
    place: Executor,
    runs: Path,
    show: Callable[[State], None] = lambda _: None,
) -> State:
    """Run all of these at a place, each in a folder of `runs` named by its fingerprint, and write them to the ledger.

    A run whose process dies is started again and goes on from its checkpoint, three times in all. On Ctrl-C or SIGTERM
    all runs save a checkpoint, and it returns.
    """
    state = State(deque(Task(config, runs / fingerprint(config)) for config in configs))
    with signals() as caught:
        while state.running or (state.waiting and state.stopped is None):
            if caught and state.stopped is None:
                state.stopped = caught[0]
                for task in state.running:
                    _job(task).stop()
            while state.waiting and len(state.running) < place.slots and state.stopped is None:
                _start(state.waiting.popleft(), state, place)
            _look(state, ledger)
            show(state)
            time.sleep(place.pause)
    return state


def _start(task: Task, state: State, place: Executor) -> None:
    task.attempts += 1
    task.job = place.start(task.config, task.path)
    state.running.append(task)


def _look(state: State, ledger: Ledger) -> None:
    """Write down what has ended, and queue anew what died."""
    for task in list(state.running):
        outcome = _job(task).outcome()
        if outcome is None:
            continue
        state.running.remove(task)
        entry = _entry(task, outcome)
        if entry is None:
            state.waiting.appendleft(task)
        else:
            ledger.append(entry)
            state.ended.append(entry)


def _entry(task: Task, outcome: Outcome) -> Entry | None:
    """The line for the ledger; None if the run is to be started again."""
    match outcome:
        case Entry():
            return outcome
        case Crashed(reason):
            return crashed(task.config, task.path, reason)
        case Lost(reason) if task.attempts >= ATTEMPTS:
            return crashed(task.config, task.path, f"{reason}, {task.attempts} times")
        case Lost() | Halted():
            return None


def _job(task: Task) -> Job:
    assert task.job is not None, "only what was started is asked about"
    return task.job
