"""Several ranks in real processes: statistics are reduced over all ranks, and replicas stay equal."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from crew import Crew
from quacklr import LogitMonitor, LogitPath, LogitStats, QKClip, QuacK, mha, packed
from quacklr.lab.model import MHA, Shape, build

SHAPE = Shape(d_model=32, layers=2, d_ff=48, context=12, vocab=50, init_std=0.4)
GQA = MHA(heads=4, kv_heads=2, head_dim=8)


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


def check_drift_error(_: int) -> None:
    plain = model_of("plain")
    with pytest.warns(UserWarning, match="neither DistributedDataParallel nor sharded, but there are several ranks"):
        QKClip(plain, torch.optim.SGD(plain.parameters(), lr=0.1))


class Unseen(nn.Module):
    """A softmax that is written out with exp."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        share = (self.q(x) @ self.k(x).mT).exp()
        return share / share.sum(-1, keepdim=True)

    def logit_paths(self) -> list[LogitPath]:
        return mha(*packed(self.q, ("q", 1, 8)), *packed(self.k, ("k", 1, 8)))


def check_unseen_error(_: int) -> None:
    model = DistributedDataParallel(Unseen())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    QKClip(model, optimizer)
    model(torch.randn(2, 5, 8)).square().mean().backward()
    with pytest.raises(RuntimeError, match="QK clip saw no attention logits"):
        optimizer.step()


class Sometimes(nn.Module):
    """Two decoders, of which the second may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = build(SHAPE, GQA, seed=0), build(SHAPE, GQA, seed=1)

    def forward(self, tokens: Tensor, both: bool) -> Tensor:
        logits: Tensor = self.first(tokens)
        return logits + self.second(tokens) if both else logits


def check_different_attentions_error(rank: int) -> None:
    """Ranks that record different attention modules all raise an error, instead of waiting for each other for ever."""
    monitor = LogitMonitor(DistributedDataParallel(Sometimes()), (batch(0), rank == 0))
    with pytest.raises(ValueError, match="the ranks ran different attentions"):
        monitor.measure()


def monitored_on(rank: int, kind: str) -> list[dict[str, LogitStats]]:
    return monitored(kind, [rank])


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_statistics_are_those_of_all_ranks_data(kind: str, two: Crew) -> None:
    alone = monitored("plain", [0, 1])
    for found in two(monitored_on, kind):
        for here, there in zip(found, alone, strict=True):
            assert list(here) == list(there)
            for name, stats in there.items():
                for field in ("max", "mean_change", "entropy", "sink"):
                    torch.testing.assert_close(
                        getattr(here[name], field), getattr(stats, field), equal_nan=True, rtol=1e-4, atol=1e-5
                    )


def attached_after_a_look(_: int) -> list[str]:
    """After a forward pass without backward, FSDP2 keeps unsharded parameters, which no optimizer steps."""
    model = model_of("plain")
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        model(batch(0))
    with QuacK(model, optimizer) as quack:
        return list(quack.rates())


def test_quack_attaches_to_shards_after_a_forward_that_left_them_unsharded(two: Crew) -> None:
    for names in two(attached_after_a_look):
        assert names == [f"blocks.{layer}.attention.{role}" for layer in (0, 1) for role in "qk"]


@pytest.mark.parametrize("check", [check_drift_error, check_unseen_error, check_different_attentions_error])
def test_ranks_that_would_differ_or_wait_for_each_other_are_an_error(check: Callable[[int], None], two: Crew) -> None:
    two(check)
