"""Saving and resuming: 2N steps are N steps, torch.save, a new process's objects, and N more; bitwise."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from models import Latent, PerHead, Separate, assert_equal, layers, train
from quacklr import ConstantTau, LogitPath, Paper, QuacK, Weight, frobenius, mha, packed, spectral
from quacklr.core.norms import Norm

Run = tuple[nn.Module, torch.optim.Optimizer, QuacK]


def run(attention: Callable[[], nn.Module], norm: Norm, seed: int = 0) -> Run:
    torch.manual_seed(seed)
    model = layers(2, attention) if attention is not Latent else nn.Sequential(Latent())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer, QuacK(model, optimizer, rule=Paper(0.5, norm=norm))


@pytest.mark.parametrize("norm", [frobenius, spectral])
@pytest.mark.parametrize("attention", [Separate, lambda: Separate(bias=True), PerHead, Latent])
def test_a_resumed_run_continues_bitwise(attention: Callable[[], nn.Module], norm: Norm, tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    "make",
    [
        partial(torch.optim.AdamW, lr=0.1),
        partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        partial(torch.optim.Adagrad, lr=0.1),
    ],
)
def test_quack_attached_to_an_optimizer_that_has_stepped_warns_unless_its_state_is_loaded(
    make: Callable[..., torch.optim.Optimizer],
) -> None:
    model = layers(2, Separate)
    optimizer = make(model.parameters())
    with QuacK(model, optimizer) as first:
        train(model, optimizer, steps=2)  # no warning: nothing had stepped
        state = first.state_dict()

    with QuacK(model, optimizer) as loaded:
        loaded.load_state_dict(state)
        train(model, optimizer, steps=1)
    with QuacK(model, optimizer, rule=ConstantTau(1.0)):  # its rates do not depend on the weights at the start
        train(model, optimizer, steps=1)
    with QuacK(model, optimizer):
        with pytest.warns(UserWarning, match="the optimizer had stepped before QuacK was attached"):
            train(model, optimizer, steps=1)
        train(model, optimizer, steps=1)  # once


def test_the_optimizers_state_may_be_loaded_after_quacks() -> None:
    model, optimizer, quack = run(Separate, frobenius)
    train(model, optimizer, steps=2)
    resumed, resumed_optimizer, resumed_quack = run(Separate, frobenius, seed=9)
    resumed_quack.load_state_dict(quack.state_dict())
    resumed_optimizer.load_state_dict(optimizer.state_dict())
    train(resumed, resumed_optimizer, steps=1)  # with a warning, an error here, if QuacK's state was not loaded


def test_a_state_is_a_copy_that_training_does_not_change() -> None:
    model, optimizer, quack = run(Separate, spectral)
    state = quack.state_dict()
    rates = state["rates"]["0.q"].clone()
    train(model, optimizer, steps=3)
    assert_equal(state["rates"]["0.q"], rates)
    assert not torch.equal(quack.state_dict()["rates"]["0.q"], rates)


def test_state_is_keyed_by_name_so_blocks_of_different_sizes_find_their_place() -> None:
    param = nn.Parameter(torch.arange(1.0, 13.0).view(6, 2))
    other = nn.Parameter(torch.ones(3, 2))
    optimizer = torch.optim.SGD([param, other], lr=0.1)
    paths = [LogitPath((Weight("q", param, torch.tensor([0, 0, 0, 1, 2, 2])), Weight("k", other, torch.arange(3))), 3)]
    with QuacK(paths, optimizer, rule=Paper(norm=spectral)) as quack:
        state = quack.state_dict()
        exact = torch.stack([torch.linalg.matrix_norm(rows, 2) for rows in param.detach().split([3, 1, 2])])
        torch.testing.assert_close(state["sensitivity"]["k"], exact, rtol=1e-2, atol=0)
        quack.load_state_dict(state)
        assert_equal(quack.state_dict()["sensitivity"], state["sensitivity"])


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
            "0.k has shape [8, 16] in the state, [16, 16] in the model",
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
        QuacK(model, optimizer, rule=Paper(norm=spectral)).load_state_dict(state)


def test_an_optimizers_state_is_refused() -> None:
    _, optimizer, quack = run(Separate, frobenius)
    with pytest.raises(ValueError, match="not the state of a QuacK"):
        quack.load_state_dict(optimizer.state_dict())


def two_periods(seed: int) -> tuple[nn.Module, list[torch.optim.Optimizer], QuacK]:
    torch.manual_seed(seed)
    model = layers(1, lambda: Separate(bias=True))
    matrices, biases = ([p for p in model.parameters() if p.ndim == n] for n in (2, 1))
    optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD(matrices, lr=0.1), torch.optim.SGD(biases, lr=0.1)]
    return model, optimizers, QuacK(model, optimizers, tau=0.5)


def train_with_two_periods(model: nn.Module, optimizers: list[torch.optim.Optimizer], steps: range) -> None:
    """The second optimizer steps every second iteration, before the first: it uses the rates of the last one."""
    for step in steps:
        model(torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        for optimizer in optimizers[::-1] if step % 2 else optimizers[:1]:
            optimizer.step()
        model.zero_grad()


@pytest.mark.parametrize("saved_after", [1, 2, 3, 4])
def test_a_run_whose_optimizers_step_at_different_times_resumes_bitwise(saved_after: int, tmp_path: Path) -> None:
    model, optimizers, quack = two_periods(seed=0)
    train_with_two_periods(model, optimizers, range(saved_after))
    states = model.state_dict(), [each.state_dict() for each in optimizers], quack.state_dict()
    torch.save(states, tmp_path / "checkpoint.pt")
    last = quack.rates(last=True)
    train_with_two_periods(model, optimizers, range(saved_after, 6))

    resumed, resumed_optimizers, resumed_quack = two_periods(seed=9)
    weights, moments, state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    resumed.load_state_dict(weights)
    for each, moment in zip(resumed_optimizers, moments, strict=True):
        each.load_state_dict(moment)
    resumed_quack.load_state_dict(state)
    assert_equal(resumed_quack.rates(last=True), last)
    train_with_two_periods(resumed, resumed_optimizers, range(saved_after, 6))
    assert_equal(list(resumed.state_dict().values()), list(model.state_dict().values()))


def fused(repeat: int) -> QuacK:
    """[q | k] or [h, 2, d]: the same shape, the same number of blocks, other rows."""
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(8, 3))
    heads = 4 // repeat
    weights = packed(param, ("q", heads, 1), ("k", heads, 1), repeat=repeat)
    return QuacK(mha(*weights), torch.optim.SGD([param], lr=0.1))


def test_a_state_of_other_rows_is_refused() -> None:
    concat, per_head = fused(1), fused(4)
    concat.load_state_dict(concat.state_dict())
    with pytest.raises(ValueError, match="k has rows [0-9a-f]+ in the state, [0-9a-f]+ in the model"):
        per_head.load_state_dict(concat.state_dict())


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("sensitivity", torch.tensor([-1.0, 1.0, 1.0, 1.0]), "4 finite numbers above 0"),
        ("sensitivity", torch.tensor([0.0, 1.0, 1.0, 1.0]), "4 finite numbers above 0"),
        ("sensitivity", torch.tensor([torch.nan, 1.0, 1.0, 1.0]), "4 finite numbers above 0"),
        ("sensitivity", torch.tensor([torch.inf, 1.0, 1.0, 1.0]), "4 finite numbers above 0"),
        ("sensitivity", "abc", "4 finite numbers above 0, not abc"),
        ("sensitivity", torch.ones(4, 2), "4 finite numbers above 0"),
        ("rates", torch.tensor([-1.0, 1.0, 1.0, 1.0]), "4 finite numbers from 0 up"),
        ("rates", torch.ones(3), "4 finite numbers from 0 up"),
        ("rates", torch.ones(4, dtype=torch.long), "4 finite numbers from 0 up"),
    ],
)
def test_a_state_with_numbers_that_cannot_be_is_refused_and_changes_nothing(key: str, value: Any, message: str) -> None:
    _, _, quack = run(Separate, spectral)
    before = quack.state_dict()
    broken = quack.state_dict()
    broken[key]["0.q"] = value
    with pytest.raises(ValueError, match=f"0.q: its {key} in the state must be {message}"):
        quack.load_state_dict(broken)
    for kind in ("sensitivity", "rates"):
        assert_equal(quack.state_dict()[kind], before[kind])


@pytest.mark.parametrize("broken", [None, 3, [], {"norm": "frobenius"}, {"state": {}}])
def test_what_is_no_state_is_refused(broken: Any) -> None:
    _, _, quack = run(Separate, frobenius)
    with pytest.raises(ValueError, match="this is not the state of a QuacK"):
        quack.load_state_dict(broken)


def test_a_state_of_a_newer_version_is_refused() -> None:
    _, _, quack = run(Separate, frobenius)
    with pytest.raises(ValueError, match="version 99, and this quacklr reads version 3 only"):
        quack.load_state_dict({**quack.state_dict(), "version": 99})


def test_settings_that_are_fixed_when_attached_cannot_be_set_later() -> None:
    _, _, quack = run(Separate, frobenius)
    for name, value in (("floor", 1.0), ("norm", spectral)):
        with pytest.raises(AttributeError):
            setattr(quack.rule, name, value)


def test_the_state_survives_where_empty_dicts_are_dropped() -> None:
    """torch's set_optimizer_state_dict drops empty dicts: there must be none whose absence is an error."""
    model, optimizer, quack = run(Separate, frobenius)
    train(model, optimizer)
    state = {key: value for key, value in quack.state_dict().items() if value != {} and value != []}
    quack.load_state_dict(state)
