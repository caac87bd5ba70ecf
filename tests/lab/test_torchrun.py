"""Runs under torchrun, real processes: killed, started again, stopped, and gone on with in another number of them."""

from __future__ import annotations

import math
import os
import re
import signal
import socket
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore

from crew import Crew
from lab_runs import ATTENTIONS, read_rows, small
from paused import MINUTES, decode_step, pause, wait_until_paused
from quacklr.lab.methods import Quack
from quacklr.lab.train import runner, storage, world
from quacklr.lab.train.checkpoint import Checkpoints, checkpoints
from quacklr.lab.train.command import main as train
from quacklr.lab.train.session import Session

MODEL = "--d-model 16 --layers 2 --d-ff 24 --context 16 --heads 2 --kv-heads 1 --head-dim 8 --batch-tokens 128"
RUN = f"{MODEL} --micro-batch 2 --lr 0.02 --steps 60 --warmup 4 --checkpoint-every 10 --method quack --threads 1"
KILL_AFTER = 25  # the last checkpoint is that of step 20


@pytest.fixture(scope="module")
def whole(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The rows of the run in one process that nobody disturbs."""
    out = tmp_path_factory.mktemp("whole") / "run"
    assert train(["--corpus", str(corpus), *RUN.split(), "--out", str(out)]) == 0
    return read_rows(out)


def torchrun(options: str, out: Path, *more: str | Path) -> subprocess.Popen[str]:
    """`quacklr train` in two processes with one output stream; it pauses in the middle."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *options.split(), "-m"]
    command += ["quacklr", "train", "--out", str(out), *map(str, more)]
    pause(out, KILL_AFTER)
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, **pipes, env=env, start_new_session=True)


def words_of(job: subprocess.Popen[str]) -> str:
    """The output of a job after it has ended; after a timeout the job is killed with all its processes."""
    try:
        return job.communicate(timeout=60 * MINUTES)[0]
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        raise AssertionError(f"it did not end: {job.communicate()[0]}") from None


def rank_of(pid: int) -> int | None:
    """Which rank of a run a process is."""
    try:
        said = dict(
            part.partition("=")[::2] for part in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in part
        )
    except OSError:
        return None
    return int(said["RANK"]) if "RANK" in said else None


def kill_in_the_middle(job: subprocess.Popen[str], out: Path, rank: int) -> None:
    wait_until_paused(out, job.poll)
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    (victim,) = [int(child) for child in children if rank_of(int(child)) == rank]
    os.kill(victim, signal.SIGKILL)
    decode_step(out)


def assert_same_curve(rows: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    """One row a step, no gap and none twice, and the losses of the run that nobody disturbed."""
    assert [row["step"] for row in rows] == [row["step"] for row in wanted]
    for row, other in zip(rows, wanted, strict=True):
        for name in ("loss", "val_loss", "grad_norm"):
            assert (name in row) == (name in other)
            assert name not in row or math.isclose(row[name], other[name], rel_tol=2e-3), (row["step"], name)


def test_a_killed_rank_ends_the_run_with_a_sentence_and_one_process_goes_on(
    corpus: Path, whole: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    job = torchrun("--standalone", out, "--corpus", corpus, *RUN.split(), "--parallel", "fsdp")
    kill_in_the_middle(job, out, rank=1)
    said = words_of(job)
    assert job.returncode != 0
    (last,) = re.findall(
        r"quacklr train: another process of this run has died or does not answer \(.{5,120}\), so the run ends; its "
        rf"last checkpoint is step-(\d+); go on with: torchrun --nproc-per-node 2 -m quacklr train --resume {out}\n",
        said,
    )
    assert int(last) == 20
    assert not (out / "result.json").exists()
    assert train(["--resume", str(out)]) == 0
    assert f"from step {int(last)} on" in capsys.readouterr().out
    assert_same_curve(read_rows(out), whole)


def test_torchrun_starts_a_run_again_from_its_checkpoint(
    corpus: Path, whole: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Also the leading process may die. Here torchrun's own store lives on, with the addresses of those that died."""
    out = tmp_path / "run"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = torchrun(f"--master-port {port} --max-restarts 1", out, "--corpus", corpus, *RUN.split())
    kill_in_the_middle(job, out, rank=0)
    said = words_of(job)
    assert job.returncode == 0, said
    assert "from step 20 on" in said
    assert said.count("Done: validation loss") == 1
    assert_same_curve(read_rows(out), whole)


def test_all_ranks_stop_at_the_same_step_and_one_process_goes_on(
    corpus: Path, whole: list[dict[str, Any]], tmp_path: Path
) -> None:
    out, options = tmp_path / "run", RUN.replace("--checkpoint-every 10", "--checkpoint-every 1000 --async-save")
    job = torchrun("--standalone", out, "--corpus", corpus, *options.split())
    wait_until_paused(out, job.poll)
    job.send_signal(signal.SIGTERM)
    said = words_of(job)
    decode_step(out)
    (step,) = re.findall(r"Stopped at step (\d+); go on with: torchrun --nproc-per-node 2 -m quacklr train", said)
    assert int(step) == KILL_AFTER
    assert [path.name for path in checkpoints(out / "checkpoints")] == [f"step-{int(step):07}"]
    assert train(["--resume", str(out)]) == 0
    assert_same_curve(read_rows(out), whole)


def test_a_folder_of_another_job_is_refused_also_when_torchrun_tries_again(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    options = ["--corpus", str(corpus), *RUN.replace("--steps 60", "--steps 5").split(), "--out", str(out)]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    assert train(options) == 0
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert train(options) == 0, "its own"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "b")
    capsys.readouterr()
    assert train(options) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in before} == before


def saved_and_killed(rank: int, folder: Path, step: int, dies: bool) -> None:
    """A save of all ranks, in which the second dies when it has written its part, before the others know."""
    write = storage.CheckpointWriter.write_data

    def write_and_die(*args: Any) -> None:
        write(*args)
        os.kill(os.getpid(), signal.SIGKILL)

    model = nn.Linear(3, 4)
    nn.init.constant_(model.weight, step)
    if dies and rank == 1:
        pytest.MonkeyPatch().setattr(storage.CheckpointWriter, "write_data", write_and_die)
    with Checkpoints(folder, "a-b", keep=2) as saves:
        saves.save(step, {f"model.{name}": value for name, value in model.state_dict().items()}, {"step": step})


def test_a_rank_that_dies_while_saving_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    crew = Crew(2)
    crew(saved_and_killed, tmp_path, 1, False)
    with pytest.raises(AssertionError):
        crew(saved_and_killed, tmp_path, 2, True)
    crew.stop()
    assert [path.name for path in checkpoints(tmp_path)] == ["step-0000001"]
    model = nn.Linear(3, 4)
    with Checkpoints(tmp_path, "a-b", keep=2) as saves:
        assert saves.load(checkpoints(tmp_path)[-1], model, [])["step"] == 1
        assert torch.equal(model.weight, torch.ones(4, 3))
        saves.save(3, {f"model.{name}": value for name, value in model.state_dict().items()}, {"step": 3})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-0000001", "step-0000003"]


def test_what_was_trained_is_gone_before_the_processes_part(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DDP holds the process group too. When it was the last to hold it, one run in ten never ended."""
    made: list[Any] = []
    left: list[Any] = []

    class Seen(Session):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(weakref.ref(self.trained))

    monkeypatch.setattr(runner, "Session", Seen)
    monkeypatch.setenv("WORLD_SIZE", "2")  # and so that they seem to come together, and part
    monkeypatch.setattr(world, "rendezvous", lambda _: iter([(HashStore(), 0, 2)]))
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: left.extend(each() for each in made))
    runner.run(small(corpus, Quack(), ATTENTIONS["mha"], steps=5), tmp_path / "run")
    assert left == [None]
