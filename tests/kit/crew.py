"""Ranks for tests: real processes on gloo that stay and do one task after another, since starting them takes seconds.

def task(rank: int, lr: float) -> float: ...        # at the top of a test file, so that the ranks can import it

def test_...(two: Crew) -> None:
    losses = two(task, 0.1)                         # what each rank returned, rank 0 first
"""

from __future__ import annotations

import multiprocessing
import pickle
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


class Crew:
    """`size` ranks. A task that fails in any of them fails the test, and the next one gets new ranks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._ranks: list[tuple[Any, Connection]] = []

    def __call__(self, task: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `task(rank, *args)` in every rank."""
        if not self._ranks:
            self._start()
        order = pickle.dumps((task, args))
        for _, pipe in self._ranks:
            pipe.send_bytes(order)
        answers: dict[int, Any] = {}
        while len(answers) < self.size:
            missing = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks) if rank not in answers}
            ready = wait(list(missing), timeout=SECONDS)
            if not ready:
                self.stop()
                raise AssertionError(f"{task.__name__}: no answer from the ranks {sorted(missing.values())}")
            for rank in [rank for pipe, rank in missing.items() if pipe in ready]:
                answers[rank], failure = pickle.loads(self._ranks[rank][1].recv_bytes())
                if failure:
                    self.stop()
                    raise AssertionError(f"{task.__name__} failed in rank {rank}:\n{failure}")
        return [answers[rank] for rank in range(self.size)]

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        store = Path(tempfile.mkdtemp()) / "store"
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=work, args=(rank, self.size, str(store), theirs), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def stop(self) -> None:
        """End the processes."""
        for process, pipe in self._ranks:
            pipe.close()
            process.kill()
            process.join()
        self._ranks.clear()


def work(rank: int, size: int, store: str, pipe: Connection) -> None:
    """The life of a rank."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")  # as pytest has it
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=SECONDS)
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
