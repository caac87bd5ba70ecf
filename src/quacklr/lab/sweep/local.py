"""Executor on this machine: one process per run.

Processes are forked from a server that has only imported packages, so a run starts quickly. Each has its own session,
so Ctrl-C reaches only the sweep, which then stops the runs. If the sweep dies, each run detects it by a closed pipe,
saves a checkpoint and ends.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from quacklr.lab.config import Config, to_json
from quacklr.lab.sweep.executor import EndReport, Lost, Outcome, cores, execute, outcome_of

CONTEXT = multiprocessing.get_context("forkserver")
PRELOADED = ["torch._dynamo", "torch.distributed.checkpoint", "torch.utils.tensorboard"]  # every run would import them


class Local:
    """Executes `jobs` runs at once: by default one per GPU, or one per core without GPUs."""

    pause = 0.2

    def __init__(self, jobs: int | None = None, threads: int | None = None) -> None:
        self.gpus = visible_gpus()
        self.slots = jobs or len(self.gpus) or cores()
        self.threads = threads or max(1, cores() // self.slots)
        self._jobs: list[LocalJob] = []
        CONTEXT.set_forkserver_preload([__name__, *PRELOADED])

    def start(self, config: Config, path: Path) -> LocalJob:
        """Start a process with its share of the threads, on the GPU with the fewest runs."""
        self._jobs = [job for job in self._jobs if job.process.is_alive()]
        gpu = min(self.gpus, key=lambda one: sum(job.gpu == one for job in self._jobs), default=None)
        job = LocalJob(replace(config, machine=replace(config.machine, threads=self.threads)), path, gpu)
        self._jobs.append(job)
        return job

    def close(self) -> None:
        """Nothing to release: the fork server ends with this process."""


def visible_gpus() -> list[str]:
    """The available GPUs, as names for CUDA_VISIBLE_DEVICES."""
    if not torch.cuda.is_available():
        return []
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",") if given else [str(number) for number in range(torch.cuda.device_count())]


class LocalJob:
    """A run in a process."""

    def __init__(self, config: Config, path: Path, gpu: str | None) -> None:
        self.gpu = gpu
        self._report, theirs = CONTEXT.Pipe(duplex=False)
        alive, self._alive = CONTEXT.Pipe(duplex=False)  # is closed when this process ends
        arguments = (to_json(config), str(path), gpu, theirs, alive)
        self.process = CONTEXT.Process(target=_execute, args=arguments, daemon=False)
        self.process.start()
        theirs.close()
        alive.close()

    def outcome(self) -> Outcome | None:
        """The outcome that the process reported, or Lost if it died without a report."""
        ended = not self.process.is_alive()
        report = self._received()
        if report is None:
            return Lost(_death(self.process.exitcode)) if ended else None
        self.process.join()
        self._alive.close()
        return outcome_of(report)

    def _received(self) -> EndReport | None:
        try:
            return self._report.recv() if self._report.poll() else None
        except (EOFError, OSError):  # it died, possibly while sending the report
            return None

    def stop(self) -> None:
        """Send SIGTERM: the run saves a checkpoint after its current step and ends."""
        self.process.terminate()


def _death(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return f"its process was killed by {signal.Signals(-exitcode).name}"
    return f"its process ended with code {exitcode} and no report"


def _execute(saved: dict[str, Any], path: str, gpu: str | None, report: Connection, alive: Connection) -> None:
    """In the process of the run: execute it and send the report."""
    os.setsid()
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    threading.Thread(target=_stop_when_alone, args=(alive,), daemon=True).start()
    report.send(execute(saved, path))


def _stop_when_alone(alive: Connection) -> None:
    try:
        alive.recv()
    except (EOFError, OSError):
        os.kill(os.getpid(), signal.SIGTERM)
