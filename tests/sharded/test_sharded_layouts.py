"""Ways to shard a parameter: rates, steps and states equal those of one process, with one collective per step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.debug import CommDebugMode

from crew import Crew
from models import assert_equal
from quacklr import LogitPath, QuacK, frobenius, sensitivity
from sharding import (
    LAYOUTS,
    TAU,
    Layout,
    Run,
    assert_same_rates,
    assert_same_run,
    mesh_of,
    moved,
    parameters,
    run,
    set_gradients,
    spread,
    whole,
)

CUT = (
    *("one row for four ranks", "columns", "rows and columns", "HSDP, the other way", "replicas only", "TP x FSDP"),
    *("bias as its weight", "bias on another dimension", "fused, a bias apart", "bunched, columns", "frozen latents"),
)
"""The layouts with another rule than that of frobenius: one for each way in which blocks are put together."""


def sharded(_: int, name: str, rule: str, kind: str) -> Run:
    return run(LAYOUTS[name], rule, kind, sharded=True)


def most_collectives(layout: Layout, rule: str) -> int:
    """An all-reduce if anything is cut; with other rules than frobenius also an all-to-all."""
    params = parameters(layout, sharded=False)
    words = [layout.places.get(name, "").ljust(2, "-") for name in params]
    is_cut = any(word[d] in "0123s" for word in words for d in range(len(layout.mesh)))
    return is_cut * layout.adapts * (1 if rule == "frobenius" else 2)


@pytest.mark.parametrize(
    ("name", "rule", "kind"),
    [
        *((name, "frobenius", "SGD") for name in LAYOUTS),
        *((name, "spectral", "AdamW") for name in CUT),
        *((name, "budget", "SGD") for name in CUT),
    ],
)
def test_rates_and_steps_are_those_of_one_process(name: str, rule: str, kind: str, four: Crew) -> None:
    alone = run(LAYOUTS[name], rule, kind, sharded=False)
    alike = name in {"tau for good", "one row for four ranks"} and rule != "budget"
    assert (moved(alone) > 0.05) == (name != "tau for good")
    assert (max(spread(rates) for rates in alone.rates) > 0.01) != alike
    most = most_collectives(LAYOUTS[name], rule)
    for found in four(sharded, name, rule, kind):
        assert_same_run(found, alone, rtol=1e-5 if rule == "budget" else 1e-6)
        counts = found.collectives[rule == "budget" :]  # its first step also makes the plan of the exchange
        assert all(min(1, most) <= count <= most for count in counts)


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
            set_gradients(params, step)
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
        quack = QuacK(LAYOUTS[name].paths(params), optimizer, tau=1.0) if quacks else None
        set_gradients(params, 0)
        optimizer.step()
        both.append([whole(param) for param in params.values()])
        if quack:
            quack.remove()
    return list(zip(*both, strict=True))


@pytest.mark.parametrize("name", ["cut inside a head", "transposed, columns", "MLA, TP x FSDP"])
def test_the_first_step_with_tau_1_is_bitwise_the_plain_one(name: str, four: Crew) -> None:
    for pairs in four(first_step, name):
        for one, other in pairs:
            assert_equal(one, other)


def largest_entry(blocks_BRC: Tensor) -> Tensor:
    return blocks_BRC.abs().amax((1, 2))


def measured(_: int, name: str) -> list[Tensor]:
    paths = LAYOUTS[name].paths(parameters(LAYOUTS[name], sharded=True))
    return [rate for norm in (frobenius, largest_entry) for rate in sensitivity(paths, norm).values()]


@pytest.mark.parametrize("name", ["columns", "tied"])
def test_sensitivities_with_any_norm_are_those_of_one_process(name: str, four: Crew) -> None:
    paths = LAYOUTS[name].paths(parameters(LAYOUTS[name], sharded=False))
    wanted = [rate for norm in (frobenius, largest_entry) for rate in sensitivity(paths, norm).values()]
    for found in four(measured, name):
        for here, there in zip(found, wanted, strict=True):
            torch.testing.assert_close(here, there, rtol=1e-6, atol=0)


def refusal(paths: list[LogitPath], optimizer: torch.optim.Optimizer) -> str:
    try:
        QuacK(paths, optimizer, tau=1.0).remove()
    except ValueError as error:
        return str(error)
    return "attached"


def refusals(rank: int) -> list[str]:
    """The errors for a Partial DTensor, a weight of zeros, and NaN in one rank."""
    layout, said = LAYOUTS["cut inside a head"], []
    params = parameters(layout, sharded=True)
    optimizer = torch.optim.SGD(params.values(), lr=0.1)
    parts = DTensor.from_local(torch.ones(15, 8), mesh_of((2, 2)), [Partial(), Replicate()])
    unsummed = {**params, "k": nn.Parameter(parts)}
    said.append(refusal(layout.paths(unsummed), torch.optim.SGD(unsummed.values(), lr=0.1)))
    key = params["k"].detach()
    assert isinstance(key, DTensor)
    for value in (0.0, torch.nan):
        shard = key.to_local().zero_()
        if rank == 2:
            shard[0, 0] = value
        said.append(refusal(layout.paths(params), optimizer))
    return said


def test_every_rank_raises_the_same_error(four: Crew) -> None:
    first, *others = four(refusals)
    assert all(other == first for other in others)
    partial, zeros, nan = first
    assert partial.startswith("k: its parameter is a sum that has not been added up over its processes (a Partial")
    assert zeros.startswith("q: its partner k is all zeros")
    assert nan.startswith("k: holds NaN or inf")


def alone_on_rank_0(rank: int) -> tuple[str, int, dict[str, Tensor]]:
    """Rank 0 prints, saves and reads the last rates while the others do nothing; then all go on."""
    layout = LAYOUTS["cut inside a head"]
    params = parameters(layout, sharded=True)
    optimizer = torch.optim.SGD(params.values(), lr=0.5)
    with QuacK(layout.paths(params), optimizer, TAU) as quack:
        assert rank or "q 0.5  k 0.5" in str(quack)
        for step in range(2):
            used = quack.rates()
            set_gradients(params, step)
            optimizer.step()
        text = ""
        with CommDebugMode() as comm:
            if rank == 0:
                text = str(quack)
                quack.state_dict()
                assert_same_rates(quack.rates(last=True), used)
        assert_same_rates(quack.rates(), quack.rates())
        quack.load_state_dict(quack.state_dict())
        assert_same_rates(quack.rates(last=True), used)
    return text, comm.get_total_counts(), used


def test_rank_0_prints_and_saves_alone_and_shows_the_last_steps_rates(four: Crew) -> None:
    text, count, used = four(alone_on_rank_0)[0]
    assert count == 0
    for name, rate in used.items():
        assert rate.max() / rate.min() > 1.03
        assert f"{name} {float(rate.min()):.3g}..{float(rate.max()):.3g}" in text


def idle(_: int) -> list[int]:
    """Collectives of each step of two optimizers in turn, with lr and without."""
    layout = LAYOUTS["MLA"]
    params = parameters(layout, sharded=True)
    set_gradients(params, 0)
    half = list(params.values())
    first, second = torch.optim.SGD(half[:3], lr=0.0), torch.optim.SGD(half[3:], lr=0.1, momentum=0.9)
    counts = []
    with QuacK(layout.paths(params), [first, second], tau=1.0):
        for optimizer, lr in ((first, 0.0), (second, 0.1), (first, 0.1), (second, 0.1), (first, 0.1), (first, 0.0)):
            optimizer.param_groups[0]["lr"] = lr
            with CommDebugMode() as comm:
                optimizer.step()
            counts.append(comm.get_total_counts())
    return counts


def test_nothing_is_sent_at_lr_0_nor_twice_for_two_optimizers(four: Crew) -> None:
    assert four(idle) == [[0, 1, 0, 1, 0, 0]] * 4
