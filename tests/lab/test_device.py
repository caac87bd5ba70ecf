"""The device of a run: its FLOPs utilization, devices that cannot be used, and memory that cannot be allocated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lab_runs import ATTENTIONS, OPTIONS, complaint, small
from quacklr.lab.config import Machine
from quacklr.lab.data import open_corpus
from quacklr.lab.errors import UserError
from quacklr.lab.methods import Default
from quacklr.lab.train import command, session
from quacklr.lab.train.device import device_of, mfu
from quacklr.lab.train.world import World


def test_utilization_is_the_flops_of_a_token_over_those_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token has 6 FLOPs per parameter; and in each layer it attends to half of the context on average, with 6 FLOPs
    per element of a query or value: products of 2, in the forward pass and twice in the backward pass."""
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100-SXM4-80GB")
    layers, heads, query_and_value, context = 2, 2, 8 + 8, 16
    by_hand = 6 * 5000 + 6 * layers * heads * query_and_value * context / 2
    assert mfu(5000, small(Path(), Default(), ATTENTIONS["mha"]), 1e9, cuda) == pytest.approx(by_hand * 1e9 / 312e12)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU of another name")
    assert mfu(5000, small(Path(), Default(), ATTENTIONS["mha"]), 1e9, cuda) is None
    assert mfu(5000, small(Path(), Default(), ATTENTIONS["mha"]), 1e9, torch.device("cpu")) is None


def test_several_processes_do_not_share_a_gpu_that_was_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="^--device cuda:1 would give all processes the same GPU; --device cuda gives"):
        device_of(Machine(device="cuda:1"))


@pytest.mark.parametrize("allocate", [lambda: torch.empty(2**59), lambda: np.empty(2**59)], ids=["torch", "numpy"])
def test_memory_that_cannot_be_allocated_is_a_sentence(
    allocate: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "run", lambda *_, **__: allocate())
    said = complaint(capsys, *OPTIONS, "--out", str(tmp_path / "run"))
    assert said.startswith("quacklr train: out of memory (")
    assert said.endswith("a smaller model, --micro-batch or --context needs less; it has no checkpoint yet\n")


def test_the_command_to_resume_starts_as_many_processes_as_there_were(monkeypatch: pytest.MonkeyPatch) -> None:
    assert command.resume_command(Path("a run")) == "quacklr train --resume 'a run'"
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert command.resume_command(Path("run")) == "torchrun --nproc-per-node 4 -m quacklr train --resume run"


def test_the_utilization_is_that_of_one_gpu_of_several(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "mfu", lambda *arguments: arguments[2] / 1000)
    made = session.Session(small(corpus, Default(), ATTENTIONS["mha"]), open_corpus(str(corpus)))
    made.world = World(rank=1, size=4)
    row = made._speed(seconds=2.0)
    assert (row["tokens"], row["tokens_per_second"], row["mfu"]) == (128, 64.0, 64 / 4 / 1000)
