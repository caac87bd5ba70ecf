"""Runs on a Slurm cluster: a job each, submitted with submitit, whose files are in a folder beside the runs'.

All folders must be on a file system that the nodes share. What Slurm does to a job is a signal to the run:

    SIGTERM   scancel, or its node is wanted by others: it saves a checkpoint and ends; the sweep submits it again
    SIGUSR2   its time is nearly over: it saves a checkpoint and queues itself again, whether the sweep lives or not
    SIGKILL   it goes on from its last checkpoint, when the sweep learns of it from sacct: in ten minutes at most
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import submitit
from submitit.core.utils import FailedJobError

from quacklr.lab.config import Config, to_json
from quacklr.lab.errors import UserError
from quacklr.lab.sweep.place import Crashed, Halted, Lost, Outcome, ProgressReport, execute, outcome_of

OPTIONS = ("account", "constraint", "exclude", "gpus_per_node", "gres", "mem", "nodelist", "partition", "qos", "time")
"""Those of sbatch that can be set; time is in minutes."""
MINUTES = 12 * 60
"""Of a job, unless given; a run that takes longer queues itself again."""
LAG = 15.0
"""Seconds after which a file that another node has written is seen here."""
ASK = 5.0
"""Seconds between two calls of sacct when a job was asked to stop."""


class Slurm:
    """Runs as jobs of a Slurm cluster, `jobs` of them submitted at once, with `threads` CPUs each.

    A run for cuda gets a GPU, and so does one in bf16 that takes whatever is there, unless the options speak of GPUs.
    """

    pause = 0.2

    def __init__(
        self,
        folder: Path,
        jobs: int,
        threads: int,
        executor: submitit.Executor | None = None,
        options: Sequence[str] = (),
    ) -> None:
        self.slots, self.threads = jobs, threads
        given = parameters(options)
        self._asks_for_gpus = bool(given.keys() & {"slurm_gpus_per_node", "slurm_gres"})
        self.executor = executor or _cluster(folder)
        self.executor.update_parameters(name="quacklr", timeout_min=MINUTES, cpus_per_task=threads, **given)

    def start(self, config: Config, path: Path) -> SlurmJob:
        """Submit a job; UserError if Slurm refuses it."""
        machine = replace(config.machine, threads=self.threads)
        on_gpu = machine.device.startswith("cuda") or (machine.device == "auto" and machine.precision == "bf16")
        if on_gpu and not self._asks_for_gpus:
            self.executor.update_parameters(gpus_per_node=1)
        try:
            job = self.executor.submit(Work(), to_json(replace(config, machine=machine)), str(path.absolute()))
        except FailedJobError as error:
            reason = str(error).strip().splitlines()[-1]
            raise UserError(f"Slurm refuses the job: {reason}; --slurm sets partition, account and others") from error
        return SlurmJob(job)

    def close(self) -> None:
        """Nothing is held: jobs are Slurm's."""


def parameters(options: Sequence[str]) -> dict[str, Any]:
    """Options such as partition=gpu, as submitit wants them; UserError for one that is not of that kind."""
    found: dict[str, Any] = {}
    for option in options:
        name, _, value = option.partition("=")
        name = name.replace("-", "_")
        if name not in OPTIONS or not value:
            raise UserError(f"--slurm {option}: it must be NAME=VALUE, with a name from {', '.join(OPTIONS)}")
        if name in ("time", "gpus_per_node") and not value.isdecimal():
            raise UserError(f"--slurm {option}: {'minutes' if name == 'time' else 'GPUs'} are a whole number")
        found[f"slurm_{name}"] = int(value) if name in ("time", "gpus_per_node") else value
    return found


def _cluster(folder: Path) -> submitit.Executor:
    try:
        return submitit.AutoExecutor(folder, cluster="slurm", slurm_max_num_timeout=100)
    except RuntimeError as error:
        raise UserError(
            "--on slurm: there is no Slurm here (no srun on the PATH); start the sweep on a login node of the cluster, "
            "or leave --on out"
        ) from error


class SlurmJob:
    """One job."""

    def __init__(self, job: submitit.Job[ProgressReport]) -> None:
        self.job = job
        self._ended: float | None = None
        self._asked = -ASK
        self._stopped = False

    def outcome(self) -> Outcome | None:
        """What the job reported, or that it ended without a report."""
        if not self._done():
            return None
        if self.job.paths.result_pickle.exists():
            return self._reported()
        self._ended = self._ended or time.monotonic()
        if time.monotonic() - self._ended < LAG:
            return None
        state = f"job {self.job.job_id} ended without a report, in state {self.job.state}"
        return Halted() if self._stopped else Lost(state)

    def _done(self) -> bool:
        """Submitit asks Slurm ever more rarely, which is too rare when we wait for a job to stop."""
        force = self._stopped and time.monotonic() - self._asked >= ASK
        if force:
            self._asked = time.monotonic()
        return self.job.done(force_check=force)

    def _reported(self) -> Outcome:
        try:
            return outcome_of(self.job.result())
        except FailedJobError as error:  # it could not even be loaded: the traceback stands between two lines
            return Crashed(str(error).split("-" * 22)[1].strip().splitlines()[-1])

    def stop(self) -> None:
        """Scancel: a job that waits is gone; one that runs gets SIGTERM, and half a minute for its checkpoint."""
        self._stopped = True
        self.job.cancel(check=False)


class Work:
    """What a job executes."""

    def __call__(self, saved: dict[str, Any], path: str) -> ProgressReport:
        """Do the work; when the job's time is nearly over, save a checkpoint and have it queued again."""
        if submitit.JobEnvironment().paths.result_pickle.exists():
            return "halted", None  # Slurm queued it again when it took the node; the sweep has submitted another job
        requeue: Any = signal.getsignal(signal.SIGUSR2)
        ending = []

        def save(signum: int, _: FrameType | None) -> None:
            ending.append(signum)
            signal.raise_signal(signal.SIGINT)

        signal.signal(signal.SIGUSR2, save)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        report = execute(saved, path)
        if ending and report == ("halted", None):
            requeue(signal.SIGUSR2, None)  # does not return
        return report

    def checkpoint(self, saved: dict[str, Any], path: str) -> submitit.helpers.DelayedSubmission:
        """What is queued again: the same."""
        return submitit.helpers.DelayedSubmission(self, saved, path)
