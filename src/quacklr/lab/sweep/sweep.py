"""The loop of a sweep: start the runs that the ledger does not have, poll them, and append those that ended.

A sweep can be killed at any time: runs have checkpoints in their folders, and the ledger has the runs that ended.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from quacklr.lab.config import Config, fingerprint
from quacklr.lab.ledger import Entry, Ledger, crashed
from quacklr.lab.signals import stop_signals
from quacklr.lab.sweep.code_version import code_version
from quacklr.lab.sweep.executor import Crashed, Executor, Halted, Job, Lost, Outcome

ATTEMPTS = 3
"""Number of starts after which a run whose process dies counts as crashed."""


@dataclass
class Task:
    """A run that is not in the ledger yet."""

    config: Config
    path: Path
    attempts: int = 0
    job: Job | None = None


@dataclass
class State:
    """The progress of a sweep."""

    waiting: deque[Task]
    running: list[Task] = field(default_factory=list)
    ended: list[Entry] = field(default_factory=list)
    stopped: int | None = None
    """The signal that stopped the sweep early."""


def missing(configs: Iterable[Config], known: dict[str, Entry], retry: bool = False) -> list[Config]:
    """The runs that are not in the ledger, each once; with `retry` also those that crashed."""
    wanted = {fingerprint(config): config for config in configs}
    done = {key for key, entry in known.items() if not (retry and entry.status == "crashed")}
    return [config for key, config in wanted.items() if key not in done]


def sweep(
    configs: Iterable[Config],
    ledger: Ledger,
    executor: Executor,
    runs: Path,
    show: Callable[[State], None] = lambda _: None,
    plan: Callable[[Sequence[Entry]], Iterable[Config]] | None = None,
) -> State:
    """Execute all runs, each in the folder `runs / fingerprint`, and append them to the ledger.

    When a run has ended, `plan` is called with all entries of this sweep. The runs that it returns replace the waiting
    ones. A run whose process dies is resumed from its checkpoint, with three starts at most. After SIGINT or SIGTERM
    all runs save a checkpoint, and the function returns.
    """
    state, tasks = State(deque()), dict[Path, Task]()

    def queue(configs: Iterable[Config]) -> None:
        busy = {task.path for task in state.running} | {runs / entry.key for entry in state.ended}
        wanted = {runs / fingerprint(config): config for config in configs}
        queued = (tasks.setdefault(path, Task(config, path)) for path, config in wanted.items() if path not in busy)
        state.waiting = deque(queued)

    code_version()  # of the code now, before somebody edits it during the sweep
    queue(configs)
    with stop_signals() as caught:
        while state.running or (state.waiting and state.stopped is None):
            if caught and state.stopped is None:
                state.stopped = caught[0]
                for task in state.running:
                    _job(task).stop()
            while state.waiting and len(state.running) < executor.slots and state.stopped is None:
                _start(state.waiting.popleft(), state, executor)
            if _collect(state, ledger) and plan is not None and state.stopped is None:
                queue(plan(state.ended))
            show(state)
            time.sleep(executor.pause)
    return state


def _start(task: Task, state: State, executor: Executor) -> None:
    task.attempts += 1
    task.job = executor.start(task.config, task.path)
    state.running.append(task)


def _collect(state: State, ledger: Ledger) -> bool:
    """Append runs that ended to the ledger, and queue those whose process died again. Returns whether any ended."""
    before = len(state.ended)
    for task in list(state.running):
        outcome = _job(task).outcome()
        if outcome is None:
            continue
        state.running.remove(task)
        entry = _entry(task, outcome)
        if entry is None:
            state.waiting.appendleft(task)
        else:
            entry = replace(entry, environment=entry.environment | {"code": code_version()})
            ledger.append(entry)
            state.ended.append(entry)
    return len(state.ended) > before


def _entry(task: Task, outcome: Outcome) -> Entry | None:
    """The entry for the ledger; None if the run is started again."""
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
    assert task.job is not None, "only started tasks are polled"
    return task.job
