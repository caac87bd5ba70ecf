"""All ways to shard a parameter: rates, steps and states equal those of one process, with one collective per step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.debug import CommDebugMode

from crew import Crew
from models import assert_equal
from quacklr import LogitPath, Paper, QuacK, frobenius, sensitivity, spectral
from quacklr.core.norms import Norm
from sharding import (
    LAYOUTS,
    TAU,
    Layout,
    Run,
    assert_same_rates,
    assert_same_run,
    gradient,
    like,
    mesh_of,
    moved,
    parameters,
    run,
    spread,
    whole,
)


def sharded(_: int, name: str, norm: Norm, kind: str) -> Run:
    return run(LAYOUTS[name], norm, kind, sharded=True)


def collectives(layout: Layout, norm: Norm) -> range:
    """How many a step may take: none where nothing is cut, else one all-reduce.

    Other norms than Frobenius take an all-to-all too, if a block is cut.
    """
    params = parameters(layout, sharded=False)
    words = [layout.places.get(name, "").ljust(2, "-") for name in params]
    is_cut = any(word[d] in "0123s" for word in words for d in range(len(layout.mesh)))
    most = is_cut * (1 if norm is frobenius else 2)
    return range(1) if not layout.adapts else range(min(1, most), most + 1)


ALIKE = {
    "whole heads",
    "HSDP",
    "replicas only",
    "rows twice",
    "fused",
    "tied",
    "stacked",
    "bunched",
    "frozen key",
    "a floor",
}


@pytest.mark.parametrize(
    ("name", "norm", "kind"),
    [
        *((name, frobenius, "SGD") for name in LAYOUTS),
        *((name, spectral, "AdamW") for name in LAYOUTS if name not in ALIKE),  # which it does as others
    ],
)
def test_rates_and_steps_are_those_of_one_process(name: str, norm: Norm, kind: str, four: Crew) -> None:
    alone = run(LAYOUTS[name], norm, kind, sharded=False)
    alike = name in {"tau for good", "one row for four ranks"}
    assert (moved(alone) > 0.05) == (name != "tau for good")
    assert (max(spread(rates) for rates in alone.rates) > 0.05) != alike
    for found in four(sharded, name, norm, kind):
        assert_same_run(found, alone)
        assert all(count in collectives(LAYOUTS[name], norm) for count in found.collectives)


def low_precision(_: int, name: str) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Rates of bf16 shards, and by hand from the norms of the whole parameters in float64."""
    layout = replace(LAYOUTS[name], dtype=torch.bfloat16)
    params = parameters(layout, sharded=True)
    optimizer = torch.optim.SGD(params.values(), lr=0.5)

    def norms() -> dict[str, Tensor]:
        return {name: whole(param).double().view(3, -1).norm(dim=1) for name, param in params.items()}

    start, found = norms(), []
    with QuacK(layout.paths(params), optimizer, tau=TAU) as quack:
        for step in range(3):
            now = norms()
            wanted = {"q": TAU * start["k"] / now["k"], "k": TAU * start["q"] / now["q"]}
            found.append((quack.rates(), {name: rate.float() for name, rate in wanted.items()}))
            for index, param in enumerate(params.values()):
                param.grad = like(gradient(param, step, index), param)
            optimizer.step()
    return found


def test_norms_of_bf16_shards_are_added_up_in_fp32(four: Crew) -> None:
    for found in four(low_precision, "rows of one and columns of the other"):
        assert spread(found[-1][0]) > 0.05
        for rates, wanted in found:
            assert_same_rates(rates, wanted)


def first_step(_: int, name: str) -> list[tuple[Tensor, Tensor]]:
    """Shards after a step with tau = 1, and after the optimizer's own."""
    both = []
    for quacks in (True, False):
        params = parameters(LAYOUTS[name], sharded=True)
        optimizer = torch.optim.AdamW(params.values(), lr=0.1, foreach=False)
        quack = QuacK(LAYOUTS[name].paths(params), optimizer) if quacks else None
        for index, param in enumerate(params.values()):
            param.grad = like(gradient(param, 0, index), param)
        optimizer.step()
        both.append([whole(param) for param in params.values()])
        if quack:
            quack.remove()
    return list(zip(*both, strict=True))


@pytest.mark.parametrize("name", ["cut inside a head", "columns", "transposed", "fused", "MLA, TP x FSDP"])
def test_the_first_step_with_tau_1_is_bitwise_the_plain_one(name: str, four: Crew) -> None:
    for pairs in four(first_step, name):
        for one, other in pairs:
            assert_equal(one, other)


def measured(_: int, name: str, norm: Norm) -> list[Tensor]:
    return list(sensitivity(LAYOUTS[name].paths(parameters(LAYOUTS[name], sharded=True)), norm).values())


def largest_entry(blocks_BRC: Tensor) -> Tensor:
    return blocks_BRC.abs().amax((1, 2))


@pytest.mark.parametrize("norm", [frobenius, spectral, largest_entry])
@pytest.mark.parametrize("name", ["cut inside a head", "columns", "MLA, TP", "tied"])
def test_sensitivities_are_those_of_one_process(name: str, norm: Norm, four: Crew) -> None:
    wanted = sensitivity(LAYOUTS[name].paths(parameters(LAYOUTS[name], sharded=False)), norm)
    for found in four(measured, name, norm):
        for here, there in zip(found, wanted.values(), strict=True):
            torch.testing.assert_close(here, there, rtol=1e-6, atol=0)


def refusal(paths: list[LogitPath], optimizer: torch.optim.Optimizer) -> str:
    try:
        QuacK(paths, optimizer).remove()
    except ValueError as error:
        return str(error)
    return "attached"


def local(param: Tensor) -> Tensor:
    assert isinstance(param, DTensor)
    return param.to_local()


def refusals(rank: int) -> list[str]:
    """The errors for a Partial DTensor, a weight of zeros, and NaN in one rank."""
    layout, said = LAYOUTS["cut inside a head"], []
    params = parameters(layout, sharded=True)
    optimizer = torch.optim.SGD(params.values(), lr=0.1)
    parts = DTensor.from_local(torch.ones(15, 8), mesh_of((2, 2)), [Partial(), Replicate()])
    unsummed = {**params, "k": nn.Parameter(parts)}
    said.append(refusal(layout.paths(unsummed), torch.optim.SGD(unsummed.values(), lr=0.1)))
    for value in (0.0, torch.nan):
        with torch.no_grad():
            shard = local(params["k"])
            shard.mul_(0)
            if rank == 2 and value != 0:
                shard[0, 0] = value
        said.append(refusal(layout.paths(params), optimizer))
    return said


def test_every_rank_raises_the_same_error(four: Crew) -> None:
    first, *others = four(refusals)
    assert all(other == first for other in others)
    partial, zeros, nan = first
    assert partial.startswith("k: ")
    assert "Partial" in partial
    assert zeros.startswith("q: its partner k is all zeros")
    assert nan.startswith("k: holds NaN or inf")


def alone_on_rank_0(rank: int, norm: Norm) -> tuple[str, int, dict[str, Tensor]]:
    """Rank 0 prints and saves while the others do nothing; then all go on."""
    layout = LAYOUTS["cut inside a head"]
    params = parameters(layout, sharded=True)
    optimizer = torch.optim.SGD(params.values(), lr=0.5)
    with QuacK(layout.paths(params), optimizer, rule=Paper(TAU, norm=norm)) as quack:
        assert rank or "q 0.5  k 0.5" in str(quack)
        for step in range(2):
            used = quack.rates()
            for index, param in enumerate(params.values()):
                param.grad = like(gradient(param, step, index), param)
            optimizer.step()
        text = ""
        with CommDebugMode() as comm:
            if rank == 0:
                text = str(quack)
                quack.state_dict()
        assert_same_rates(quack.rates(), quack.rates())
    return text, comm.get_total_counts(), used


@pytest.mark.parametrize("norm", [frobenius, spectral])
def test_rank_0_prints_and_saves_alone_and_shows_the_last_steps_rates(norm: Norm, four: Crew) -> None:
    text, count, used = four(alone_on_rank_0, norm)[0]
    assert count == 0
    for name, rate in used.items():
        assert rate.max() / rate.min() > 1.03
        assert f"{name} {float(rate.min()):.3g}..{float(rate.max()):.3g}" in text


def idle(_: int) -> list[int]:
    """Collectives of each step of two optimizers in turn, with lr and without."""
    layout = LAYOUTS["MLA"]
    params = parameters(layout, sharded=True)
    for index, param in enumerate(params.values()):
        param.grad = like(gradient(param, 0, index), param)
    half = list(params.values())
    first, second = torch.optim.SGD(half[:3], lr=0.0), torch.optim.SGD(half[3:], lr=0.1, momentum=0.9)
    counts = []
    with QuacK(layout.paths(params), [first, second]):
        for optimizer, lr in ((first, 0.0), (second, 0.1), (first, 0.1), (second, 0.1), (first, 0.1), (first, 0.0)):
            optimizer.param_groups[0]["lr"] = lr
            with CommDebugMode() as comm:
                optimizer.step()
            counts.append(comm.get_total_counts())
    return counts


def test_nothing_is_sent_at_lr_0_nor_twice_for_two_optimizers(four: Crew) -> None:
    assert four(idle) == [[0, 1, 0, 1, 0, 0]] * 4
