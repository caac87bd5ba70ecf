"""Models that FSDP2, HSDP, tensor parallelism or both have sharded learn with the rates of one process.

Gradients are given; the ranks of QK clip and of the monitor see their own data.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import reference
from crew import Crew
from models import assert_equal
from quacklr import LogitMonitor, LogitStats, Paper, QKClip, QuacK, frobenius, spectral
from quacklr.core.norms import Norm
from quacklr.lab.model import MHA, MLA, Shape, build
from sharding import TAU, Run, assert_same_run, gradient, like, mesh_of, moved, spread, whole

SHAPE = Shape(d_model=32, layers=2, d_ff=48, context=12, vocab=50, init_std=0.4)
GQA = MHA(heads=4, kv_heads=2, head_dim=8)
LATENT = MLA(heads=3, nope_dim=6, rope_dim=2, v_head_dim=6, d_cq=10, d_ckv=7)
ROLES = ("dq", "dkv", "kr", "uq", "uk", "qr")


def plain(name: str) -> tuple[nn.Module, Tensor]:
    """A model, always the same, and a batch for it."""
    if name in ("mha", "mla"):
        return build(SHAPE, GQA if name == "mha" else LATENT, seed=0), tokens(1)
    from tiny_models import build as tiny

    return tiny(name)[0], tokens(1)


def tokens(seed: int) -> Tensor:
    return torch.randint(0, 50, (3, 12), generator=torch.Generator().manual_seed(seed))


def parallel(model: nn.Module) -> None:
    """Tensor parallelism: heads are sharded."""
    for module in model.modules():
        if hasattr(module, "q_proj"):
            plan: Any = {f"{role}_proj": RowwiseParallel() if role == "o" else ColwiseParallel() for role in "qkvo"}
            parallelize_module(module, mesh_of((2, 2))["tp"], plan)


def model_of(name: str, kind: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Tensor]:
    model, batch = plain(name)
    model = model.to(dtype)
    if kind == "ddp":
        return DistributedDataParallel(model), batch
    if "tp" in kind:
        parallel(model)
    if "sdp" in kind:
        mesh: Any = mesh_of((2, 2)) if kind != "fsdp" else None
        mesh = mesh["dp"] if "tp" in kind else mesh
        for block in next(module for module in model.modules() if isinstance(module, nn.ModuleList)):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, batch


def backward(model: nn.Module, batch: Tensor, step: int) -> None:
    """A real backward pass; its gradients are replaced by multiples of the weights of each head."""
    model.zero_grad()
    out: Any = model(batch)
    (out if isinstance(out, Tensor) else out.logits).square().mean().backward()
    for index, param in enumerate(model.parameters()):
        size = whole(param).std() if param.ndim > 1 else 0.1
        param.grad = like(gradient(param, step, index) * size, param)


def trained(_: int, name: str, kind: str, norm: Norm, optimizer_name: str) -> Run:
    """Three steps. In float64 where rounding grows: in one process's norms of columns."""
    model, batch = model_of(name, kind, torch.float64 if name == "gpt2" else torch.float32)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.3, foreach=False)
    if optimizer_name == "AdamW":
        lr = 0.3 if name == "mla" else 0.03  # some weights of the others begin smaller
        optimizer = torch.optim.AdamW(model.parameters(), lr, eps=1e-3, foreach=False)
    names = [name.removeprefix("module.") for name, _ in model.named_parameters()]
    rates, params, counts = [], [], []
    with QuacK(model, optimizer, rule=Paper(TAU, norm=norm), verify=False) as quack:
        state = quack.state_dict()
        for step in range(3):
            rates.append(quack.rates())
            backward(model, batch, step)
            with CommDebugMode() as comm:
                optimizer.step()
            counts.append(comm.get_total_counts())
            params.append({name: whole(param) for name, param in zip(names, model.parameters(), strict=True)})
        rates.append(quack.rates())
        rate_of = {name: quack.rate_of(param) for name, param in zip(names, model.parameters(), strict=True)}
    return Run(rates, params, rate_of, state, counts)


@pytest.mark.parametrize(
    ("name", "kind", "norm", "optimizer"),
    [
        *(("llama", kind, frobenius, "SGD") for kind in ("ddp", "fsdp", "hsdp", "tp", "tp x fsdp")),
        *((name, "fsdp", spectral, "AdamW") for name in ("mla", "gpt2")),
        ("llama", "tp x fsdp", spectral, "AdamW"),
    ],
)
def test_a_sharded_model_learns_as_in_one_process(name: str, kind: str, norm: Norm, optimizer: str, four: Crew) -> None:
    alone = trained(0, name, "plain", norm, optimizer)
    assert moved(alone) > 0.05
    assert max(map(spread, alone.rates)) > 0.02
    assert alone.collectives == [0, 0, 0]
    for found in four(trained, name, kind, norm, optimizer):
        assert_same_run(found, alone)
        most = 0 if kind == "ddp" else 1 if norm is frobenius else 2
        assert all(min(1, most) <= count <= most for count in found.collectives), "whatever the number of layers"


def by_hand(_: int) -> list[tuple[dict[str, Tensor], list[reference.Layer]]]:
    """Rates of real steps, and those of the paper's Algorithm 2 on the whole matrices."""
    model, batch = model_of("mla", "fsdp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    blocks: Any = model.blocks

    def whole_of(attention: Any, role: str) -> list[Any]:
        weight = whole(getattr(attention, role).weight)
        return (weight.unflatten(0, (3, -1)) if role in ("uq", "uk", "qr") else weight).tolist()

    def matrices() -> list[reference.Layer]:
        return [{role: whole_of(block.attention, role) for role in ROLES} for block in blocks]

    start, found = reference.mla_factors(matrices()), []
    with QuacK(model, optimizer, TAU) as quack:
        for step in range(3):
            found.append((quack.rates(), reference.mla_lrs(matrices(), start, TAU, 1.0)))
            backward(model, batch, step)
            optimizer.step()
    return found


def test_rates_of_a_sharded_mla_decoder_are_those_of_algorithm_2(four: Crew) -> None:
    for found in four(by_hand):
        assert spread(found[-1][0]) > 0.05
        for rates, layers in found:
            for i, layer in enumerate(layers):
                for role, lr in layer.items():
                    rate = rates[f"blocks.{i}.attention.{role}"]
                    torch.testing.assert_close(rate, torch.tensor(lr).reshape(-1), rtol=1e-6, atol=0)


Clipped = tuple[dict[str, Tensor], dict[str, Tensor], list[int]]


def clipped(rank: int, name: str, kind: str, threshold: float) -> Clipped:
    """Parameters after three steps, the last largest logits, and collectives; a rank below 0 sees all ranks' data."""
    model, _ = model_of(name, kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with QKClip(model, optimizer, threshold) as clip:
        counts = []
        for step in range(3):
            data = [tokens(10 * step + seed) for seed in (range(4) if rank < 0 else [rank])]
            optimizer.zero_grad()
            model(torch.cat(data)).square().mean().backward()
            with CommDebugMode() as comm:
                optimizer.step()
            counts.append(comm.get_total_counts())
        params = {name.removeprefix("module."): whole(param) for name, param in model.named_parameters()}
        return params, clip.max_logits(), counts


@pytest.mark.parametrize(("name", "kind", "count"), [("mha", "ddp", 1), ("mla", "fsdp", 1), ("mha", "hsdp", 2)])
def test_ranks_are_clipped_by_the_largest_logit_of_all_and_stay_the_same(
    name: str, kind: str, count: int, four: Crew
) -> None:
    wanted, largest, _ = clipped(-1, name, "plain", 2.0)
    free, _, _ = clipped(-1, name, "plain", 1e6)
    assert max(float((wanted[key] - free[key]).abs().max()) for key in wanted) > 0.01
    (first, *_), *_ = by_rank = four(clipped, name, kind, 2.0)
    for found, heard, counts in by_rank:
        assert counts == [count] * 3
        assert_equal(found, first)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(heard, largest, rtol=1e-4, atol=1e-5)


def monitored(rank: int, kind: str) -> list[dict[str, LogitStats]]:
    """Statistics before and after two steps, measured also between backward and step. Below 0: of all ranks' data."""
    model, batch = model_of("mha", kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    monitor = LogitMonitor(model, torch.cat([tokens(seed) for seed in (range(4) if rank < 0 else [rank])]))
    found = [monitor.measure()]
    for _ in range(2):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        monitor.measure(keep=False)
        optimizer.step()
    return [*found, monitor.measure()]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_statistics_are_those_of_all_ranks_data(kind: str, four: Crew) -> None:
    alone = monitored(-1, "plain")
    for found in four(monitored, kind):
        for here, there in zip(found, alone, strict=True):
            assert list(here) == list(there)
            for name, stats in there.items():
                for field in ("max", "mean_change", "entropy", "sink"):
                    one, other = getattr(here[name], field), getattr(stats, field)
                    torch.testing.assert_close(one, other, equal_nan=True, rtol=1e-4, atol=1e-5)
