"""Several ranks, real processes: what each measures is put together, and replicas stay the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from models import assert_equal
from quacklr import LogitMonitor, LogitStats, QKClip
from quacklr.lab.model import MHA, Shape, build

SHAPE = Shape(d_model=32, layers=2, d_ff=48, context=12, vocab=50, init_std=0.4)
GQA = MHA(heads=4, kv_heads=2, head_dim=8)
RANKS = 2


def batch(seed: int) -> Tensor:
    return torch.randint(0, 50, (3, 12), generator=torch.Generator().manual_seed(seed))


def model_of(kind: str) -> nn.Module:
    model = build(SHAPE, GQA, seed=0)
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp":
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> None:
    optimizer.zero_grad()
    model(tokens).square().mean().backward()
    optimizer.step()


def monitored(kind: str, seeds: list[int], lr: float = 0.05) -> list[dict[str, LogitStats]]:
    """Statistics before and after two steps, measured also between backward and step."""
    model = model_of(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr)
    monitor = LogitMonitor(model, torch.cat([batch(seed) for seed in seeds]))
    found = [monitor.measure()]
    for _ in range(2):
        optimizer.zero_grad()
        model(batch(7)).square().mean().backward()
        monitor.measure(keep=False)
        optimizer.step()
    return [*found, monitor.measure()]


def clipped(kind: str, seeds: list[int]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Parameters after three clipped steps; ranks see different data, of which gradients are the mean."""
    model = model_of(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    clip = QKClip(model, optimizer, threshold=2.0)
    for i in range(3):
        step(model, optimizer, torch.cat([batch(10 * i + seed) for seed in seeds]))
    return [param.detach().clone() for param in model.parameters()], clip.max_logits()


def refuse_drift() -> None:
    plain, sharded = model_of("plain"), model_of("fsdp")
    with pytest.warns(UserWarning, match="not DistributedDataParallel, though there are several ranks"):
        QKClip(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"blocks\.0\.attention\.q: its parameter is sharded"):
        QKClip(sharded, torch.optim.SGD(sharded.parameters(), lr=0.1))


class Sometimes(nn.Module):
    """Two decoders, of which the second may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = build(SHAPE, GQA, seed=0), build(SHAPE, GQA, seed=1)

    def forward(self, tokens: Tensor, both: bool) -> Tensor:
        logits: Tensor = self.first(tokens)
        return logits + self.second(tokens) if both else logits


def refuse_to_wait(rank: int) -> None:
    """Ranks that hear different attentions all say so; they would wait for each other for ever."""
    monitor = LogitMonitor(DistributedDataParallel(Sometimes()), (batch(0), rank == 0))
    with pytest.raises(ValueError, match="the ranks heard different attentions"):
        monitor.measure()


def rank_main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    result = {"ddp": monitored("ddp", [rank]), "fsdp": monitored("fsdp", [rank]), "clip": clipped("ddp", [rank])}
    torch.save(result, f"{folder}/{rank}")
    refuse_drift()
    refuse_to_wait(rank)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What every rank has found; all in one start of the processes, which takes longer than the rest."""
    folder = tmp_path_factory.mktemp("ranks")
    spawn(rank_main, (str(folder),), nprocs=RANKS)
    return [torch.load(folder / str(rank), weights_only=False) for rank in range(RANKS)]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_statistics_are_those_of_all_ranks_data(kind: str, ranks: list[dict[str, Any]]) -> None:
    alone = monitored("plain", [0, 1])
    for found in ranks:
        for here, there in zip(found[kind], alone, strict=True):
            assert list(here) == list(there)
            for name, stats in there.items():
                for field in ("max", "mean_change", "entropy", "sink"):
                    torch.testing.assert_close(
                        getattr(here[name], field), getattr(stats, field), equal_nan=True, rtol=1e-4, atol=1e-5
                    )


def test_replicas_are_clipped_by_the_largest_logit_of_all_and_stay_the_same(ranks: list[dict[str, Any]]) -> None:
    (first, maxima), (second, _) = (found["clip"] for found in ranks)
    alone, expected = clipped("plain", [0, 1])
    for one, other, wanted in zip(first, second, alone, strict=True):
        assert_equal(one, other)
        torch.testing.assert_close(one, wanted, rtol=1e-4, atol=1e-5)
    for name, largest in expected.items():
        torch.testing.assert_close(maxima[name], largest, rtol=1e-4, atol=1e-5)
