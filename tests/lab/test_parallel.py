"""One run in several processes: the same losses as in one, for every method, with whole models or shards of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from crew import Crew
from lab_runs import ATTENTIONS, METHODS, PAIRS, comparable, small
from models import assert_equal
from quacklr.lab.config import Config
from quacklr.lab.data import open_corpus
from quacklr.lab.errors import UserError
from quacklr.lab.train import parallel
from quacklr.lab.train.command import main
from quacklr.lab.train.runner import run
from quacklr.lab.train.session import Session

STEPS = 6
WHOLE_MATRICES = ("compositional-muon", "bounded-step")
"""Methods that are refused with --parallel fsdp."""
Rows = list[dict[str, Any]]


def asked(corpus: Path, method: str, attention: str, **machine: Any) -> Config:
    """Two forward passes per step in two processes, four in one; one for Sigma-Reparam, which each pass changes."""
    micro_batch = 2 if method != "sigma-reparam" else 4 if "parallel" in machine else 8
    config = small(corpus, METHODS[method], ATTENTIONS[attention], steps=STEPS, micro_batch=micro_batch)
    watch = replace(config.watch, probe_every=3, eval_every=3, eval_sequences=5)  # two processes, three parts
    return replace(config, machine=replace(config.machine, **machine), watch=watch)


def trained(_: int, config: Config) -> Rows:
    session = Session(config, open_corpus(config.training.corpus))
    return [comparable(row) for row in session.rows()]


@cache
def trained_alone(corpus: Path, method: str, attention: str) -> Rows:
    """The rows of one process, which several tests compare with."""
    return trained(0, asked(corpus, method, attention))


def assert_same_numbers(found: Any, wanted: Any, rtol: float, where: str = "") -> None:
    assert type(found) is type(wanted), where
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), where
        for key in wanted:
            assert_same_numbers(found[key], wanted[key], rtol, f"{where}.{key}")
    elif isinstance(wanted, list):
        assert len(found) == len(wanted), where
        for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
            assert_same_numbers(one, other, rtol, f"{where}[{number}]")
    elif isinstance(wanted, float):
        assert math.isclose(found, wanted, rel_tol=rtol, abs_tol=rtol), f"{where}: {found} and {wanted}"
    else:
        assert found == wanted, where


@pytest.mark.parametrize(
    ("attention", "method", "kind"),
    [(*p, "fsdp") for p in PAIRS if p[1] not in WHOLE_MATRICES] + [(*p, "ddp") for p in PAIRS if p[0] == "mla"],
)
def test_two_processes_train_as_one_does(method: str, attention: str, kind: str, corpus: Path, two: Crew) -> None:
    """Losses, gradient norms, validation, logits of every head, norms and rates of every weight."""
    alone = trained_alone(corpus, method, attention)
    assert alone[-1]["loss"] < alone[1]["loss"] - 0.1
    for rows in two(trained, asked(corpus, method, attention, parallel=kind)):
        assert_same_numbers(rows, alone, rtol=2e-3)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_what_is_recomputed_gives_the_same_gradients(kind: str, corpus: Path, two: Crew) -> None:
    for method in ("quack", "sigma-reparam"):
        alone = trained_alone(corpus, method, "mla")
        assert_same_numbers(trained(0, asked(corpus, method, "mla", recompute=True)), alone, rtol=1e-4)
        for rows in two(trained, asked(corpus, method, "mla", recompute=True, parallel=kind)):
            assert_same_numbers(rows, alone, rtol=2e-3)


def kept(_: int, config: Config) -> int:
    """How many numbers autograd keeps of a forward."""
    session = Session(config, open_corpus(config.training.corpus))
    numbers: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        numbers.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        session._loss(session.val_BT[:2])
    return sum(numbers)


def test_recomputing_keeps_less(corpus: Path) -> None:
    assert kept(0, asked(corpus, "quack", "mha", recompute=True)) < 0.6 * kept(0, asked(corpus, "quack", "mha"))


def gradients(_: int, config: Config) -> list[torch.Tensor | None]:
    """What this process has of a gradient after each micro-batch of a step."""
    session = Session(config, open_corpus(config.training.corpus))
    found: list[torch.Tensor | None] = []

    @contextmanager
    def watched(forward: nn.Module, last: bool) -> Iterator[None]:
        with parallel.micro_batch(forward, last):
            yield
        grad: Any = session.model.norm.weight.grad
        found.append(grad.full_tensor() if isinstance(grad, DTensor) else None if grad is None else grad.clone())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quacklr.lab.train.session.micro_batch", watched)
        session._update()
    return found


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_gradients_are_sent_once_a_step_after_its_last_micro_batch(kind: str, corpus: Path, two: Crew) -> None:
    (early, last), (other, same) = two(gradients, asked(corpus, "default", "mha", parallel=kind))
    assert_equal(last, same)
    if kind == "ddp":
        assert (early - other).abs().max() > 1e-6, "each has what its own rows say"
    else:
        assert early is None
        assert other is None, "there is no shard of it yet"


def precisions(_: int, config: Config) -> tuple[set[tuple[bool, torch.dtype, torch.dtype]], torch.dtype]:
    """Whether parameters are sharded, the dtypes of parameters and gradients, and the compute dtype of the blocks."""
    session = Session(config, open_corpus(config.training.corpus))
    inside: list[torch.dtype] = []
    session.model.blocks[0].register_forward_hook(lambda *args: inside.append(args[2].dtype))
    session._loss(session.val_BT[:2]).backward()
    grads = [(p, p.grad) for p in session.model.parameters()]
    return {(isinstance(p, DTensor), p.dtype, g.dtype) for p, g in grads if g is not None}, inside[0]


@pytest.mark.parametrize(("precision", "inside"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_under_fsdp_shards_and_gradients_are_in_full_precision(
    precision: str, inside: torch.dtype, corpus: Path, two: Crew
) -> None:
    for found in two(precisions, asked(corpus, "default", "mha", parallel="fsdp", precision=precision)):
        assert found == ({(True, torch.float32, torch.float32)}, inside)


@pytest.mark.parametrize(
    ("kind", "method"),
    [("ddp", "quack"), *(("fsdp", name) for name in ("quack", "qk-norm", "qk-clip", "sigma-reparam"))],
)
def test_half_precision_learns_as_well(kind: str, method: str, corpus: Path, two: Crew) -> None:
    alone = trained_alone(corpus, method, "mla")
    for rows in two(trained, asked(corpus, method, "mla", parallel=kind, precision="bf16")):
        assert rows[-1]["val_loss"] == pytest.approx(alone[-1]["val_loss"], rel=0.1)


def refused(_: int, config: Config, out: Path) -> str:
    with pytest.raises((UserError, SystemExit)) as refusal:
        run(config, out)
    return str(refusal.value)


def test_a_batch_that_cannot_be_shared_out_is_told_by_one_process_before_anything_is_written(
    corpus: Path, tmp_path: Path, four: Crew
) -> None:
    config = asked(corpus, "default", "mha")
    odd = replace(config, training=replace(config.training, batch_tokens=16 * 6, micro_batch=2))
    said, *others = four(refused, odd, tmp_path / "run")
    assert "the 6 sequences of a step cannot be divided equally among 4 processes; change --batch-tokens" in said
    assert others == ["2"] * 3
    assert not (tmp_path / "run").exists()


def test_wrong_options_are_told_by_the_leading_process_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, words in ((0, "--warmup 30 is longer than the run of 5 steps"), (1, "")):
        monkeypatch.setenv("RANK", str(rank))
        assert main(["--steps", "5"]) == 2
        assert words in (said := capsys.readouterr().err)
        assert bool(said) == bool(words)
