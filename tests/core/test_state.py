"""Saving and resuming: 2N steps are N steps, torch.save, a new process's objects, and N more; bitwise."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from models import Latent, PerHead, Separate, assert_equal, layers, train
from quacklr import ConstantTau, Paper, QuacK, frobenius, mha, packed, spectral
from quacklr.core.norms import Norm

Run = tuple[nn.Module, torch.optim.Optimizer, QuacK]


def run(attention: Callable[[], nn.Module] = Separate, norm: Norm = frobenius, seed: int = 0) -> Run:
    torch.manual_seed(seed)
    model = layers(2, attention) if attention is not Latent else nn.Sequential(Latent())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer, QuacK(model, optimizer, rule=Paper(0.5, norm=norm))


@pytest.mark.parametrize(
    ("attention", "norm"), [(lambda: Separate(bias=True), frobenius), (PerHead, spectral), (Latent, frobenius)]
)
def test_a_resumed_run_continues_bitwise(attention: Callable[[], nn.Module], norm: Norm, tmp_path: Path) -> None:
    model, optimizer, quack = run(attention, norm)
    train(model, optimizer, steps=3, seed=1)
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "quack": quack.state_dict()}
    torch.save(states, tmp_path / "checkpoint.pt")
    rates = quack.rates(last=True)
    train(model, optimizer, steps=3, seed=2)

    resumed, resumed_optimizer, resumed_quack = run(attention, norm, seed=9)
    saved: dict[str, Any] = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    resumed.load_state_dict(saved["model"])
    resumed_quack.load_state_dict(saved["quack"])
    resumed_optimizer.load_state_dict(saved["optimizer"])
    assert_equal(resumed_quack.rates(last=True), rates)
    train(resumed, resumed_optimizer, steps=3, seed=2)
    assert_equal(list(resumed.state_dict().values()), list(model.state_dict().values()))
    assert_equal(resumed_quack.rates(), quack.rates())


def test_without_its_state_a_resumed_run_would_differ() -> None:
    model, optimizer, quack = run()
    train(model, optimizer, steps=3)
    rates = quack.rates()
    quack.remove()
    assert (QuacK(model, optimizer, tau=0.5).rates()["0.q"] - rates["0.q"]).abs().min() > 0.001


@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.AdamW(params, lr=0.1),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        lambda params: torch.optim.Adagrad(params, lr=0.1),
    ],
)
def test_quack_attached_to_an_optimizer_that_has_stepped_warns_unless_its_state_is_loaded(
    make: Callable[[Any], torch.optim.Optimizer],
) -> None:
    model = layers(2, Separate)
    optimizer = make(model.parameters())
    with QuacK(model, optimizer, tau=1.0) as first:
        train(model, optimizer, steps=2)  # no warning: nothing had stepped
        state = first.state_dict()
    with QuacK(model, optimizer, tau=1.0) as loaded:
        loaded.load_state_dict(state)
        train(model, optimizer, steps=1)
    with QuacK(model, optimizer, rule=ConstantTau(1.0)):  # its rates do not depend on the weights at the start
        train(model, optimizer, steps=1)
    with QuacK(model, optimizer, tau=1.0):
        with pytest.warns(UserWarning, match="the optimizer had stepped before QuacK was attached"):
            train(model, optimizer, steps=1)
        train(model, optimizer, steps=1)  # once


def test_loading_the_optimizer_but_not_quack_triggers_a_warning() -> None:
    model, optimizer, quack = run()
    train(model, optimizer, steps=1)
    saved, state = optimizer.state_dict(), quack.state_dict()
    optimizer.load_state_dict(saved)
    with pytest.warns(UserWarning, match="the optimizer's state was loaded but QuacK's was not"):
        train(model, optimizer, steps=1)
    train(model, optimizer, steps=1)  # once is enough
    optimizer.load_state_dict(saved)
    quack.load_state_dict(state)
    train(model, optimizer, steps=1)


def test_a_state_is_a_copy_that_training_does_not_change() -> None:
    model, optimizer, quack = run()
    state = quack.state_dict()
    rates = state["rates"]["0.q"].clone()
    train(model, optimizer, steps=3)
    assert_equal(state["rates"]["0.q"], rates)
    assert not torch.equal(quack.state_dict()["rates"]["0.q"], rates)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: layers(3, Separate), "2.k is in the state but not in the model; 2.q is in the state but"),
        (lambda: layers(1, Separate), "1.k is in the model but not in the state; 1.q is in the model but"),
        (
            lambda: layers(2, lambda: Separate(groups=2)),
            "0.k has shape [8, 16] in the state, [16, 16] in the model; 1.k has shape [8, 16] in the state",
        ),
    ],
)
def test_a_state_of_another_model_is_refused_with_the_difference(other: Callable[[], nn.Module], message: str) -> None:
    _, _, quack = run()
    stranger = other()
    state = QuacK(stranger, torch.optim.SGD(stranger.parameters(), lr=0.1), tau=1.0).state_dict()
    rates = quack.rates()
    with pytest.raises(ValueError, match="the state is of another model: ") as error:
        quack.load_state_dict(state)
    assert message in str(error.value)
    assert_equal(quack.rates(), rates)


def fused(repeat: int) -> QuacK:
    """[q | k] or [h, 2, d]: the same shape, the same number of blocks, other rows."""
    param = nn.Parameter(torch.randn(8, 3))
    heads = 4 // repeat
    weights = packed(param, ("q", heads, 1), ("k", heads, 1), repeat=repeat)
    return QuacK(mha(*weights), torch.optim.SGD([param], lr=0.1), tau=1.0)


def test_a_state_of_other_rows_is_refused() -> None:
    concat, per_head = fused(1), fused(4)
    concat.load_state_dict(concat.state_dict())
    with pytest.raises(ValueError, match="k has rows [0-9a-f]+ in the state, [0-9a-f]+ in the model"):
        per_head.load_state_dict(concat.state_dict())


@pytest.mark.parametrize("saved_after", [1, 2])
def test_a_run_whose_optimizers_step_at_different_times_resumes_bitwise(saved_after: int, tmp_path: Path) -> None:
    """The second optimizer steps every second iteration, before the first: it uses the rates of the last one."""

    def begin(seed: int) -> tuple[nn.Module, list[torch.optim.Optimizer], QuacK]:
        torch.manual_seed(seed)
        model = layers(1, lambda: Separate(bias=True))
        matrices, biases = ([p for p in model.parameters() if p.ndim == n] for n in (2, 1))
        optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD(matrices, lr=0.1), torch.optim.SGD(biases, lr=0.1)]
        return model, optimizers, QuacK(model, optimizers, tau=0.5)

    def go_on(model: nn.Module, optimizers: list[torch.optim.Optimizer], steps: range) -> None:
        for step in steps:
            train(model, *(optimizers[::-1] if step % 2 else optimizers[:1]), steps=1, seed=step)
            model.zero_grad()

    model, optimizers, quack = begin(seed=0)
    go_on(model, optimizers, range(saved_after))
    states = model.state_dict(), [each.state_dict() for each in optimizers], quack.state_dict()
    torch.save(states, tmp_path / "checkpoint.pt")
    go_on(model, optimizers, range(saved_after, 6))

    resumed, resumed_optimizers, resumed_quack = begin(seed=9)
    weights, moments, state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    resumed.load_state_dict(weights)
    for each, moment in zip(resumed_optimizers, moments, strict=True):
        each.load_state_dict(moment)
    resumed_quack.load_state_dict(state)
    go_on(resumed, resumed_optimizers, range(saved_after, 6))
    assert_equal(list(resumed.state_dict().values()), list(model.state_dict().values()))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("sensitivity", torch.tensor([0.0, 1.0, 1.0, 1.0]), "4 finite numbers above 0"),
        ("sensitivity", torch.tensor([torch.nan, 1.0, 1.0, 1.0]), "4 finite numbers above 0"),
        ("sensitivity", "abc", "4 finite numbers above 0, not abc"),
        ("rates", torch.tensor([-1.0, 1.0, 1.0, 1.0]), "4 finite numbers from 0 up"),
        ("rates", torch.ones(3), "4 finite numbers from 0 up"),
        ("rates", torch.ones(4, dtype=torch.long), "4 finite numbers from 0 up"),
    ],
)
def test_a_state_with_numbers_that_cannot_be_is_refused_and_changes_nothing(key: str, value: Any, message: str) -> None:
    _, _, quack = run()
    before = quack.state_dict()
    broken = quack.state_dict()
    broken[key]["0.q"] = value
    with pytest.raises(ValueError, match=f"0.q: its {key} in the state must be {message}"):
        quack.load_state_dict(broken)
    assert all(torch.equal(quack.state_dict()[each]["0.q"], before[each]["0.q"]) for each in ("sensitivity", "rates"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda _: None, "this is not the state of a QuacK"),
        (lambda _: {"state": {}, "param_groups": []}, "this is not the state of a QuacK"),
        (
            lambda state: {**state, "rates": 3},
            "this is not the state of a QuacK of this version: it has no valid 'rates'",
        ),
        (lambda state: {**state, "version": 99}, "version 99, and this quacklr reads version 3 only"),
        (lambda state: {**state, "norm": "spectral"}, "made with norm=spectral, but this QuacK has norm=frobenius"),
        (lambda state: {**state, "rule": "Limit"}, "that of rule Limit, which has no sensitivities at the start"),
    ],
)
def test_what_is_no_state_or_one_of_another_rule_or_norm_is_refused(change: Callable[[Any], Any], message: str) -> None:
    _, _, quack = run()
    with pytest.raises(ValueError, match=message):
        quack.load_state_dict(change(quack.state_dict()))


def test_settings_that_are_fixed_when_attached_cannot_be_set_later() -> None:
    _, _, quack = run()
    for name, value in (("floor", 1.0), ("norm", spectral)):
        with pytest.raises(AttributeError):
            setattr(quack.rule, name, value)


class Unknown(Separate):
    """Declares no path, and no table has it: it is measured on the first batch."""

    logit_paths: Any = None


def test_a_state_may_be_saved_and_loaded_before_the_first_batch() -> None:
    model, optimizer, quack = run(Unknown)
    nothing = quack.state_dict()
    assert "attention will be measured on the first batch: 0, 1" in repr(quack)
    train(model, optimizer, steps=2)
    state, rates = quack.state_dict(), quack.rates()
    quack.load_state_dict(nothing)  # there is nothing to load
    assert_equal(quack.rates(), rates)

    resumed, resumed_optimizer, resumed_quack = run(Unknown, seed=9)
    resumed.load_state_dict(model.state_dict())
    resumed_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    resumed_quack.load_state_dict(state)
    assert resumed_quack.state_dict() == state
    for each in ((model, optimizer), (resumed, resumed_optimizer)):
        train(*each, steps=2, seed=2)
    assert_equal(list(resumed.state_dict().values()), list(model.state_dict().values()))
    assert_equal(resumed_quack.rates(), quack.rates())
