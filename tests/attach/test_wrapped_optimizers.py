"""QuacK scales the step of the object that moves the weights. Judge: the same wrapper with lr * tau, by hand.

With a budget any optimizer will do: the step that was taken is scaled, whatever made it.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from models import Separate
from quacklr import Budget, ConstantTau, QKClip, QuacK

Closure = Callable[[], Tensor]
TAU, STEPS, BUDGET = 0.5, 14, 0.01


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
    """As timm's Lookahead: it has tables of hooks, which never run, because it does not call torch's constructor."""

    def __init__(self, base_optimizer: Optimizer, k: int = 4) -> None:
        self._base_optimizer, self.k, self.count = base_optimizer, k, 0
        self.param_groups, self.defaults = base_optimizer.param_groups, base_optimizer.defaults
        self.state = defaultdict(dict)
        self._optimizer_step_pre_hooks: Any = OrderedDict()
        self._optimizer_step_post_hooks: Any = OrderedDict()

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


def in_training(optimizer: Any, backward: Closure) -> None:
    optimizer.train()
    plain(optimizer, backward)


WRAPPERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Closure], None], list[str]]] = {
    "SAM with a closure": (lambda groups: SAM(groups, AdamW, lr=0.01), with_closure, ["AdamW"]),
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


class Unknown(Lookahead):
    """A wrapper of a class that quacklr does not know."""


def test_an_unknown_wrapper_is_a_warning_and_the_inner_optimizer_is_hooked() -> None:
    model = nn.Sequential(Separate())
    inner = AdamW(model.parameters())
    with pytest.warns(UserWarning, match="^Unknown has a AdamW inside, .*; wrappers are not tested") as seen:
        quack = QuacK(model, Unknown(inner), tau=1.0)
    assert quack.optimizers == [inner]
    assert seen[0].filename == __file__


def test_qk_clip_accepts_any_optimizer_and_hooks_the_whole_step() -> None:
    model = nn.Sequential(Separate())
    for optimizer in (torch.optim.ASGD(model.parameters()), Several([{"params": list(model.parameters())}])):
        with QKClip(model, optimizer, 100.0) as clip:
            assert clip.optimizers == [optimizer]


def test_what_is_no_optimizer_is_refused() -> None:
    model = nn.Sequential(Separate())
    optimizer = SGD(model.parameters(), lr=0.1)
    vars(model)["opt"] = optimizer
    for given in (torch.optim.lr_scheduler.ConstantLR(optimizer), model, "adam", None, torch.amp.GradScaler("cpu")):
        with pytest.raises(ValueError, match=f"{type(given).__name__} is not a torch.optim.Optimizer"):
            QuacK(model, [given], tau=1.0)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="no optimizer given"):
        QuacK(model, [], tau=1.0)


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
    with pytest.raises(ValueError, match="or Unhooked.step runs no hooks"):
        QuacK(model, Unhooked(model.parameters()), tau=1.0)
    with pytest.raises(ValueError, match="InBackward has no step of its own"):
        QuacK(model, InBackward(model.parameters()), tau=1.0)


class SamAlone(SGD):
    """Has no optimizer inside."""

    def second_step(self) -> None: ...


def test_two_steps_by_hand_that_run_no_hooks_are_a_warning() -> None:
    model = nn.Sequential(Separate())
    with pytest.warns(UserWarning, match="only the steps that SamAlone.step takes are seen"):
        QuacK(model, SamAlone(model.parameters(), lr=0.1), tau=1.0)


class KeepsCopies(SGD):
    """Steps a copy of the weights, and sets the weights to it, as an optimizer with master weights does."""

    @torch.no_grad()
    def step(self, _: Any = None) -> Any:
        for param in self.param_groups[0]["params"]:
            master = self.state[param].setdefault("master", param.detach().clone())
            master.sub_(param.grad, alpha=self.param_groups[0]["lr"])
            param.copy_(master)


def step(model: nn.Module, optimizer: Optimizer) -> None:
    torch.manual_seed(1)
    x_BTD, target = torch.randn(4, 6, 16), torch.randn(4, 6, 16)

    def closure() -> Tensor:
        optimizer.zero_grad()
        with torch.enable_grad():
            loss = (model(x_BTD) - target).square().mean()
        loss.backward()
        return loss

    closure()
    optimizer.step(closure)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:only the steps that SAM.step takes are seen", "ignore:SAM keeps a copy")
@pytest.mark.parametrize(
    ("make", "inside"),
    [
        (lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=4), False),
        (lambda params: torch.optim.Rprop(params, lr=0.1), False),
        (lambda params: SAM(params, SGD, lr=0.1), False),
        (lambda params: Lookahead(SGD(params, lr=0.1)), True),  # its own step runs no hooks
    ],
)
def test_with_a_budget_the_change_of_every_step_is_the_budget(make: Any, inside: bool) -> None:
    torch.manual_seed(0)
    attention = Separate()
    model = nn.Sequential(attention)
    optimizer = make(model.parameters())
    q, k = attention.q.weight, attention.k.weight
    with QuacK(model, optimizer, rule=Budget(BUDGET)) as quack:
        assert quack.optimizers == [optimizer._base_optimizer if inside else optimizer]
        for _ in range(3):
            before = {param: param.detach().clone() for param in (q, k)}
            step(model, optimizer)
            change = quack.changes()["0"]
            moves = change.asked > BUDGET / 900
            assert moves.any()
            assert change.given[moves].tolist() == pytest.approx([BUDGET] * int(moves.sum()), rel=1e-2)
            for rows in torch.arange(16).split(4):
                moved = q.detach()[rows].mT @ k.detach()[rows] - before[q][rows].mT @ before[k][rows]
                assert float(moved.norm()) / 2 <= BUDGET


def test_with_a_budget_an_optimizer_that_keeps_a_copy_of_the_weights_is_warned_of() -> None:
    model = nn.Sequential(Separate())
    optimizer = KeepsCopies(model.parameters(), lr=0.1)
    warned = pytest.warns(UserWarning, match="KeepsCopies keeps a copy.*'master'")
    with QuacK(model, optimizer, rule=Budget(BUDGET)), warned as seen:
        step(model, optimizer)
    assert seen[0].filename == __file__  # the line that called optimizer.step
