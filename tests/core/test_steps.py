"""Scaling an optimizer's step by hooks: schedules, clipping, closures, exceptions, several optimizers."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models import Separate, assert_equal, layers, train
from quacklr import Budget, ConstantTau, Paper, QuacK, Rule


def parameters(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def tokens() -> Tensor:
    return torch.randn(1, 3, 16, generator=torch.Generator().manual_seed(0))


def model_and_optimizer(bias: bool = False, lr: float = 0.1) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = layers(2, lambda: Separate(bias=bias))
    return model, torch.optim.AdamW(model.parameters(), lr=lr)


def test_the_learning_rate_that_others_see_is_never_written() -> None:
    model, optimizer = model_and_optimizer()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    quack = QuacK(model, optimizer, tau=0.5)
    seen = []
    for _ in range(3):
        train(model, optimizer, steps=1)
        seen.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
    assert seen == [0.1, 0.05, 0.1 / 3]
    assert len(optimizer.param_groups) == 1
    assert set(optimizer.state_dict()) == {"state", "param_groups"}
    assert (quack.rates()["0.q"] - 0.5).abs().max() > 0.01


def test_an_overflow_of_the_grad_scaler_changes_nothing() -> None:
    """With a fused optimizer the scaler calls its step, and the hooks, also after an overflow."""
    model, _ = model_and_optimizer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0, fused=True)
    quack = QuacK(model, optimizer, tau=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = parameters(model)
    scaler.scale(model(torch.full((1, 2, 16), torch.inf)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert_equal(parameters(model), before)
    optimizer.zero_grad()
    rates = quack.rates()
    scaler.scale(model(tokens()).square().sum()).backward()
    scaler.step(optimizer)
    moved = (model[0].q.weight.detach() - before[0]).abs().max()  # type: ignore[union-attr, operator]
    assert rates["0.q"].tolist() == [0.5] * 4
    torch.testing.assert_close(float(moved), 0.05, rtol=1e-3, atol=0)  # the first step of Adam is lr


@pytest.mark.parametrize("positional", [True, False])
def test_a_step_whose_closure_runs_the_first_batch_is_scaled(positional: bool) -> None:
    """No path is known before the closure has run: this attention is measured."""
    attention = type("Unknown", (Separate,), {"logit_paths": None})()
    model = nn.Sequential(attention)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    QuacK(model, optimizer, rule=ConstantTau(0.5))
    before = parameters(model)

    def closure() -> Tensor:
        loss: Tensor = model(tokens()).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure) if positional else optimizer.step(closure=closure)
    for param, old, rate in zip(model.parameters(), before, (0.5, 0.5, 1.0), strict=True):
        assert param.grad is not None
        torch.testing.assert_close(param.detach(), old - 0.1 * rate * param.grad)


def test_after_a_step_that_raised_the_next_starts_clean() -> None:
    model, optimizer = model_and_optimizer()
    quack = QuacK(model, optimizer, tau=0.5)

    def fails() -> float:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step(fails)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)  # the weights change in between; a stale copy would undo this
    before = parameters(model)
    optimizer.param_groups[0]["lr"] = 0.0
    train(model, optimizer, steps=1)
    assert_equal(parameters(model), before)
    optimizer.param_groups[0]["lr"] = 0.1
    rates = quack.rates()
    train(model, optimizer, steps=1)
    assert rates["0.q"].tolist() == [0.25] * 4
    moved = (model[0].q.weight.detach() - before[0]).abs().max()  # type: ignore[union-attr, operator]
    torch.testing.assert_close(float(moved), 0.1 * 0.25 + 0.25 * 1e-3 * float(before[0].abs().max()), rtol=0.05, atol=0)


@pytest.mark.parametrize("lr", [0.0, torch.tensor(0.0)])
def test_a_step_with_lr_0_captures_and_changes_nothing(lr: float | Tensor) -> None:
    model, optimizer = model_and_optimizer()
    quack = QuacK(model, optimizer, tau=0.5)
    before = parameters(model)
    optimizer.param_groups[0]["lr"] = lr
    train(model, optimizer, steps=2)
    assert_equal(parameters(model), before)
    assert not any(quack.state_dict()["stepped"].values())


def two_optimizers(order: int, attach: bool) -> tuple[nn.Sequential, list[torch.optim.Optimizer], QuacK | None]:
    model, _ = model_and_optimizer(bias=True)
    matrices = [param for param in model.parameters() if param.ndim == 2]
    biases = [param for param in model.parameters() if param.ndim == 1]
    optimizers = [torch.optim.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.AdamW(biases, lr=0.01)][::order]
    return model, optimizers, QuacK(model, optimizers, tau=0.5) if attach else None


@pytest.mark.parametrize("order", [1, -1])
def test_two_optimizers_use_the_same_rates_in_one_iteration(order: int) -> None:
    """Judge: the plain steps, scaled by hand with the rates of before both."""
    model, optimizers, quack = two_optimizers(order, attach=True)
    plain, plain_optimizers, _ = two_optimizers(order, attach=False)
    assert quack is not None
    for step in range(3):
        rates = {name: quack.rate_of(param) for name, param in model.named_parameters()}
        old = {name: param.detach().clone() for name, param in model.named_parameters()}
        with torch.no_grad():
            for name, param in plain.named_parameters():
                param.copy_(old[name])
        train(model, *optimizers, steps=1, seed=step)
        train(plain, *plain_optimizers, steps=1, seed=step)
        for name, param in plain.named_parameters():
            rate = torch.ones(()) if (found := rates[name]) is None else found
            torch.testing.assert_close(
                model.get_parameter(name).detach(),
                old[name] + rate * (param.detach() - old[name]),
                rtol=1e-5,
                atol=1e-7,
            )
    assert (quack.rates()["0.q"] - 0.5).abs().max() > 0.001


def test_an_iteration_ends_when_an_optimizer_steps_again() -> None:
    model, optimizers, quack = two_optimizers(1, attach=True)
    assert quack is not None
    for optimizer, begins in ((0, True), (0, True), (1, False), (1, True), (0, False), (0, True)):
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        fresh = quack.rates()["0.q"]
        optimizers[optimizer].step()
        used = quack.rule.rates[quack.rule.paths.blocks.flat_index[quack.rule.paths.weights[0]]]
        assert torch.equal(used, fresh) == begins


class Own(nn.Module):
    """Attention of a class that is in no table."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k = (project(x_BTD).unflatten(2, (2, 4)).transpose(1, 2) for project in (self.first, self.second))
        return nn.functional.scaled_dot_product_attention(q, k, k).transpose(1, 2).flatten(2)


class TextAndImages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.text, self.images = Own(), Own()

    def forward(self, x_BTD: Tensor, images: bool = False) -> Tensor:
        text_BTD: Tensor = self.text(x_BTD)
        return text_BTD + self.images(x_BTD) if images else text_BTD


@pytest.mark.parametrize("rule", [lambda: Paper(0.5), lambda: Budget(0.05)])
def test_paths_that_are_found_between_two_steps_of_an_iteration_change_nothing_for_the_others(
    rule: Callable[[], Rule],
) -> None:
    """Images run for the first time after the first optimizer has stepped. Judge: the run without images."""
    found: list[Any] = []
    for late in (False, True):
        torch.manual_seed(0)
        model, x_BTD = TextAndImages(), torch.randn(2, 5, 8)
        text = [model.text.first.weight, model.text.second.weight]
        first = torch.optim.SGD(text[:1], lr=1.0)
        second = torch.optim.SGD([*text[1:], *model.images.parameters()], lr=1.0)
        quack = QuacK(model, [first, second], rule=rule())
        for iteration in range(2):
            model(x_BTD)
            quack.changes()
            for param in text:
                param.grad = torch.randn(8, 8)
            first.step()
            if late and iteration:
                model(x_BTD, images=True)
            second.step()
        assert set(quack.changes()) == ({"text", "images"} if late else {"text"})
        rates = quack.rates(last=True)
        found.append((model.text.state_dict(), quack.changes()["text"], {n: rates[n] for n in rates if "text" in n}))
        assert len(found[-1][2]) == 2
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_remove_leaves_the_optimizer_as_it_was() -> None:
    model, optimizer = model_and_optimizer()
    with QuacK(model, optimizer, tau=0.1) as quack:
        pass
    quack.remove()
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert not optimizer._optimizer_load_state_dict_post_hooks
    plain, plain_optimizer = model_and_optimizer()
    train(model, optimizer)
    train(plain, plain_optimizer)
    assert_equal(parameters(model), parameters(plain))


def test_a_copy_that_would_do_nothing_is_refused() -> None:
    model = layers(1, Separate)
    quack = QuacK(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for make in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="a QuacK cannot be copied or pickled; attach a new one"):
            make(quack)


def test_setting_tau_between_two_optimizers_keeps_the_rates_of_the_iteration() -> None:
    model = layers(1, lambda: Separate(bias=True))
    first, second = (torch.optim.SGD([p for p in model.parameters() if p.ndim == n], lr=0.1) for n in (2, 1))
    quack = QuacK(model, [first, second], tau=1.0)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    first.step()
    rates = quack.rates(last=True)
    quack.rule.tau = 0.5  # type: ignore[attr-defined]
    second.step()
    assert_equal(quack.rates(last=True), rates)
    first.step()
    assert quack.rates(last=True)["0.q"].max() < 0.6
