"""Where runs are executed: this machine, a Ray cluster, a Slurm cluster. A place starts jobs and is asked about them.

All of them do the same, `work`, so the ledger is the same wherever its runs were made.
"""

from __future__ import annotations

import os
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from quacklr.lab.config import Config, from_json
from quacklr.lab.files import locked
from quacklr.lab.sweep.ledger import Entry, entry_from_json, entry_of
from quacklr.lab.train.runner import Stopped, run
from quacklr.util import terminal

LOG = "log.txt"
ProgressReport = tuple[str, Any]
"""How a run ended, in plain values that any place can send: ("entry", its line), ("crashed", why), ("halted", None)."""


@dataclass(frozen=True)
class Crashed:
    """The program raised: trying again would end the same way."""

    reason: str


@dataclass(frozen=True)
class Lost:
    """The process died (killed, out of memory, a node gone): trying again goes on from the last checkpoint."""

    reason: str


@dataclass(frozen=True)
class Halted:
    """It was asked to stop; its checkpoint is saved."""


Outcome = Entry | Crashed | Lost | Halted


class Job(Protocol):
    """One run that was started."""

    def outcome(self) -> Outcome | None:
        """How it ended, or None while it goes on. Never waits."""

    def stop(self) -> None:
        """Ask it to save a checkpoint and end; returns at once."""


class Executor(Protocol):
    """Somewhere to execute runs."""

    slots: int
    """How many jobs to keep started at once."""
    pause: float
    """Seconds between two looks at the jobs."""

    def start(self, config: Config, path: Path) -> Job:
        """Begin or resume the run in this folder."""

    def close(self) -> None:
        """Let go of what the place holds; after all jobs have ended."""


def work(saved: dict[str, Any], path: str) -> dict[str, Any]:
    """Bring the run in this folder to its end and return its line for the ledger: what every place executes."""
    config = from_json(saved)
    with locked(Path(path), wait=True):  # a sweep that was killed leaves runs that are saving their last checkpoint
        pass
    run(config, Path(path), resume=True)
    return entry_of(config, Path(path)).to_json()


@terminal.tolerant()
def execute(saved: dict[str, Any], path: str) -> ProgressReport:
    """In the process of the run: do the work with the output in its folder, and say how it ended."""
    try:
        write_output_to(Path(path))
        return "entry", work(saved, path)
    except (Stopped, KeyboardInterrupt):
        return "halted", None
    except Exception as error:  # whatever it is becomes a line of the ledger, with its name
        traceback.print_exc()
        return "crashed", in_a_line(error)


def outcome_of(report: ProgressReport) -> Outcome:
    """In the process of the sweep: what such a report means."""
    kind, content = report
    if kind == "entry":
        return entry_from_json(content)
    return Crashed(content) if kind == "crashed" else Halted()


def in_a_line(error: BaseException) -> str:
    """The type of an error and the first line of what it says."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def write_output_to(folder: Path) -> None:
    """Everything that is printed goes to a file beside the run's metrics."""
    folder.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    with (folder / LOG).open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
