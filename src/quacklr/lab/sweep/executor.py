"""Interface of executors (this machine, Ray, Slurm, interleaved) and the code that every executor runs.

A ledger does not depend on the executor of its runs.
"""

from __future__ import annotations

import os
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from quacklr.lab.config import Config, from_json
from quacklr.lab.errors import one_line
from quacklr.lab.files import locked
from quacklr.lab.ledger import Entry, entry_from_json, entry_of
from quacklr.lab.train.runner import Stopped, run

LOG = "log.txt"
EndReport = tuple[str, Any]
"""How a run ended, in values that can be pickled: ("entry", its line), ("crashed", reason), ("halted", None)."""


@dataclass(frozen=True)
class Crashed:
    """The run raised an exception: a retry would fail again."""

    reason: str


@dataclass(frozen=True)
class Lost:
    """The process died (killed, out of memory, node lost): a retry continues from the last checkpoint."""

    reason: str


@dataclass(frozen=True)
class Halted:
    """The run was stopped; its checkpoint is saved."""


Outcome = Entry | Crashed | Lost | Halted


class Job(Protocol):
    """A started run."""

    def outcome(self) -> Outcome | None:
        """How the run ended, or None while it is running. Does not block."""

    def stop(self) -> None:
        """Request that the run saves a checkpoint and ends. Does not block."""


class Executor(Protocol):
    """Starts runs."""

    slots: int
    """Maximum number of jobs at the same time."""
    pause: float
    """Seconds between two polls of the jobs."""

    def start(self, config: Config, path: Path) -> Job:
        """Start or resume the run in this folder."""

    def close(self) -> None:
        """Release resources; called after all jobs have ended."""


def execute(saved: dict[str, Any], path: str) -> EndReport:
    """In the process of the run: start or resume it, with its output in log.txt, and return how it ended."""
    try:
        redirect_output(Path(path))
        config = from_json(saved)
        with locked(Path(path), wait=True):  # a run of a killed sweep may still be saving its last checkpoint
            pass
        run(config, Path(path), resume=True)
        return "entry", entry_of(config, Path(path)).to_json()
    except (Stopped, KeyboardInterrupt):
        return "halted", None
    except Exception as error:  # any error becomes an entry of the ledger
        traceback.print_exc()
        return "crashed", one_line(error)


def outcome_of(report: EndReport) -> Outcome:
    """In the process of the sweep: the outcome that a report describes."""
    kind, content = report
    if kind == "entry":
        return entry_from_json(content)
    return Crashed(content) if kind == "crashed" else Halted()


def redirect_output(folder: Path) -> None:
    """Redirect stdout and stderr of this process to log.txt in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    with (folder / LOG).open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
