"""A small corpus and small configurations for the tests of the lab, and the command in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quacklr.lab.config import KINDS, Config, Machine, Training, Watch
from quacklr.lab.data.command import main as prepare
from quacklr.lab.methods import Method
from quacklr.lab.model import MHA, MLA, Decoder, Shape
from quacklr.lab.optim import Constant, MuonRecipe
from quacklr.lab.train.command import main

TIMING = ("tokens_per_second", "memory_gb")  # what differs from one run to the next
WORDS = [
    "the",
    "cat",
    "dog",
    "sat",
    "ran",
    "on",
    "under",
    "a",
    "mat",
    "tree",
    "and",
    "then",
    "it",
    "was",
    "quick",
    "red",
]


def make_corpus(folder: Path) -> Path:
    """A hundred small documents of made-up sentences, as bytes."""
    random = np.random.default_rng(0)
    texts = [" ".join(random.choice(WORDS, size=200)) for _ in range(150)]
    source = folder / "source.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert prepare([str(source), "--out", str(folder / "corpus"), "--val", "0.1", "--probe", "0.1"]) == 0
    return folder / "corpus"


def small(corpus: Path, method: Method, attention: MHA | MLA, **training: Any) -> Config:
    """A model of a few thousand parameters; 2 micro-batches a step."""
    return Config(
        shape=Shape(d_model=16, layers=2, d_ff=24, context=16),
        attention=attention,
        method=method,
        optimizer=MuonRecipe(lr=0.05, rest_lr=0.01),
        schedule=Constant(warmup=4),
        training=replace(Training(corpus=str(corpus), steps=36, batch_tokens=128, micro_batch=4), **training),
        machine=Machine(device="cpu", threads=1),
        watch=Watch(eval_every=12, eval_sequences=8, probe_every=5, probe_sequences=2, checkpoint_every=6),
    )


ATTENTIONS: dict[str, MHA | MLA] = {
    "mha": MHA(heads=2, kv_heads=1, head_dim=8),
    "mla": MLA(heads=2, nope_dim=8, rope_dim=4, v_head_dim=8, d_cq=8, d_ckv=8),
}
METHODS: dict[str, Method] = {name: kind() for name, kind in KINDS["method"].items()}
PAIRS = [(a, m) for a in ATTENTIONS for m in METHODS if (a, m) != ("mha", "absorbed-qk-norm")]


def block(model: Decoder, number: int = 0) -> Any:
    return model.blocks[number]


def comparable(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in TIMING}


def read_rows(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    lines = path.read_text().split("\n") if path.exists() else []
    return [comparable(json.loads(line)) for line in lines[:-1]]


def quacklr(*options: str | Path, cwd: Path | None = None, **settings: Any) -> subprocess.CompletedProcess[str]:
    """The command, in a process of its own."""
    command = [sys.executable, "-m", "quacklr", *(str(option) for option in options)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False, **settings)


def heed_ctrl_c() -> None:
    """For `preexec_fn`: a shell that runs the suite in the background makes its processes ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def environment(**more: str) -> dict[str, str]:
    return dict(os.environ) | {"PYTHONWARNINGS": "error"} | more


SIZES = {"d-model": 16, "layers": 1, "d-ff": 24, "context": 16, "heads": 2, "kv-heads": 2, "head-dim": 8}
OPTIONS = ["--batch-tokens=128", "--threads=1", *(f"--{name}={value}" for name, value in SIZES.items())]


def complaint(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    capsys.readouterr()
    assert main(options) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


def files(folder: Path) -> dict[str, bytes]:
    """What a run has written: all but its lock."""
    found = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}
