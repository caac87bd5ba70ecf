"""A budget with any optimizer: the step that was taken is scaled, whatever made it."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from models import Separate
from quacklr import Budget, QuacK

BUDGET = 0.01

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.1),
    "LBFGS": lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=4),
    "Rprop": lambda params: torch.optim.Rprop(params, lr=0.1),
    "Muon": lambda params: torch.optim.Muon(params, lr=0.1),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.1),
}


class SAM(Optimizer):
    """Sharpness-aware minimisation: gradients at perturbed weights, then a step of the base optimizer."""

    def __init__(self, params: Any, lr: float = 0.1, rho: float = 0.5) -> None:
        super().__init__(list(params), {"lr": lr, "rho": rho})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=lr)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        old = [param.clone() for param in params]
        for param in params:
            param.add_(param.grad, alpha=0.5)
        with torch.enable_grad():
            closure()
        for param, value in zip(params, old, strict=True):
            param.copy_(value)
        self.base_optimizer.step()


class KeepsCopies(torch.optim.SGD):
    """Steps a copy of the weights, and sets the weights to it, as an optimizer with master weights does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for param in group["params"]:
                master = self.state[param].setdefault("master", param.detach().clone())
                master.sub_(param.grad, alpha=group["lr"])
                param.copy_(master)


def steps(model: nn.Module, optimizer: Optimizer, count: int) -> None:
    torch.manual_seed(1)
    x_BTD, target = torch.randn(4, 6, 16), torch.randn(4, 6, 16)

    def closure() -> float:
        optimizer.zero_grad()
        loss = (model(x_BTD) - target).square().mean()
        loss.backward()
        return loss.item()

    for _ in range(count):
        closure()
        optimizer.step(closure)


@pytest.mark.parametrize("name", [*OPTIMIZERS, "SAM"])
def test_the_change_of_every_step_is_the_budget(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Separate())
    optimizer = SAM(model.parameters()) if name == "SAM" else OPTIMIZERS[name](model.parameters())
    with warnings.catch_warnings(action="error"), QuacK(model, optimizer, rule=Budget(BUDGET)) as quack:
        assert quack.optimizers == [optimizer]
        for _ in range(4):
            before = {param: param.detach().clone() for param in model.parameters()}
            steps(model, optimizer, 1)
            change = quack.changes()["0"]
            moves = change.asked > BUDGET / 900
            assert moves.any()
            assert change.given[moves].tolist() == pytest.approx([BUDGET] * int(moves.sum()), rel=1e-2)
            attention: Any = model[0]
            q, k = attention.q.weight, attention.k.weight
            for head in range(4):
                rows = slice(4 * head, 4 * head + 4)
                moved = q.detach()[rows].mT @ k.detach()[rows] - before[q][rows].mT @ before[k][rows]
                assert float(moved.norm()) / 2 <= BUDGET


def test_an_optimizer_that_keeps_a_copy_of_the_weights_is_warned_of() -> None:
    model = nn.Sequential(Separate())
    optimizer = KeepsCopies(model.parameters(), lr=0.1)
    warned = pytest.warns(UserWarning, match="KeepsCopies keeps a copy.*'master'")
    with QuacK(model, optimizer, rule=Budget(BUDGET)), warned as seen:
        steps(model, optimizer, 1)
    assert seen[0].filename == __file__  # the line that called optimizer.step


class Wrapper(Optimizer):
    """As timm's Lookahead: has the tables of hooks, and no hooks in its step, as torch's constructor is not run."""

    def __init__(self, base: Optimizer) -> None:
        self.base_optimizer, self.param_groups, self.state = base, base.param_groups, base.state
        self.defaults = base.defaults
        self._optimizer_step_pre_hooks: Any = OrderedDict()
        self._optimizer_step_post_hooks: Any = OrderedDict()

    def step(self, closure: Any = None) -> Any:
        return self.base_optimizer.step(closure)


def test_a_wrapper_whose_step_runs_no_hooks_is_attached_to_inside() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Separate())
    wrapper = Wrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    with QuacK(model, wrapper, rule=Budget(BUDGET)) as quack:
        assert quack.optimizers == [wrapper.base_optimizer]
        for param in model.parameters():
            param.grad = torch.randn_like(param)
        wrapper.step()
        assert quack.changes()["0"].given.tolist() == pytest.approx([BUDGET] * 4, rel=1e-2)
