"""QuacK scales the step of the object that moves the weights. Judge: the same wrapper with lr * tau, by hand."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from models import Separate
from quacklr import ConstantTau, QKClip, QuacK

Closure = Callable[[], Tensor]
TAU, STEPS = 0.5, 14


class SAM(Optimizer):
    """Two steps: to where the loss is larger, and from the weights before it with the gradient found there."""

    def __init__(self, params: Any, base_optimizer: type[Optimizer], rho: float = 0.05, **kwargs: Any) -> None:
        super().__init__(params, {"rho": rho, **kwargs})
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["before"] = param.clone()
                param.add_(group["rho"] * param.grad / param.grad.norm())

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.data = self.state[param]["before"]
        self.base_optimizer.step()

    def step(self, closure: Closure) -> None:  # type: ignore[override]
        self.first_step()
        closure()
        self.second_step()


class Lookahead(Optimizer):
    """Lookahead around an optimizer. Does not call the constructor of torch, so that its hooks never run."""

    def __init__(self, base_optimizer: Optimizer, k: int = 4) -> None:
        self._base_optimizer, self.k, self.count = base_optimizer, k, 0
        self.param_groups, self.defaults = base_optimizer.param_groups, base_optimizer.defaults
        self.state = defaultdict(dict)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param].setdefault("slow", param.clone())
        self._base_optimizer.step(closure)
        self.count += 1
        for param, state in self.state.items() if self.count % self.k == 0 else ():
            param.copy_(state["slow"].lerp_(param, 0.5))


class Several(Optimizer):
    """A container with param groups of its own, which are never stepped."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        params = [param for group in params for param in group["params"]]
        self.optimizers = [AdamW(params[:1], lr=lr), SGD(params[1:], lr=lr, momentum=0.9)]
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for optimizer in self.optimizers:
            optimizer.step(closure)


class ScheduleFreeWrapper:
    """Not an Optimizer. The inner optimizer steps other weights, and the result is averaged into the model's."""

    def __init__(self, base: Optimizer) -> None:
        self.base, self.training = base, False

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.base.param_groups

    def train(self) -> None:
        self.training = True

    def zero_grad(self) -> None:
        self.base.zero_grad()

    @torch.no_grad()
    def step(self) -> None:
        assert self.training
        for group in self.param_groups:
            for param in group["params"]:
                state = self.base.state[param]
                state.setdefault("z", param.clone())
                state["y"] = param.clone()
                param.copy_(state["z"])
        self.base.step()
        for group in self.param_groups:
            for param in group["params"]:
                state = self.base.state[param]
                state["z"].copy_(param)
                param.copy_(state["y"].lerp(param, 0.3))


class Hybrid(Optimizer):
    """Steps the first parameter itself, and leaves the rest to another optimizer."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})
        first, *rest = self.param_groups[0]["params"]
        self.own, self.adam = first, AdamW(rest, lr=lr)

    @torch.no_grad()
    def step(self, *_: Any) -> None:  # type: ignore[override]
        self.adam.step()
        self.own.sub_(self.own.grad, alpha=self.param_groups[0]["lr"])


def plain(optimizer: Any, backward: Closure) -> None:
    backward()
    optimizer.step()


def with_closure(optimizer: Any, backward: Closure) -> None:
    backward()
    optimizer.step(backward)


def by_hand(optimizer: Any, backward: Closure) -> None:
    backward()
    optimizer.first_step()
    backward()
    optimizer.second_step()


def in_training(optimizer: Any, backward: Closure) -> None:
    optimizer.train()
    plain(optimizer, backward)


WRAPPERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Closure], None], list[str]]] = {
    "SAM with a closure": (lambda groups: SAM(groups, AdamW, lr=0.01), with_closure, ["AdamW"]),
    "SAM by hand": (lambda groups: SAM(groups, SGD, lr=0.01, momentum=0.9), by_hand, ["SGD"]),
    "Lookahead": (lambda groups: Lookahead(AdamW(groups, lr=0.01)), plain, ["AdamW"]),
    "Lookahead around SAM": (lambda groups: Lookahead(SAM(groups, AdamW, lr=0.01)), with_closure, ["AdamW"]),
    "a container": (Several, plain, ["AdamW", "SGD"]),
    "no optimizer": (lambda groups: ScheduleFreeWrapper(SGD(groups, lr=0.01, momentum=0.9)), in_training, ["SGD"]),
    "an optimizer for a part": (Hybrid, plain, ["Hybrid"]),
}


def groups_of(wrapper: Any) -> list[dict[str, Any]]:
    """All param groups with an lr, of a wrapper and of the optimizers inside it."""
    inside = [value for value in vars(wrapper).values() if isinstance(value, Optimizer)]
    inside += getattr(wrapper, "optimizers", [])
    groups = getattr(wrapper, "param_groups", []) + [group for each in inside for group in groups_of(each)]
    return list({id(group): group for group in groups if "lr" in group}.values())


def trained(name: str, quack: bool) -> tuple[list[Tensor], list[str]]:
    make, step, _ = WRAPPERS[name]
    torch.manual_seed(0)
    model = Separate().double()
    model.v.requires_grad_(False)
    wrapper = make([{"params": [model.q.weight, model.k.weight]}])
    attached = QuacK(nn.Sequential(model), wrapper, rule=ConstantTau(TAU)) if quack else None
    for group in groups_of(wrapper) if not quack else ():
        group["lr"] *= TAU
    for i in range(STEPS):
        x_BTD = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(i)).double()

        def backward(x_BTD: Tensor = x_BTD) -> Tensor:
            model.zero_grad()
            with torch.enable_grad():
                loss = 100 * model(x_BTD).square().mean()
            loss.backward()
            return loss

        step(wrapper, backward)
    hooked = [type(optimizer).__name__ for optimizer in attached.optimizers] if attached else []
    return [model.q.weight.detach().clone(), model.k.weight.detach().clone()], hooked


@pytest.mark.filterwarnings("ignore:Hybrid could not be tested")
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_with_quack_steps_as_with_a_scaled_lr(name: str) -> None:
    mine, hooked = trained(name, quack=True)
    theirs, _ = trained(name, quack=False)
    assert hooked == WRAPPERS[name][2]
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)
    torch.manual_seed(0)
    assert all(
        (now - was).norm() > 1e-3 for now, was in zip(mine, list(Separate().double().parameters())[:2], strict=True)
    )


class Unknown(Lookahead):
    """A wrapper of a class that quacklr does not know."""


def test_an_unknown_wrapper_is_a_warning_and_the_inner_optimizer_is_hooked() -> None:
    model = nn.Sequential(Separate())
    inner = AdamW(model.parameters())
    with pytest.warns(UserWarning, match="^Unknown has a AdamW inside, .*; wrappers are not tested") as seen:
        quack = QuacK(model, Unknown(inner))
    assert quack.optimizers == [inner]
    assert seen[0].filename == __file__


def test_qk_clip_accepts_any_optimizer_and_hooks_the_whole_step() -> None:
    model = nn.Sequential(Separate())
    for optimizer in (torch.optim.ASGD(model.parameters()), Several([{"params": list(model.parameters())}])):
        with QKClip(model, optimizer, 100.0) as clip:
            assert clip.optimizers == [optimizer]


def test_other_objects_that_hold_an_optimizer_are_refused() -> None:
    model = nn.Sequential(Separate())
    optimizer = SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    model.register_module("more", nn.Identity())
    vars(model)["opt"] = optimizer
    for given in (scheduler, model, 3, "adam", torch.amp.GradScaler("cpu")):
        with pytest.raises(ValueError, match=f"{type(given).__name__} is not a torch.optim.Optimizer"):
            QuacK(model, [given])  # type: ignore[list-item]


class Unhooked(SGD):
    def __init__(self, params: Any) -> None:
        self.param_groups, self.state = [{"params": list(params), "lr": 0.1}], defaultdict(dict)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)


class InBackward(Optimizer):
    """Weights move in the backward pass."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})


def test_an_optimizer_whose_hooks_can_never_run_is_refused() -> None:
    model = nn.Sequential(Separate())
    with pytest.raises(ValueError, match="Unhooked.step runs no hooks"):
        QuacK(model, Unhooked(model.parameters()))
    with pytest.raises(ValueError, match="InBackward has no step of its own"):
        QuacK(model, InBackward(model.parameters()))


class SamAlone(SGD):
    """Has no optimizer inside."""

    def second_step(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.data.sub_(param.grad, alpha=group["lr"])


def test_two_steps_by_hand_that_run_no_hooks_are_a_warning() -> None:
    model = nn.Sequential(Separate())
    with pytest.warns(UserWarning, match="only the steps that SamAlone.step takes are seen"):
        QuacK(model, SamAlone(model.parameters(), lr=0.1))
