"""Runs interleaved step by step in this process, to compare their times.

Other load on the machine then affects all runs equally. These runs are short, so they have no checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from shutil import rmtree

import torch

from quacklr.lab.config import Config
from quacklr.lab.data import open_corpus
from quacklr.lab.errors import UserError
from quacklr.lab.files import read_json
from quacklr.lab.ledger import entry_of
from quacklr.lab.sweep.executor import Halted, Outcome, cores
from quacklr.lab.train.device import environment
from quacklr.lab.train.folder import Folder
from quacklr.lab.train.integrity import verify_corpus
from quacklr.lab.train.runner import result_of
from quacklr.lab.train.session import Session
from quacklr.lab.train.world import World


class Interleaved:
    """Executes `slots` runs in this process, one step of each in turn."""

    pause = 0.0

    def __init__(self, slots: int, threads: int | None = None) -> None:
        self.slots, self.threads = slots, threads or cores()
        self._threads_before = torch.get_num_threads()

    def start(self, config: Config, path: Path) -> InterleavedJob:
        """Create a job; each call of its `outcome` executes one step."""
        return InterleavedJob(config, replace(config, machine=replace(config.machine, threads=self.threads)), path)

    def close(self) -> None:
        """Restore torch's thread count."""
        torch.set_num_threads(self._threads_before)


class InterleavedJob:
    """One run; each call of `outcome` executes one step."""

    def __init__(self, config: Config, with_threads: Config, path: Path) -> None:
        self.config, self.path, self.stopped = config, path, False
        self._rows = self._execute(with_threads)

    def outcome(self) -> Outcome | None:
        """Execute a step."""
        if self.stopped:
            return Halted()
        for _ in self._rows:
            return None
        return entry_of(self.config, self.path)

    def stop(self) -> None:
        """Execute no further step."""
        self.stopped = True

    def _execute(self, config: Config) -> Iterator[None]:
        validate_removable(self.path)
        rmtree(self.path, ignore_errors=True)  # an earlier attempt cannot be resumed: it has no checkpoints
        corpus = open_corpus(config.training.corpus)
        verify_corpus(corpus, World(), resumed=False)
        session, folder = Session(config, corpus), Folder(self.path)
        folder.write_config(session.config, environment(session.device) | {"corpus": corpus.fingerprint, "turns": True})
        for row in session.rows():
            folder.append(row)
            yield
        folder.write_result(result_of(folder.rows()))


def validate_removable(path: Path) -> None:
    """Raise UserError if a folder, which would be removed, holds anything but an interleaved run."""
    about = path / "environment.json"
    environment = read_json(about) if about.exists() else {}
    interleaved = isinstance(environment, dict) and environment.get("turns") is True
    if path.exists() and not interleaved and any(not each.name.startswith(".") for each in path.iterdir()):
        raise UserError(f"{path} holds something other than an interleaved run; give other --runs")
