"""Runs that take turns, a step each, in this process: for comparing their times and nothing else.

Whatever disturbs the machine then disturbs all of them alike. There are no checkpoints: such runs are short.
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
from quacklr.lab.sweep.ledger import entry_of
from quacklr.lab.sweep.place import Halted, Outcome, cores
from quacklr.lab.train.device import environment
from quacklr.lab.train.folder import Folder
from quacklr.lab.train.integrity import verify
from quacklr.lab.train.runner import conclude
from quacklr.lab.train.session import Session
from quacklr.lab.train.world import World


class Interleaved:
    """`slots` runs in this process."""

    pause = 0.0

    def __init__(self, slots: int, threads: int | None = None) -> None:
        self.slots, self.threads = slots, threads or cores()
        self._threads_before = torch.get_num_threads()

    def start(self, config: Config, path: Path) -> InterleavedJob:
        """Build the model; its first step is taken when it is asked for its outcome."""
        return InterleavedJob(config, replace(config, machine=replace(config.machine, threads=self.threads)), path)

    def close(self) -> None:
        """Torch gets back the threads that it had."""
        torch.set_num_threads(self._threads_before)


class InterleavedJob:
    """One run, a step further each time that it is asked for its outcome."""

    def __init__(self, config: Config, here: Config, path: Path) -> None:
        self.config, self.path, self.stopped = config, path, False
        self._rows = self._execute(here)

    def outcome(self) -> Outcome | None:
        """Take a step."""
        if self.stopped:
            return Halted()
        for _ in self._rows:
            return None
        return entry_of(self.config, self.path)

    def stop(self) -> None:
        """Take no further step."""
        self.stopped = True

    def _execute(self, here: Config) -> Iterator[None]:
        refuse_strangers(self.path)
        rmtree(self.path, ignore_errors=True)  # what an earlier attempt left cannot go on: there are no checkpoints
        corpus = open_corpus(here.training.corpus)
        verify(corpus, World(), resumed=False)
        session, folder = Session(here, corpus), Folder(self.path)
        folder.begin(session.config, environment(session.device) | {"corpus": corpus.fingerprint, "turns": True})
        for row in session.rows():
            folder.append(row)
            yield
        folder.end(conclude(folder.rows()))


def refuse_strangers(path: Path) -> None:
    """UserError if a folder has anything in it that no runs of this kind have left: it would be removed."""
    about = path / "environment.json"
    environment = read_json(about) if about.exists() else {}
    ours = isinstance(environment, dict) and environment.get("turns") is True
    if path.exists() and not ours and any(not each.name.startswith(".") for each in path.iterdir()):
        raise UserError(f"{path} holds something else than a run that took turns; give other --runs")
