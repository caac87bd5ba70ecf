"""Every Python block of docs/ runs. A block marked ```py is part of a program, and is not run."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import wandb
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from lab_runs import ATTENTIONS, small
from quacklr import LogitMonitor, QuacK
from quacklr.lab.methods import Default
from quacklr.lab.train.runner import run

ROOT = Path(__file__).parent.parent.parent
RUN_ELSEWHERE = ("attach.md", "check.md")  # tests/test_repository.py
BLOCKS = {
    f"{file.stem} {number}": block
    for file in sorted((ROOT / "docs").rglob("*.md"))
    if file.name not in RUN_ELSEWHERE
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", file.read_text(encoding="utf-8"), re.DOTALL))
}


def training() -> dict[str, Any]:
    """The names that blocks of monitor.md use: they continue a training."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    probe = torch.randn(2, 8, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {
        "model": model,
        "probe": probe,
        "batches": [probe],
        "optimizer": optimizer,
        "quack": QuacK(model, optimizer),
        "monitor": LogitMonitor(model, probe),
        "writer": SummaryWriter(str(Path("tensorboard").absolute())),
        "run": wandb.init(mode="disabled"),
        "step": 0,
    }


def test_there_are_some() -> None:
    assert {"resume 0", "lora 0", "watch 0", "inference 0", "monitor 2"} <= BLOCKS.keys()


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_runs(name: str, tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if name.startswith("inference"):
        config = small(corpus, Default(), ATTENTIONS["mha"], batch_tokens=512)
        run(replace(config, shape=replace(config.shape, context=64)), tmp_path / "runs/mine")
    names = training() if name.startswith("monitor") else {}
    exec(compile(BLOCKS[name], name, "exec"), {"__name__": "docs", **names})
    if "writer" in names:
        names["writer"].close()  # its thread writes to a folder that is gone after the test
