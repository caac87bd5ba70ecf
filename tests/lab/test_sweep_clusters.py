"""Sweeps on a real Ray, and with submitit on this machine: the same entries, whatever befalls the runs."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
import submitit

from lab_runs import ATTENTIONS, METHODS, read_rows, small
from paused import decode_step, is_at_pause, pause
from quacklr.lab.config import Config, fingerprint
from quacklr.lab.errors import UserError
from quacklr.lab.ledger import Entry, Ledger, entry_of
from quacklr.lab.sweep import on_ray, on_slurm
from quacklr.lab.sweep.command import Sweep, executor_of
from quacklr.lab.sweep.executor import Executor, Halted, Job, Lost, Outcome, cores
from quacklr.lab.sweep.local import Local
from quacklr.lab.sweep.on_ray import Ray
from quacklr.lab.sweep.on_slurm import Slurm
from quacklr.lab.sweep.sweep import State, Task, sweep
from quacklr.lab.train.runner import run

STEPS, MIDDLE = 36, 10  # of a run; where something befalls it, with the last checkpoint at step 6
NEVER = 10**6  # as checkpoint_every: what is saved was saved because of a signal


@pytest.fixture(autouse=True)
def watchful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poll the jobs often, and do not wait for shared file systems."""
    places = ((place, "pause") for place in (Local, Ray, Slurm))
    for owner, wait in (*places, (on_slurm, "POLL_INTERVAL"), (on_slurm, "FILE_SYSTEM_DELAY")):
        monkeypatch.setattr(owner, wait, 0.02)


@pytest.fixture(scope="module")
def undisturbed(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The entry of the same run without a sweep."""
    config, path = configuration(corpus), tmp_path_factory.mktemp("alone") / "run"
    run(config, path)
    return {fingerprint(config): comparable(entry_of(config, path))}


@pytest.fixture(scope="module")
def started_ray() -> Iterator[Ray]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", "local")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        place = Ray(2, 1)
        yield place
        place.close()
        assert not ray.is_initialized()


@pytest.fixture
def slurm(tmp_path: Path) -> Slurm:
    """Submitit's jobs as processes of this machine."""
    return Slurm(tmp_path / "slurm", 2, 1, submitit.AutoExecutor(tmp_path / "slurm", cluster="local"))


@pytest.fixture(params=["started_ray", "slurm"])
def place(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


def configuration(corpus: Path, checkpoint_every: int = 6) -> Config:
    config = small(corpus, METHODS["quack"], ATTENTIONS["mha"], steps=STEPS)
    return replace(config, watch=replace(config.watch, checkpoint_every=checkpoint_every))


def comparable(entry: Entry) -> dict[str, Any]:
    """An entry without times and other fields that differ between equal runs."""
    saved = {name: value for name, value in entry.to_json().items() if name != "step_seconds"}
    saved["config"] = saved["config"] | {"watch": {**saved["config"]["watch"], "checkpoint_every": None}}
    return saved | {"environment": {**saved["environment"], "threads": None, "code": None}}  # a sweep adds the code


def starts(path: Path) -> list[int]:
    """At which steps the run was begun or resumed, from its log."""
    found = re.findall(r"in all, from (?:step (\d+) on|the beginning);", (path / "log.txt").read_text())
    return [int(step or 0) for step in found]


def process_in(path: Path) -> int:
    """The process that holds the lock of a run's folder."""
    number = (path / ".lock").stat().st_ino
    (held,) = (line.split() for line in Path("/proc/locks").read_text().splitlines() if f":{number} " in line)
    return int(held[4])


def in_the_middle(run: Path, act: Callable[[], None]) -> tuple[list[Task], Callable[[State], None]]:
    """A display for a sweep of one run that pauses in the middle; there it calls a function once."""
    pause(run, MIDDLE)
    done: list[Task] = []

    def show(state: State) -> None:
        if not done and state.running and is_at_pause(run):
            done.append(state.running[0])
            act()

    return done, show


def send(run: Path, signum: signal.Signals) -> None:
    """Send a signal to the process of a paused run; later attempts do not pause."""
    os.kill(process_in(run), signum)
    decode_step(run)


def waited_for(job: Job) -> Outcome:
    while (outcome := job.outcome()) is None:
        time.sleep(0.02)
    return outcome


def entries(ledger: Ledger) -> dict[str, dict[str, Any]]:
    return {key: comparable(entry) for key, entry in ledger.entries().items()}


def test_entries_are_the_same_wherever_they_were_made(
    corpus: Path, undisturbed: dict[str, dict[str, Any]], started_ray: Ray, slurm: Slurm, tmp_path: Path
) -> None:
    config = configuration(corpus)
    places: dict[str, Executor] = {"here": Local(1, 1), "ray": started_ray, "slurm": slurm}
    for name, each in places.items():
        ledger = Ledger(tmp_path / name / "ledger.jsonl", details=True)
        sweep([config], ledger, each, tmp_path / name)
        assert entries(ledger) == {fingerprint(config): undisturbed[fingerprint(config)]}
        assert starts(tmp_path / name / fingerprint(config)) == [0]


@pytest.mark.parametrize(
    ("on", "signum", "attempts"),
    [
        ("started_ray", signal.SIGKILL, 1),  # Ray itself executes it again
        ("slurm", signal.SIGKILL, 2),
        ("slurm", signal.SIGTERM, 2),  # its node is wanted by others
        ("slurm", signal.SIGUSR2, 1),  # its time is over; it queues itself again
    ],
)
def test_a_run_that_is_disturbed_goes_on_and_gives_the_same_entry(
    corpus: Path,
    undisturbed: dict[str, dict[str, Any]],
    tmp_path: Path,
    request: pytest.FixtureRequest,
    on: str,
    signum: signal.Signals,
    attempts: int,
) -> None:
    config = configuration(corpus, checkpoint_every=6 if signum == signal.SIGKILL else NEVER)
    path = tmp_path / fingerprint(config)
    disturbed, show = in_the_middle(path, lambda: send(path, signum))
    ledger = Ledger(tmp_path / "ledger.jsonl", details=True)
    sweep([config], ledger, request.getfixturevalue(on), tmp_path, show)
    assert entries(ledger) == {fingerprint(config): undisturbed[fingerprint(config)]}
    assert starts(path) == [0, 6 if signum == signal.SIGKILL else MIDDLE]
    assert disturbed[0].attempts == attempts


@pytest.mark.usefixtures("started_ray")
def test_a_worker_that_ray_gives_up_on_is_lost_and_started_again(
    corpus: Path, undisturbed: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    config, ledger = configuration(corpus), Ledger(tmp_path / "ledger.jsonl", details=True)
    path = tmp_path / fingerprint(config)
    disturbed, show = in_the_middle(path, lambda: send(path, signal.SIGKILL))
    second = Ray(1, 1, retries=0)
    sweep([config], ledger, second, tmp_path, show)
    second.close()
    assert ray.is_initialized(), "a place must not end the Ray that another has started"
    assert entries(ledger) == {fingerprint(config): undisturbed[fingerprint(config)]}
    assert disturbed[0].attempts == len(starts(path)) == 2


def test_a_stopped_sweep_leaves_a_checkpoint_and_goes_on_from_it(
    corpus: Path, undisturbed: dict[str, dict[str, Any]], place: Executor, tmp_path: Path
) -> None:
    config = configuration(corpus, checkpoint_every=NEVER if isinstance(place, Ray) else 6)
    ledger, path = Ledger(tmp_path / "ledger.jsonl", details=True), tmp_path / fingerprint(config)
    stopped, show = in_the_middle(path, lambda: signal.raise_signal(signal.SIGINT))
    state = sweep([config], ledger, place, tmp_path, show)
    assert (state.stopped, len(state.waiting), ledger.entries()) == (signal.SIGINT, 1, {})
    assert not (path / "result.json").exists()
    decode_step(path)
    sweep([config], ledger, place, tmp_path)
    assert entries(ledger) == {fingerprint(config): undisturbed[fingerprint(config)]}
    assert starts(path) == [0, MIDDLE]
    assert stopped[0].attempts == 1


def test_an_error_of_the_program_is_a_crashed_line_with_its_reason(
    corpus: Path, place: Executor, tmp_path: Path
) -> None:
    config, ledger = configuration(corpus), Ledger(tmp_path / "ledger.jsonl", details=True)
    (tmp_path / fingerprint(config)).mkdir()
    (tmp_path / fingerprint(config) / "result.json").write_text("[]")
    state = sweep([config], ledger, place, tmp_path)
    (entry,) = ledger.entries().values()
    assert entry.status == "crashed"
    assert re.fullmatch(r"UserError: .*result.json is damaged: .*", str(entry.reason))
    assert "Traceback" in (tmp_path / fingerprint(config) / "log.txt").read_text()
    assert [ended.key for ended in state.ended] == [fingerprint(config)]


@pytest.mark.usefixtures("started_ray")
def test_a_run_that_waits_for_room_is_stopped_too_and_so_is_one_that_does_not_listen(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first run has all CPUs and never reaches its first step; the stop timeout is 0."""
    monkeypatch.setattr(on_ray, "STOP_TIMEOUT", 0.0)
    config = small(corpus, METHODS["quack"], ATTENTIONS["mha"])
    pause(tmp_path / "first", 0, deaf=True)
    place = Ray(2, cores())
    jobs = [place.start(config, tmp_path / name) for name in ("first", "second")]
    while not read_rows(tmp_path / "first"):
        assert [job.outcome() for job in jobs] == [None, None]
        time.sleep(0.02)
    for job in jobs:
        job.stop()
    assert [waited_for(job) for job in jobs] == [Halted(), Halted()]
    assert len(read_rows(tmp_path / "first")) == 1
    assert not (tmp_path / "first/checkpoints").exists()
    assert not (tmp_path / "second").exists()


@pytest.mark.parametrize(
    ("named", "reason", "tries"),
    [
        ("local", "The current node timed out during startup.", on_ray.STARTS),
        ("", "Timed out waiting for a port", on_ray.STARTS),
        ("elsewhere:6379", "The connection timed out", 1),
        ("local", "no room in /dev/shm", 1),
    ],
)
def test_a_ray_that_is_slow_to_start_is_started_again_a_few_times(
    monkeypatch: pytest.MonkeyPatch, named: str, reason: str, tries: int
) -> None:
    """Its own limit is 30 seconds, and cannot be set."""
    started: list[int] = []

    def slow(**_: Any) -> None:
        started.append(1)
        raise RuntimeError(reason)

    monkeypatch.setenv("RAY_ADDRESS", named)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(ray, "init", slow)
    with pytest.raises(UserError, match=f"cannot start or find Ray .*: RuntimeError: {reason}"):
        Ray(1, 1)
    assert len(started) == tries


@pytest.mark.usefixtures("started_ray")
def test_more_threads_than_any_node_has_are_refused() -> None:
    with pytest.raises(UserError, match=f"--threads {cores() + 1}: no node of the Ray cluster has more than"):
        Ray(2, cores() + 1)


def test_without_slurm_a_sentence_says_where_to_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="no Slurm here .* start the sweep on a login node of the cluster"):
        executor_of(Sweep(("interventions",), runs=tmp_path, on="slurm"), 1)


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Slurm's commands, of which sbatch only takes what it gets, and jobs wait until they are cancelled."""
    programs = {
        "srun": "",
        "sbatch": f"grep -q closed $1 && echo invalid partition: closed >&2 && exit 1\n"
        f"cp $1 {tmp_path}/submitted; echo Submitted batch job 42",
        "sacct": f"echo 'JobID|State|NodeList'; echo \"42|$(cat {tmp_path}/state || echo PENDING)|\"",
        "scancel": f"echo $1 CANCELLED by 1000 > {tmp_path}/state",
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path / "submitted"


def test_a_job_asks_slurm_for_what_the_run_needs(corpus: Path, sbatch: Path, tmp_path: Path) -> None:
    given = Sweep(("interventions",), runs=tmp_path, on="slurm", threads=3, slurm=("partition=gpu", "time=600"))
    place, config = executor_of(given, 1), configuration(corpus)
    place.start(config, tmp_path / "run")
    asked = set(re.findall(r"#SBATCH --(\S+)", sbatch.read_text()))
    assert asked >= {"partition=gpu", "time=600", "cpus-per-task=3", "signal=USR2@90", "job-name=quacklr"}
    assert not any("gpus" in option for option in asked)
    place.start(replace(config, machine=replace(config.machine, device="cuda")), tmp_path / "run")
    assert "#SBATCH --gpus-per-node=1\n" in sbatch.read_text()


def test_a_job_that_waits_is_cancelled_and_one_that_is_gone_is_lost(corpus: Path, sbatch: Path, tmp_path: Path) -> None:
    place = Slurm(tmp_path, 1, 1)
    waiting, gone = (place.start(configuration(corpus), tmp_path / "run") for _ in range(2))
    assert waiting.outcome() is None
    waiting.stop()
    assert sbatch.with_name("state").read_text().startswith("42 ")
    assert waited_for(waiting) == Halted()
    assert waited_for(gone) == Lost("job 42 ended without a report, in state 42 CANCELLED by 1000")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"slurm": ("time=600",), "on": "here"}, "--slurm is about jobs of a Slurm cluster, so it needs --on slurm"),
        ({"slurm": ("partition",)}, "--slurm partition: it must be NAME=VALUE"),
        ({"slurm": ("nodes=2",)}, "--slurm nodes=2: it must be NAME=VALUE, with a name from account, "),
        ({"slurm": ("time=1:00:00",)}, "--slurm time=1:00:00: minutes are a whole number"),
        ({"slurm": ("partition=closed",)}, "Slurm refuses the job: .*invalid partition: closed; --slurm sets"),
    ],
)
@pytest.mark.usefixtures("sbatch")
def test_what_slurm_cannot_do_is_refused(corpus: Path, tmp_path: Path, options: dict[str, Any], sentence: str) -> None:
    given = replace(Sweep(("interventions",), runs=tmp_path, on="slurm"), **options)
    with pytest.raises(UserError, match=sentence):
        executor_of(given, 1).start(configuration(corpus), tmp_path / "run")
