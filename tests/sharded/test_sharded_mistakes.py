"""Mistakes with sharded models trigger an error or a warning; unusual but valid uses work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from crew import Crew
from quacklr import LogitMonitor, Paper, QuacK, spectral
from quacklr.lab.model import MHA, Decoder, Shape, build

dcp: Any = checkpoint
SHAPE = Shape(d_model=32, layers=2, d_ff=48, context=12, vocab=50, init_std=0.3)
GQA = MHA(heads=4, kv_heads=2, head_dim=8)


def tokens() -> Tensor:
    return torch.randint(0, 50, (3, 12), generator=torch.Generator().manual_seed(0))


def sharded(model: Decoder) -> Decoder:
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for _ in range(steps):
        model(tokens(), tokens()).backward()
        optimizer.step()
        optimizer.zero_grad()


def wrong_order(_: int) -> None:
    model = build(SHAPE, GQA, seed=0)
    optimizer = sgd(model)
    quack = QuacK(model, optimizer)
    sharded(model)
    with pytest.raises(
        RuntimeError, match=r"^blocks.0.attention.q: all parameters .* replaced .* load and shard first"
    ):
        train(model, optimizer)
    quack.remove()
    with pytest.raises(ValueError, match=r"attention.q: its parameter is sharded, and in none of the optimizers"):
        QuacK(model, optimizer)


def on_meta_device(_: int) -> None:
    with torch.device("meta"):
        model = sharded(Decoder(SHAPE, GQA))
    with pytest.raises(ValueError, match=r"blocks.0.attention.q: its parameter is on the meta device; attach after"):
        QuacK(model, sgd(model))


def one_data_rank(_: int) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    plan: dict[str, Any] = {name: ColwiseParallel() for name in "qkv"} | {"o": RowwiseParallel()}
    heads = nn.ModuleDict({name: nn.Linear(16, 16, bias=False) for name in plan})
    model = parallelize_module(heads, mesh["tensor"], plan)
    fully_shard(model, mesh=mesh["data"])
    with pytest.raises(ValueError, match="q.weight: its parameter is cut by tensor parallelism"):
        LogitMonitor(model, tokens())


@pytest.mark.parametrize("mistake", [wrong_order, on_meta_device, one_data_rank])
def test_a_mistake_is_an_error_that_says_what_to_do(mistake: Callable[[int], None], two: Crew) -> None:
    """Sharding after attaching, a model on the meta device, the monitor under tensor parallelism."""
    two(mistake)


def saved_by_torch(_: int, folder: Path, load: bool) -> dict[str, Tensor]:
    """As docs/scaling.md has it; the rates after three steps and two more, the two maybe in other processes."""
    model = build(SHAPE, GQA, seed=0)
    model = sharded(model) if torch.distributed.is_initialized() else model
    optimizer = sgd(model)
    with QuacK(model, optimizer, rule=Paper(norm=spectral)) as quack:

        def state() -> dict[str, Any]:
            weights, moments = get_state_dict(model, optimizer)
            return {"model": weights, "optimizer": moments, "quack": quack.state_dict()}

        if load:
            saved = state()
            dcp.load(saved, checkpoint_id=folder)
            set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
            quack.load_state_dict(saved["quack"])
        else:
            train(model, optimizer, 3)
            dcp.save(state(), checkpoint_id=folder)
        train(model, optimizer, 2)
        return quack.rates()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_checkpoint_takes_the_state_along_to_any_number_of_processes(
    two: Crew, four: Crew, tmp_path: Path
) -> None:
    wanted, *_ = four(saved_by_torch, tmp_path, False)
    assert max(float((rate - 1).abs().max()) for rate in wanted.values()) > 0.05
    for found in (*two(saved_by_torch, tmp_path, True), saved_by_torch(0, tmp_path, True)):
        for name, rate in wanted.items():
            torch.testing.assert_close(found[name], rate, rtol=1e-4, atol=1e-5)
