"""A small run to save and load, on one process or sharded over ranks: what the tests of checkpoints share."""

from __future__ import annotations

import json
import warnings
import zlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from models import assert_equal
from quacklr.lab.errors import UserError
from quacklr.lab.model import MHA, Shape, build
from quacklr.lab.optim import AdamWRecipe, optimizers
from quacklr.lab.train.checkpoint import Checkpoints, checkpoints
from quacklr.lab.train.tensors import named_tensors

SHAPE = Shape(d_model=16, layers=1, d_ff=24, context=8, vocab=50)  # 50 rows are no multiple of 4 ranks
NAME = "configuration-corpus"
REST = {"step": 2, "rng": torch.arange(5, dtype=torch.uint8)}
Trained = tuple[nn.Module, list[torch.optim.Optimizer]]


def trained(seed: int, steps: int) -> Trained:
    """A decoder, sharded if there are ranks, after some steps of AdamW."""
    model = build(SHAPE, MHA(heads=2, kv_heads=1, head_dim=8), seed)
    if dist.is_initialized():
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    stepped = optimizers(AdamWRecipe(), model)
    for step in range(steps):
        tokens = torch.randint(0, 50, (2, 8), generator=torch.Generator().manual_seed(step))
        model(tokens).square().mean().backward()
        stepped[0].step()
        stepped[0].zero_grad()
    return model, stepped


def whole_tensors(run: Trained) -> dict[str, Tensor]:
    """Gathered by torch."""
    return {name: getattr(each, "full_tensor", each.clone)() for name, each in named_tensors(*run).items()}


def save_trained(_: int, folder: Path, later: bool = False) -> dict[str, Tensor]:
    warnings.simplefilter("error")
    run = trained(seed=0, steps=2)
    before = whole_tensors(run)
    saves = Checkpoints(folder, NAME, keep=2)
    saves.save(2, named_tensors(*run), REST, later)
    if later:  # goes on, with collectives of its own
        for each in named_tensors(*run).values():
            each.zero_()
        for _ in range(20 if dist.is_initialized() else 0):
            dist.all_reduce(torch.ones(3))
    saves.wait()
    return before


def load_untrained(_: int, folder: Path) -> dict[str, Tensor]:
    warnings.simplefilter("error")
    run = trained(seed=1, steps=0)
    rest = Checkpoints(folder, NAME, keep=2).load(checkpoints(folder)[-1], *run)
    assert_equal(rest, REST)
    kinds = {type(each).__name__ for name, each in named_tensors(*run).items() if not name.endswith(".step")}
    assert kinds == {"DTensor" if dist.is_initialized() else "Tensor"}
    return whole_tensors(run)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def steps_in(folder: Path) -> list[str]:
    """Everything there, hidden or not."""
    return sorted(path.name for path in folder.iterdir())


def complaint(folder: Path, path: Path | None = None, name: str = NAME, run: Trained | None = None) -> str:
    """What is said when the last checkpoint is loaded; the run stays as it was."""
    run = run or trained(seed=1, steps=0)
    before = {name: each.clone() for name, each in run[0].state_dict().items()}
    with pytest.raises(UserError) as told:
        Checkpoints(folder, name, keep=2).load(path or checkpoints(folder)[-1], *run)
    assert_equal(dict(run[0].state_dict()), before)
    return str(told.value)


def resummed(path: Path) -> None:
    """Checksums that fit, made by hand."""
    files = [file for file in sorted(path.iterdir()) if file.name != "checksums.json"]
    lines = [(file.name, file.read_bytes()) for file in files]
    sums = [{"file": name, "bytes": len(each), "crc32": f"{zlib.crc32(each):08x}"} for name, each in lines]
    (path / "checksums.json").write_text(json.dumps(sums, indent=2))
