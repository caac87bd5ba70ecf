"""A run that was killed and resumed is bitwise the run that was not: every method, both attentions, real processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from lab_runs import PAIRS, environment, make_corpus, quacklr, read_rows
from paused import decode_step, pause, wait_until_paused
from quacklr.lab.train.checkpoint import checkpoints


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs")
    script = [sys.executable, str(Path(__file__).parents[1] / "kit/forked_runs.py"), str(make_corpus(out)), str(out)]
    done = subprocess.run(script, capture_output=True, text=True, check=False, env=environment())
    assert done.returncode == 0, done.stderr
    return out


def state_in(checkpoint: Path, out: Path) -> list[Any]:
    """All that is in a checkpoint, read by torch's own converter."""
    dcp_to_torch_save(checkpoint, out)
    return [torch.load(out, weights_only=True), torch.load(checkpoint / "rest.pt", weights_only=True)["state"]]


def tensors(state: Any) -> Iterator[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict | list | tuple):
        for part in state.values() if isinstance(state, dict) else state:
            yield from tensors(part)


@pytest.mark.parametrize(("attention", "method"), PAIRS)
def test_killed_and_resumed_is_bitwise_the_whole_run(runs: Path, attention: str, method: str, tmp_path: Path) -> None:
    whole, killed = (runs / way / f"{attention}-{method}" for way in ("whole", "killed"))
    assert [row["step"] for row in read_rows(killed)] == list(range(19))
    assert read_rows(killed) == read_rows(whole)
    states = [state_in(checkpoints(run / "checkpoints")[-1], tmp_path / "state.pt") for run in (whole, killed)]
    assert states[0][1]["step"] == 18
    assert states[0][0].keys() == states[1][0].keys()
    compared = list(zip(*(tensors(state) for state in states), strict=True))
    assert len(compared) > 30
    assert all(torch.equal(one, other) for one, other in compared)


def test_the_command_killed_and_resumed_ends_as_the_command_left_alone(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path)
    options = (
        f"--corpus {corpus} --d-model 16 --layers 1 --d-ff 24 --context 16 --batch-tokens 128 --heads 2 --head-dim 8"
    )
    options += " --kv-heads 2 --steps 40 --warmup 4 --checkpoint-every 10 --method quack --tau 0.5 --threads 1"
    command = [sys.executable, "-m", "quacklr", "train", *options.split(), "--out", str(tmp_path / "killed")]
    pause(tmp_path / "killed", 15)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        wait_until_paused(tmp_path / "killed", process.poll)
        process.kill()
    decode_step(tmp_path / "killed")
    resumed = quacklr("train", "--resume", tmp_path / "killed", env=environment())
    assert resumed.returncode == 0, resumed.stderr
    assert "from step 10 on" in resumed.stdout
    whole = quacklr("train", *options.split(), "--out", tmp_path / "whole", env=environment())
    assert whole.returncode == 0, whole.stderr
    assert read_rows(tmp_path / "killed") == read_rows(tmp_path / "whole")
    assert (tmp_path / "killed/result.json").read_text() == (tmp_path / "whole/result.json").read_text()
