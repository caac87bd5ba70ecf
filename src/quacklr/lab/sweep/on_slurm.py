"""Executor on a Slurm cluster: one job per run, submitted with submitit.

All folders must be on a shared file system. Slurm sends these signals to a job:

    SIGTERM   scancel or preemption: the run saves a checkpoint and ends; the sweep submits it again
    SIGUSR2   the time limit is near: the run saves a checkpoint and requeues itself, even if the sweep has ended
    SIGKILL   the sweep detects it by sacct within ten minutes, and resumes the run from its last checkpoint
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
from quacklr.lab.sweep.executor import Crashed, EndReport, Halted, Lost, Outcome, execute, outcome_of

OPTIONS = ("account", "constraint", "exclude", "gpus_per_node", "gres", "mem", "nodelist", "partition", "qos", "time")
"""Options of sbatch that can be set; time is in minutes."""
MINUTES = 12 * 60
"""Default time limit of a job; a longer run requeues itself."""
FILE_SYSTEM_DELAY = 15.0
"""Seconds until a file that another node has written is visible here."""
POLL_INTERVAL = 5.0
"""Seconds between two calls of sacct after a job was stopped."""


class Slurm:
    """Submits `jobs` runs at once, with `threads` CPUs each.

    A run with --device cuda gets a GPU, and so does a bf16 run with --device auto, unless --slurm requests GPUs.
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
        self._requests_gpus = bool(given.keys() & {"slurm_gpus_per_node", "slurm_gres"})
        self.executor = executor or _cluster(folder)
        self.executor.update_parameters(name="quacklr", timeout_min=MINUTES, cpus_per_task=threads, **given)

    def start(self, config: Config, path: Path) -> SlurmJob:
        """Submit a job; UserError if Slurm rejects it."""
        machine = replace(config.machine, threads=self.threads)
        on_gpu = machine.device.startswith("cuda") or (machine.device == "auto" and machine.precision == "bf16")
        if on_gpu and not self._requests_gpus:
            self.executor.update_parameters(gpus_per_node=1)
        try:
            job = self.executor.submit(SlurmTask(), to_json(replace(config, machine=machine)), str(path.absolute()))
        except FailedJobError as error:
            reason = str(error).strip().splitlines()[-1]
            raise UserError(f"Slurm refuses the job: {reason}; --slurm sets partition, account and others") from error
        return SlurmJob(job)

    def close(self) -> None:
        """Nothing to release."""


def parameters(options: Sequence[str]) -> dict[str, Any]:
    """Parse options such as partition=gpu into parameters of submitit."""
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
    """A run as a Slurm job."""

    def __init__(self, job: submitit.Job[EndReport]) -> None:
        self.job = job
        self._ended: float | None = None
        self._polled = -POLL_INTERVAL
        self._stopped = False

    def outcome(self) -> Outcome | None:
        """The outcome that the job reported; Halted or Lost if it ended without a report."""
        if not self._done():
            return None
        if self.job.paths.result_pickle.exists():
            return self._reported()
        self._ended = self._ended or time.monotonic()
        if time.monotonic() - self._ended < FILE_SYSTEM_DELAY:
            return None
        state = f"job {self.job.job_id} ended without a report, in state {self.job.state}"
        return Halted() if self._stopped else Lost(state)

    def _done(self) -> bool:
        """Whether the job has ended. submitit polls Slurm rarely, so after `stop` this forces a poll."""
        force = self._stopped and time.monotonic() - self._polled >= POLL_INTERVAL
        if force:
            self._polled = time.monotonic()
        return self.job.done(force_check=force)

    def _reported(self) -> Outcome:
        try:
            return outcome_of(self.job.result())
        except FailedJobError as error:  # the task could not be loaded; the message has the traceback between two lines
            return Crashed(str(error).split("-" * 22)[1].strip().splitlines()[-1])

    def stop(self) -> None:
        """Call scancel: a pending job is removed; a running one gets SIGTERM and 30 seconds for its checkpoint."""
        self._stopped = True
        self.job.cancel(check=False)


class SlurmTask:
    """The callable that a job executes."""

    def __call__(self, saved: dict[str, Any], path: str) -> EndReport:
        """Execute the run; near the time limit, save a checkpoint and requeue the job."""
        if submitit.JobEnvironment().paths.result_pickle.exists():
            return "halted", None  # preempted and requeued by Slurm, but the sweep has submitted another job
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
        """The call that submitit requeues: the same one."""
        return submitit.helpers.DelayedSubmission(self, saved, path)
