"""Saving and resuming: 2N steps are N steps, torch.save, a new process's objects, and N more; bitwise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path as File
from typing import Any

import pytest
import torch
from torch import nn

from models import Latent, PerHead, Separate, assert_equal, layers, train
from quacklr import Path, QuacK, Weight, frobenius, spectral
from quacklr.norms import Norm

Run = tuple[nn.Module, torch.optim.Optimizer, QuacK]


def run(attention: Callable[[], nn.Module], norm: Norm, seed: int = 0) -> Run:
    torch.manual_seed(seed)
    model = layers(2, attention) if attention is not Latent else nn.Sequential(Latent())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer, QuacK(model, optimizer, tau=0.5, norm=norm)


@pytest.mark.parametrize("norm", [frobenius, spectral])
@pytest.mark.parametrize("attention", [Separate, lambda: Separate(bias=True), PerHead, Latent])
def test_a_resumed_run_continues_bitwise(attention: Callable[[], nn.Module], norm: Norm, tmp_path: File) -> None:
    model, optimizer, quack = run(attention, norm)
    train(model, optimizer, steps=3, seed=1)
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "quack": quack.state_dict()}
    torch.save(states, tmp_path / "checkpoint.pt")
    train(model, optimizer, steps=3, seed=2)

    resumed, resumed_optimizer, resumed_quack = run(attention, norm, seed=9)
    saved: dict[str, Any] = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    resumed.load_state_dict(saved["model"])
    resumed_optimizer.load_state_dict(saved["optimizer"])
    resumed_quack.load_state_dict(saved["quack"])
    train(resumed, resumed_optimizer, steps=3, seed=2)

    assert_equal(list(resumed.state_dict().values()), list(model.state_dict().values()))
    assert_equal(resumed_quack.rates(), quack.rates())


def test_without_its_state_a_resumed_run_would_differ() -> None:
    model, optimizer, quack = run(Separate, frobenius)
    train(model, optimizer, steps=3)
    rates = quack.rates()
    quack.remove()
    assert (QuacK(model, optimizer, tau=0.5).rates()["0.q"] - rates["0.q"]).abs().min() > 0.001


def test_a_state_is_a_copy_that_training_does_not_change() -> None:
    model, optimizer, quack = run(Separate, spectral)
    state = quack.state_dict()
    vectors = state["memory"]["0.q"].clone()
    train(model, optimizer, steps=3)
    assert_equal(state["memory"]["0.q"], vectors)
    assert not torch.equal(quack.state_dict()["memory"]["0.q"], vectors)


def test_state_is_keyed_by_name_so_blocks_of_different_sizes_find_their_place() -> None:
    param = nn.Parameter(torch.arange(1.0, 13.0).view(6, 2))
    other = nn.Parameter(torch.ones(3, 2))
    optimizer = torch.optim.SGD([param, other], lr=0.1)
    paths = [Path((Weight("q", param, torch.tensor([0, 0, 0, 1, 2, 2])), Weight("k", other, torch.arange(3))), 3)]
    with QuacK(paths, optimizer, norm=spectral) as quack:
        state = quack.state_dict()
        for rows in param.detach().split([3, 1, 2]):
            exact = torch.linalg.svd(rows)[2][0]
            found = state["memory"][f"q[{len(rows)} rows]"][0, :, 0]
            torch.testing.assert_close(found.abs(), exact.abs(), rtol=1e-3, atol=1e-4)
        quack.load_state_dict(state)
        assert_equal(quack.state_dict()["memory"], state["memory"])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            lambda: layers(3, Separate),
            "2.k is in the state but not in the model; 2.q is in the state but not in the model",
        ),
        (
            lambda: layers(1, Separate),
            "1.k is in the model but not in the state; 1.q is in the model but not in the state",
        ),
        (
            lambda: layers(2, lambda: Separate(groups=2)),
            "0.k has shape [8, 16] and 2 blocks in the state, shape [16, 16] and 4 blocks",
        ),
    ],
)
def test_a_state_of_another_model_is_refused_with_the_difference(other: Callable[[], nn.Module], message: str) -> None:
    model, optimizer, quack = run(Separate, frobenius)
    stranger = other()
    state = QuacK(stranger, torch.optim.SGD(stranger.parameters(), lr=0.1)).state_dict()
    rates = quack.rates()
    with pytest.raises(ValueError, match="the state is of another model: ") as error:
        quack.load_state_dict(state)
    assert message in str(error.value)
    assert_equal(quack.rates(), rates)
    assert model is not None
    assert optimizer is not None


def test_a_state_of_another_norm_is_refused() -> None:
    model, optimizer, quack = run(Separate, frobenius)
    state = quack.state_dict()
    quack.remove()
    with pytest.raises(ValueError, match="made with norm=frobenius, but this QuacK has norm=spectral"):
        QuacK(model, optimizer, norm=spectral).load_state_dict(state)


def test_what_is_no_state_is_refused() -> None:
    _, optimizer, quack = run(Separate, frobenius)
    with pytest.raises(ValueError, match="not the state of a QuacK: it has no memory, norm, sensitivity"):
        quack.load_state_dict(optimizer.state_dict())
