"""Ranks for tests: real processes on gloo that stay and do one task after another, since starting them takes seconds.

def task(rank: int, lr: float) -> float: ...        # at the top of a test file, so that the ranks can import it

def test_...(two: Crew) -> None:
    losses = two(task, 0.1)                         # what each rank returned, rank 0 first
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SECONDS = 600  # for a collective that not all ranks take part in, and for a task; only guards against hanging


CRASHES = {-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS}  # of code that is not Python's


class RankDiedError(AssertionError):
    """A rank ended without an answer."""

    def __init__(self, text: str, crashed: bool) -> None:
        super().__init__(text)
        self.crashed = crashed


class Crew:
    """`size` ranks. A task that fails in any of them fails the test, and the next one gets new ranks.

    A task whose rank crashed, as inside of gloo, is done once more with new ranks.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._ranks: list[tuple[Any, Connection]] = []
        self._folder = Path()

    def __call__(self, task: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `task(rank, *args)` in every rank."""
        try:
            return self._call(task, *args)
        except RankDiedError as death:
            if not death.crashed:
                raise
            print(f"{death}\nThe task is done once more.", file=sys.__stderr__, flush=True)
            return self._call(task, *args)

    def _call(self, task: Callable[..., Any], *args: Any) -> list[Any]:
        if not self._ranks:
            self._start()
        order = pickle.dumps((task, args))
        for rank, (_, pipe) in enumerate(self._ranks):
            try:
                pipe.send_bytes(order)
            except BrokenPipeError:
                raise self._died(rank, task) from None
        answers: dict[int, Any] = {}
        while len(answers) < self.size:
            missing = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks) if rank not in answers}
            ready = wait(list(missing), timeout=SECONDS)
            if not ready:
                self.stop()
                raise AssertionError(f"{task.__name__}: no answer from the ranks {sorted(missing.values())}")
            for rank in [rank for pipe, rank in missing.items() if pipe in ready]:
                try:
                    answers[rank], failure = pickle.loads(self._ranks[rank][1].recv_bytes())
                except EOFError:
                    raise self._died(rank, task) from None
                if failure:
                    self.stop()
                    raise AssertionError(f"{task.__name__} failed in rank {rank}:\n{failure}")
        return [answers[rank] for rank in range(self.size)]

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = Path(tempfile.mkdtemp())
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=work, args=(rank, self.size, self._folder, theirs), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def _died(self, rank: int, task: Callable[..., Any]) -> RankDiedError:
        """The error for a rank that ended without an answer, with what it wrote to stderr."""
        process = self._ranks[rank][0]
        process.join(SECONDS)
        stderr = (self._folder / f"stderr-{rank}").read_text(errors="replace")
        self.stop()
        text = f"{task.__name__}: rank {rank} died with exit code {process.exitcode}\n{stderr[-4000:]}"
        return RankDiedError(text, process.exitcode in CRASHES)

    def stop(self) -> None:
        """End the processes."""
        for process, pipe in self._ranks:
            pipe.close()
            process.kill()
            process.join()
        self._ranks.clear()


def work(rank: int, size: int, folder: Path, pipe: Connection) -> None:
    """The life of a rank."""
    torch.set_num_threads(1)
    os.dup2(os.open(folder / f"stderr-{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
    faulthandler.enable()
    warnings.simplefilter("error")  # as pytest has it
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=timedelta(seconds=SECONDS)
    )
    while True:
        try:
            task, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            answer = pickle.dumps((task(rank, *args), ""))
        except BaseException:
            answer = pickle.dumps((None, traceback.format_exc()))
        pipe.send_bytes(answer)
