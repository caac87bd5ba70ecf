"""Executor on a Ray cluster: one task per run, in its own process, on any node with free resources.

The folders of the runs and the corpus must be on a shared file system, under the same paths on all nodes: if a worker
or node dies, Ray retries the run, possibly on another node, and it continues from its last checkpoint.
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
from quacklr.lab.errors import UserError, one_line
from quacklr.lab.sweep.executor import Crashed, EndReport, Halted, Lost, Outcome, execute, outcome_of

RETRIES = 2
"""Number of retries by Ray of a run whose worker died, before it counts as lost."""
STOP_TIMEOUT = 300.0
"""Seconds that a stopped run has for saving its checkpoint."""
STARTS = 5
"""Number of attempts to start Ray: its own time limit of 30 seconds is too short on a busy machine."""


class Ray:
    """Executes runs on the cluster of RAY_ADDRESS or of `ray start`; without a cluster, on this machine.

    `jobs` runs are submitted at once. Ray executes as many as have `threads` CPUs each, and a GPU each if the cluster
    has GPUs.
    """

    pause = 0.2

    def __init__(self, jobs: int, threads: int, retries: int = RETRIES) -> None:
        self.slots, self.threads, self.retries = jobs, threads, retries
        self._ours = not ray.is_initialized()
        if self._ours:
            _connect()
        self._gpus = ray.cluster_resources().get("GPU", 0) > 0
        most = max(node["Resources"].get("CPU", 0) for node in ray.nodes())
        if 0 < most < threads:  # 0: an autoscaling cluster without nodes yet
            self.close()
            raise UserError(f"--threads {threads}: no node of the Ray cluster has more than {most:g} CPUs")

    def start(self, config: Config, path: Path) -> RayJob:
        """Submit a task; it waits for free resources."""
        config = replace(config, machine=replace(config.machine, threads=self.threads))
        device = config.machine.device
        on_gpu = device.startswith("cuda") or (device == "auto" and self._gpus)
        task = _task.options(num_cpus=self.threads, num_gpus=int(on_gpu), max_retries=self.retries)
        return RayJob(task.remote(to_json(config), str(path.absolute()), str(Path.cwd())))

    def close(self) -> None:
        """Disconnect, unless the process was connected before. This ends a cluster that was started here."""
        if self._ours:
            ray.shutdown()


def _connect(starts: int = STARTS) -> None:
    named = os.environ.get("RAY_ADDRESS", "")
    try:
        ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # Ray has no exception type for a missing cluster or a failed start
        if starts > 1 and named in ("", "local") and "timed out" in str(error).lower():
            ray.shutdown()
            return _connect(starts - 1)
        raise UserError(f"cannot start or find Ray (RAY_ADDRESS is {named!r}): {one_line(error)}") from error


class RayJob:
    """A run as a Ray task."""

    def __init__(self, reference: ray.ObjectRef[EndReport]) -> None:
        self.reference = reference
        self._stopped: float | None = None

    def outcome(self) -> Outcome | None:
        """The outcome that the task returned, or the outcome for its error."""
        ready, _ = ray.wait([self.reference], timeout=0)
        if not ready:
            self._force_stop()
            return None
        try:
            return outcome_of(ray.get(self.reference))
        except TaskCancelledError:  # cancelled before it started
            return Halted()
        except RayTaskError as error:  # the task could not be loaded
            return Crashed(one_line(error.cause))
        except RayError as error:
            return Halted() if self._stopped is not None else Lost(one_line(error))

    def stop(self) -> None:
        """Send SIGINT through Ray: the run saves a checkpoint after its current step and ends."""
        self._stopped = time.monotonic()
        ray.cancel(self.reference, force=False)

    def _force_stop(self) -> None:
        """Kill the process after `STOP_TIMEOUT`: a KeyboardInterrupt can be lost, for example in an import callback."""
        if self._stopped is not None and time.monotonic() - self._stopped > STOP_TIMEOUT:
            ray.cancel(self.reference, force=True)


@ray.remote(max_calls=1)  # a new process for each run
def _task(saved: dict[str, Any], path: str, folder: str) -> EndReport:
    os.chdir(folder)  # the working folder of the sweep: the path of a corpus may be relative
    return execute(saved, path)
