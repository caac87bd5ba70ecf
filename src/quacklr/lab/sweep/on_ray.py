"""Runs on a Ray cluster: a task each, in a process of its own, on whichever node has room.

The folders of the runs, and the corpus, must be on a file system that all nodes share, at the same place: a run whose
worker or node dies is executed again by Ray, maybe elsewhere, and goes on from the last checkpoint in its folder.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError, TaskCancelledError

from quacklr.lab.config import Config, to_json
from quacklr.lab.errors import UserError
from quacklr.lab.sweep.place import Crashed, Halted, Lost, Outcome, ProgressReport, execute, in_a_line, outcome_of

RETRIES = 2
"""How often Ray itself executes a run again whose worker died, before that counts as lost."""
PATIENCE = 300.0
"""Seconds that a run has for its checkpoint when it is asked to stop."""
STARTS = 5
"""How often Ray is started before it is given up: its own limit of 30 seconds is too short for a busy machine."""


class Ray:
    """The cluster that RAY_ADDRESS names, or `ray start` started here; without one, this machine's cores.

    `jobs` is how many runs are handed to Ray at once; it executes as many of them as have `threads` CPUs, and a GPU
    each if the cluster has GPUs.
    """

    pause = 0.2

    def __init__(self, jobs: int, threads: int, retries: int = RETRIES) -> None:
        self.slots, self.threads, self.retries = jobs, threads, retries
        self._ours = not ray.is_initialized()
        if self._ours:
            _connect()
        self._gpus = ray.cluster_resources().get("GPU", 0) > 0
        most = max(node["Resources"].get("CPU", 0) for node in ray.nodes())
        if 0 < most < threads:  # with 0 the nodes are yet to come
            self.close()
            raise UserError(f"--threads {threads}: no node of the Ray cluster has more than {most:g} CPUs")

    def start(self, config: Config, path: Path) -> RayJob:
        """A task that waits until a node has room for it."""
        config = replace(config, machine=replace(config.machine, threads=self.threads))
        device = config.machine.device
        on_gpu = device.startswith("cuda") or (device == "auto" and self._gpus)
        task = _task.options(num_cpus=self.threads, num_gpus=int(on_gpu), max_retries=self.retries)
        return RayJob(task.remote(to_json(config), str(path.absolute()), str(Path.cwd())))

    def close(self) -> None:
        """Leave the cluster, which ends one that was started for this; but not if others had connected before."""
        if self._ours:
            ray.shutdown()


def _connect(starts: int = STARTS) -> None:
    named = os.environ.get("RAY_ADDRESS", "")
    try:
        ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # it has no type of its own for a cluster that is not there or does not start
        if starts > 1 and named in ("", "local") and "timed out" in str(error).lower():
            ray.shutdown()
            return _connect(starts - 1)
        raise UserError(f"cannot start or find Ray (RAY_ADDRESS is {named!r}): {in_a_line(error)}") from error


class RayJob:
    """One task."""

    def __init__(self, reference: ray.ObjectRef[ProgressReport]) -> None:
        self.reference = reference
        self._stopped: float | None = None

    def outcome(self) -> Outcome | None:
        """What the task returned, or why there is nothing to return."""
        ready, _ = ray.wait([self.reference], timeout=0)
        if not ready:
            self._insist()
            return None
        try:
            return outcome_of(ray.get(self.reference))
        except TaskCancelledError:  # before it had begun
            return Halted()
        except RayTaskError as error:  # it could not even be loaded
            return Crashed(in_a_line(error.cause))
        except RayError as error:
            return Halted() if self._stopped is not None else Lost(in_a_line(error))

    def stop(self) -> None:
        """Ray calls the task's handler of SIGINT: the run ends after the step it is in, and saves a checkpoint."""
        self._stopped = time.monotonic()
        ray.cancel(self.reference, force=False)

    def _insist(self) -> None:
        """End the process after `PATIENCE`: a KeyboardInterrupt can get lost, as in a callback of an import."""
        if self._stopped is not None and time.monotonic() - self._stopped > PATIENCE:
            ray.cancel(self.reference, force=True)


@ray.remote(max_calls=1)  # a process for each run: its memory, its threads, its GPU are its own
def _task(saved: dict[str, Any], path: str, folder: str) -> ProgressReport:
    os.chdir(folder)  # of the sweep: a corpus may be named from there
    return execute(saved, path)
