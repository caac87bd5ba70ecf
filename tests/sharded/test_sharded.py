"""Models that FSDP2, HSDP, tensor parallelism or both have sharded learn with the rates of one process.

Every rank sees the same batch, so that the mean gradient is that of one process; QK clip's ranks see their own.
"""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import reference
from crew import Crew
from models import assert_equal
from quacklr import LogitPath, Paper, QKClip, QuacK, frobenius, mha, packed, spectral
from quacklr.core.norms import Norm
from quacklr.lab.model import MHA, MLA, Shape, build
from sharding import TAU, Run, assert_same_rates, assert_same_run, gradient, like, mesh_of, moved, spread, whole

SHAPE = Shape(d_model=32, layers=2, d_ff=48, context=12, vocab=50, init_std=0.4)
GQA = MHA(heads=4, kv_heads=2, head_dim=8)
LATENT = MLA(heads=3, nope_dim=6, rope_dim=2, v_head_dim=6, d_cq=10, d_ckv=7)
Checkpoint = dict[str, Any]
HEADS, SIZE, ROLES = 4, 4, ("dq", "dkv", "kr", "uq", "uk", "qr")


class Attention(nn.Module):
    """Grouped, with biases; runs on as many heads as its projections give."""

    def __init__(self, groups: int = 2) -> None:
        super().__init__()
        self.groups = groups
        self.q, self.o = nn.Linear(16, HEADS * SIZE), nn.Linear(HEADS * SIZE, 16)
        self.k, self.v = nn.Linear(16, groups * SIZE), nn.Linear(16, groups * SIZE)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = (each(x_BTD).unflatten(2, (-1, SIZE)).transpose(1, 2) for each in (self.q, self.k, self.v))
        mixed: Tensor = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return x_BTD + self.o(mixed.transpose(1, 2).flatten(2))

    def logit_paths(self) -> list[LogitPath]:
        return mha(*packed(self.q, ("q", HEADS, SIZE)), *packed(self.k, ("k", self.groups, SIZE)))


def plain(name: str, layers: int = 2) -> tuple[nn.Module, Tensor]:
    """A model, always the same, and a batch for it."""
    torch.manual_seed(0)
    data = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 50, (3, 12), generator=data)
    if name == "own":
        return nn.Sequential(*(Attention() for _ in range(layers))), 3 * torch.randn(2, 5, 16, generator=data)
    if name in ("mha", "mla"):
        return build(SHAPE, GQA if name == "mha" else LATENT, seed=0), tokens
    from tiny_models import build as tiny

    return tiny(name)[0], tokens


def parallel(model: nn.Module) -> None:
    """Tensor parallelism: heads are sharded."""
    for module in model.modules():
        names = {role: role for role in "qkvo"} if isinstance(module, Attention) else {f"{r}_proj": r for r in "qkvo"}
        if all(hasattr(module, name) for name in names):
            plan: Any = {name: RowwiseParallel() if role == "o" else ColwiseParallel() for name, role in names.items()}
            parallelize_module(module, mesh_of((2, 2))["tp"], plan)


def model_of(name: str, kind: str, layers: int = 2, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Tensor]:
    model, batch = plain(name, layers)
    model, batch = model.to(dtype), batch.to(dtype) if batch.is_floating_point() else batch
    if kind == "ddp":
        return DistributedDataParallel(model), batch
    if "tp" in kind:
        parallel(model)
    if "sdp" in kind:
        mesh: Any = mesh_of((2, 2)) if kind != "fsdp" else None
        mesh = mesh["dp"] if "tp" in kind else mesh
        for block in next(module for module in model.modules() if isinstance(module, nn.ModuleList | nn.Sequential)):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, batch


def output(model: nn.Module, batch: Tensor) -> Tensor:
    out = model(batch)
    return out if isinstance(out, Tensor) else out.logits


def backward(model: nn.Module, batch: Tensor, step: int, given: bool) -> None:
    """A real backward pass; with `given`, its gradients are replaced by multiples of the weights of each head."""
    model.zero_grad()
    output(model, batch).square().mean().backward()
    if given:
        for index, param in enumerate(model.parameters()):
            size = whole(param).std() if param.ndim > 1 else 0.1
            param.grad = like(gradient(param, step, index) * size, param)


def trained(_: int, name: str, kind: str, norm: Norm, optimizer_name: str, layers: int = 2) -> Run:
    """Three steps. In float64 where rounding grows: with real gradients, and in one process's norms of columns."""
    real = name == "own" and optimizer_name == "SGD"
    model, batch = model_of(name, kind, layers, torch.float64 if real or name == "gpt2" else torch.float32)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.3, foreach=False)
    if optimizer_name == "AdamW":
        lr = 0.03 if name in ("llama", "gpt2") else 0.3  # some weights begin smaller than others
        optimizer = torch.optim.AdamW(model.parameters(), lr, eps=1e-3, foreach=False)
    names = [name.removeprefix("module.") for name, _ in model.named_parameters()]
    rates, params, counts = [], [], []
    with QuacK(model, optimizer, rule=Paper(TAU, norm=norm), verify=False) as quack:
        state = quack.state_dict()
        for step in range(3):
            rates.append(quack.rates())
            backward(model, batch, step, given=not real)
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
        *(("own", kind, frobenius, "SGD") for kind in ("ddp", "fsdp", "hsdp", "tp", "tp x fsdp")),
        *((name, kind, spectral, "AdamW") for name, kind in (("own", "tp x fsdp"), ("llama", "tp x fsdp"))),
        *((name, "fsdp", spectral, "AdamW") for name in ("mla", "gpt2")),
    ],
)
def test_a_sharded_model_learns_as_in_one_process(name: str, kind: str, norm: Norm, optimizer: str, four: Crew) -> None:
    alone = trained(0, name, "plain", norm, optimizer)
    assert moved(alone) > 0.05
    assert max(map(spread, alone.rates)) > 0.02
    assert alone.collectives == [0, 0, 0]
    for found in four(trained, name, kind, norm, optimizer):
        assert_same_run(found, alone)
        assert max(found.collectives) <= (0 if kind == "ddp" else 1 if norm is frobenius else 2)


def test_a_step_takes_one_collective_whatever_the_number_of_layers(four: Crew) -> None:
    for found in four(trained, "own", "fsdp", frobenius, "SGD", 4):
        assert len(found.rates[0]) == 2 * 4
        assert found.collectives == [1, 1, 1]


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
            backward(model, batch, step, given=True)
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


def continued(_: int, kind: str, checkpoint: bytes | None) -> tuple[Checkpoint, list[dict[str, Tensor]]]:
    """Two steps from a checkpoint, or from the start: the state before the last, and the rates at each.

    In float64, since real gradients make rounding grow. What is resumed is attached to other weights first.
    """
    model, batch = model_of("own", kind, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    rates: list[dict[str, Tensor]] = []
    for param in model.parameters() if checkpoint else []:
        param.data.mul_(0.5)
    with QuacK(model, optimizer, TAU) as quack:
        if checkpoint:
            saved = torch.load(io.BytesIO(checkpoint), weights_only=True)
            with torch.no_grad():
                for param, value in zip(model.parameters(), saved["params"], strict=True):
                    param.copy_(like(value, param))
            quack.load_state_dict(saved["quack"])
        for step in range(2):
            state = {"params": [whole(param) for param in model.parameters()], "quack": quack.state_dict()}
            rates.append(quack.rates())
            backward(model, batch, step, given=False)
            optimizer.step()
        rates.append(quack.rates())
    return state, rates


def assert_plain_and_equal(one: Checkpoint, other: Checkpoint) -> None:
    assert one.keys() == other.keys() >= {"norm", "shape", "sensitivity", "rates", "stepped"}
    for key, values in one.items():
        of_tensors = isinstance(values, dict) and any(isinstance(value, Tensor) for value in values.values())
        if of_tensors:
            assert not any(isinstance(value, DTensor) for value in values.values())
            assert_equal(values, other[key])
        else:
            assert values == other[key]


@pytest.mark.parametrize("kind", ["plain", "tp x fsdp"])
def test_a_state_is_the_same_on_each_rank_and_goes_on_with_any_number(kind: str, two: Crew, four: Crew) -> None:
    (state, rates), *others = four(continued, kind, None)
    for other, _ in others:
        assert_plain_and_equal(state["quack"], other["quack"])
    assert spread(rates[1]) > 0.01
    torch.save(state, file := io.BytesIO())
    for ranks, where in ((two, "fsdp"), (four, "fsdp"), (four, "tp x fsdp")):
        for found in [*ranks(continued, where, file.getvalue()), continued(0, "plain", file.getvalue())]:
            for here, there in zip(found[1][:2], rates[1:], strict=True):
                assert_same_rates(here, there)


Clipped = tuple[dict[str, Tensor], dict[str, Tensor], list[int]]


def clipped(rank: int, name: str, kind: str, threshold: float) -> Clipped:
    """Parameters after three steps, the last largest logits, and collectives; a rank below 0 sees all ranks' data."""
    model, _ = model_of(name, kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with QKClip(model, optimizer, threshold) as clip:
        counts = []
        for step in range(3):
            data = [torch.Generator().manual_seed(10 * step + i) for i in (range(4) if rank < 0 else [rank])]
            tokens = torch.cat([torch.randint(0, 50, (3, 12), generator=each) for each in data])
            optimizer.zero_grad()
            model(tokens).square().mean().backward()
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


def check_clip_error(_: int, kind: str) -> None:
    model = model_of("own", kind)[0]
    with pytest.raises(ValueError, match=r"(?i)tensor.parallel|\bTP\b"):
        QKClip(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("kind", ["tp", "tp x fsdp"])
def test_qk_clip_refuses_tensor_parallel_heads(kind: str, four: Crew) -> None:
    four(check_clip_error, kind)
