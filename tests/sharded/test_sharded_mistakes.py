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
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from crew import Crew
from models import assert_equal
from quacklr import LogitMonitor, Paper, QKClip, QuacK, spectral
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
    quack = QuacK(model, optimizer, tau=1.0)
    sharded(model)
    with pytest.raises(
        RuntimeError, match=r"^blocks.0.attention.q: 4 of 4 weights .* in the model.* shard first, then"
    ):
        train(model, optimizer)
    quack.remove()
    with pytest.raises(ValueError, match=r"attention.q: its parameter is in none of the optimizers given; sharding"):
        QuacK(model, optimizer, tau=1.0)


class Unknown(nn.Module):
    """An attention that no table knows: rows r of q and k are of head r % 4."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha, self.beta, self.gamma = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(2, (4, 4)).permute(0, 3, 1, 2) for part in (self.alpha, self.beta, self.gamma))
        return x + nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def sharded_before_the_first_batch(_: int, which: str) -> None:
    """FSDP2 or FSDP1 between QuacK and the first batch, which would have been measured: there is nothing to guess."""
    for tau in (None, 1.0):
        model: Any = nn.Sequential(Unknown(), Unknown())
        optimizer = sgd(model)
        quack = QuacK(model, optimizer, tau)
        if which == "FSDP1":
            model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
        else:
            for layer in model if which == "layers" else ():
                fully_shard(layer)
            fully_shard(model)
        model(torch.randn(2, 6, 16)).square().mean().backward()
        for _ in range(2):  # the next step raises again
            with pytest.raises(RuntimeError, match=MEASURE_BEFORE):
                optimizer.step()
        quack.remove()


MEASURE_BEFORE = (
    r"^0 and 1 more: no table has the class Unknown, so it has to be measured, but the model is sharded; give the "
    r"module a method logit_paths\(\), or measure the model on a batch, before it is sharded or compiled, and pass the "
    r"paths: QuacK\(logit_paths\(model, batch\), optimizer\)$"
)


@pytest.mark.parametrize("which", ["model", "layers", "FSDP1"])
def test_sharding_between_attaching_and_the_first_batch_is_an_error_if_it_has_to_be_measured(
    which: str, two: Crew
) -> None:
    two(sharded_before_the_first_batch, which)


def on_meta_device(_: int) -> None:
    with torch.device("meta"):
        model = sharded(Decoder(SHAPE, GQA))
    with pytest.raises(ValueError, match=r"blocks.0.attention.q: its parameter is on the meta device; attach after"):
        QuacK(model, sgd(model), tau=1.0)


def tensor_parallel(_: int) -> None:
    """Also with a single data-parallel rank under FSDP2."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    model = parallelize_module(build(SHAPE, GQA, seed=0), mesh["tensor"], {"blocks.*.attention.q": ColwiseParallel()})
    optimizer = sgd(model)
    with pytest.raises(ValueError, match=r"attention.q.weight: its parameter is cut by .*, and QK clip needs them"):
        QKClip(model, optimizer)
    fully_shard(model, mesh=mesh["data"])
    with pytest.raises(ValueError, match="attention.q.weight: its parameter is cut by .*, and LogitMonitor needs them"):
        LogitMonitor(model, tokens())


def unwrapped_replicas(_: int) -> None:
    plain = build(SHAPE, GQA, seed=0)
    with pytest.warns(UserWarning, match="neither DistributedDataParallel nor sharded, but there are several ranks"):
        QKClip(plain, sgd(plain)).remove()
    with pytest.warns(UserWarning, match="LogitMonitor was given a model that is neither DistributedDataParallel nor"):
        LogitMonitor(plain, tokens()).measure()


def unseen_logits(_: int) -> None:
    model = DistributedDataParallel(build(SHAPE, GQA, seed=0)).eval()
    optimizer = sgd(model)
    with QKClip(model, optimizer), pytest.raises(RuntimeError, match="QK clip saw no attention logits in training"):
        train(model, optimizer)


class Sometimes(nn.Module):
    """Two decoders, of which the second may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = build(SHAPE, GQA, seed=0), build(SHAPE, GQA, seed=1)

    def forward(self, tokens: Tensor, both: bool) -> Tensor:
        logits: Tensor = self.first(tokens)
        return logits + self.second(tokens) if both else logits


def different_attentions(rank: int) -> None:
    """Ranks that record different attention modules all raise an error, instead of waiting for each other for ever."""
    monitor = LogitMonitor(DistributedDataParallel(Sometimes()), (tokens(), rank == 0))
    with pytest.raises(ValueError, match="the ranks ran different attentions"):
        monitor.measure()


MISTAKES = (wrong_order, on_meta_device, tensor_parallel, unwrapped_replicas, unseen_logits, different_attentions)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_an_error_or_a_warning_in_every_rank(mistake: Callable[[int], None], two: Crew) -> None:
    two(mistake)


def attached_after_a_look(_: int) -> list[str]:
    """After a forward pass without backward, FSDP2 keeps unsharded parameters, which no optimizer steps."""
    model = sharded(build(SHAPE, GQA, seed=0))
    optimizer = sgd(model)
    with torch.no_grad():
        model(tokens())
    with QuacK(model, optimizer, tau=1.0) as quack:
        return list(quack.rates())


def test_quack_attaches_to_shards_after_a_forward_that_left_them_unsharded(two: Crew) -> None:
    for names in two(attached_after_a_look):
        assert names == [f"blocks.{layer}.attention.{role}" for layer in (0, 1) for role in "qk"]


def saved_by_torch(_: int, folder: Path, load: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """As docs/scaling.md has it: three steps and two more, maybe in other processes. The last rates and state."""
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
        return quack.rates(), quack.state_dict()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_checkpoint_takes_the_state_along_to_any_number_of_processes(
    two: Crew, four: Crew, tmp_path: Path
) -> None:
    (wanted, state), *others = four(saved_by_torch, tmp_path, False)
    assert max(float((rate - 1).abs().max()) for rate in wanted.values()) > 0.05
    assert all(type(value) is Tensor for value in state["sensitivity"].values())
    for _, other in others:
        assert other.keys() == state.keys()
        assert_equal([other["sensitivity"], other["rates"]], [state["sensitivity"], state["rates"]])
    for found, _ in (*two(saved_by_torch, tmp_path, True), saved_by_torch(0, tmp_path, True)):
        for name, rate in wanted.items():
            torch.testing.assert_close(found[name], rate, rtol=1e-4, atol=1e-5)
