"""Steps that call other steps, param groups that change, tensors that were replaced, and the checks of a first step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from models import Separate, assert_equal, layers, train
from quacklr import ConstantTau, Paper, QuacK, Weight, mha

LR, TAU = 0.1, 0.5


def parameter(value: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.full((2, 3), value))


def attached(optimizer: Optimizer | list[Optimizer], q: Tensor, k: Tensor, adapt: bool = True) -> QuacK:
    weights = Weight("q", q, torch.arange(2)), Weight("k", k, torch.arange(2))
    return QuacK(mha(*weights), optimizer, rule=Paper(TAU) if adapt else ConstantTau(TAU))


def give_gradients(*params: Tensor) -> None:
    for param in params:
        param.grad = torch.ones_like(param)


class TwiceSGD(SGD):
    """Its parent's step, then as much again: each step is 2 * lr * gradient."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        self._again()

    @torch.no_grad()
    def _again(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(param.grad, alpha=-group["lr"])


class BeforeSGD(TwiceSGD):
    """The same update, then its parent's step."""

    def step(self, closure: Any = None) -> Any:
        self._again()
        SGD.step(self, closure)


class ThriceSGD(TwiceSGD):
    """Three classes deep: 3 * lr * gradient."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        self._again()


class RetriesSGD(TwiceSGD):
    """Its parent's step fails first, and the failure is handled within the step."""

    def step(self, closure: Any = None) -> Any:
        try:
            SGD.step(self, _fails)
        except ArithmeticError:
            SGD.step(self, closure)
        self._again()


def _fails() -> float:
    raise ArithmeticError


@pytest.mark.parametrize(("cls", "times"), [(SGD, 1), (TwiceSGD, 2), (BeforeSGD, 2), (ThriceSGD, 3), (RetriesSGD, 2)])
def test_a_step_that_calls_its_parents_step_is_scaled_once_as_a_whole(cls: Any, times: int) -> None:
    for parent in cls.__mro__[:-3]:
        parent([parameter()], lr=LR)  # torch hooks a class's step when the class is first instantiated
    q, k = parameter(), parameter()
    optimizer = cls([q, k], lr=LR)
    attached(optimizer, q, k, adapt=False)
    for step in (1, 2):
        give_gradients(q, k)
        optimizer.step()
        torch.testing.assert_close(q.detach(), torch.full((2, 3), 1 - step * times * TAU * LR))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, from its compiler
def test_a_compiled_step_that_calls_its_parents_step_is_scaled_once() -> None:
    SGD([parameter()], lr=LR)
    q, k = parameter(), parameter()
    optimizer = TwiceSGD([q, k], lr=LR)
    attached(optimizer, q, k, adapt=False)
    give_gradients(q, k)
    torch.compile(optimizer.step, backend="eager")()
    torch.testing.assert_close(q.detach(), torch.full((2, 3), 1 - 2 * TAU * LR))


class Outer(TwiceSGD):
    """Steps another optimizer that has the same tensors, then moves them itself."""

    def __init__(self, inside: Optimizer, **options: Any) -> None:
        self.inside = inside
        super().__init__([param for group in inside.param_groups for param in group["params"]], **options)

    def step(self, closure: Any = None) -> Any:
        self.inside.step(closure)
        self._again()


@pytest.mark.filterwarnings("ignore:Outer could not be tested")
def test_a_step_that_calls_another_optimizers_step_on_the_same_tensors_is_scaled_once() -> None:
    q, k = parameter(), parameter()
    inside = SGD([q, k], lr=LR)
    outside = Outer(inside, lr=LR)
    attached([inside, outside], q, k, adapt=False)
    give_gradients(q, k)
    outside.step()
    torch.testing.assert_close(q.detach(), torch.full((2, 3), 1 - 2 * TAU * LR))


def test_a_nested_step_begins_no_iteration_in_the_middle_of_a_step() -> None:
    """Two optimizers with a parameter each. The second must use the rates that the first began with."""
    q, k = parameter(), parameter()
    first, second = TwiceSGD([q], lr=LR), SGD([k], lr=LR)
    quack = attached([first, second], q, k)
    with torch.no_grad():
        q.mul_(3)
    rates = quack.rates()
    give_gradients(q, k)
    first.step()
    second.step()
    torch.testing.assert_close(k.detach(), 1 - LR * rates["k"].view(2, 1).expand(2, 3))


@pytest.mark.filterwarnings("ignore:k. 1 of 2 weights on the paths are no longer")
def test_an_iteration_begins_when_a_tensor_steps_again_not_when_an_optimizer_does() -> None:
    """As DeepSpeed's ZeRO does: one optimizer steps several times an iteration, each time with other groups."""
    q, k = parameter(), parameter()
    optimizer = SGD([{"params": [q]}, {"params": [k]}], lr=LR)
    quack = attached(optimizer, q, k)
    with torch.no_grad():
        q.mul_(3)
    groups = optimizer.param_groups
    for _ in range(2):
        rates, before = quack.rates(), k.detach().clone()
        give_gradients(q, k)
        for group in groups:
            optimizer.param_groups = [group]
            optimizer.step()
        optimizer.param_groups = groups
        torch.testing.assert_close(k.detach(), before - LR * rates["k"].view(2, 1))


def test_an_optimizer_without_a_weight_on_a_path_begins_no_iteration() -> None:
    q, k, other = parameter(), parameter(), parameter()
    weights, rest = SGD([q, k], lr=LR), SGD([other], lr=LR)
    quack = attached([weights, rest], q, k)
    give_gradients(q, k, other)
    weights.step()
    rates = quack.rates(last=True)
    with torch.no_grad():
        q.mul_(3)
    rest.step()
    rest.step()
    assert_equal(quack.rates(last=True), rates)
    torch.testing.assert_close(other.detach(), torch.full((2, 3), 1 - 2 * LR))


def test_a_parameter_that_joins_the_optimizer_later_is_scaled() -> None:
    q, k = parameter(), parameter()
    k.requires_grad_(False)  # gradual unfreezing
    optimizer = SGD([q], lr=LR)
    quack = attached(optimizer, q, k, adapt=False)
    give_gradients(q)
    optimizer.step()
    k.requires_grad_(True)
    optimizer.add_param_group({"params": [k]})
    give_gradients(q, k)
    optimizer.step()
    assert quack.rates()["k"].tolist() == [TAU, TAU]
    torch.testing.assert_close(k.detach(), torch.full((2, 3), 1 - TAU * LR))


def test_an_optimizer_that_steps_other_tensors_is_an_error_in_every_step() -> None:
    """As ZeRO: the groups hold flat copies, which are stepped instead of the parameters."""
    q, k = parameter(), parameter()
    optimizer = SGD([q, k], lr=LR)
    attached(optimizer, q, k)
    optimizer.param_groups[0]["params"] = [nn.Parameter(torch.ones(12))]
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^q: 2 of 2 weights .* in the optimizer.* deepspeed\.initialize"):
            optimizer.step()


def test_an_optimizer_that_steps_some_of_the_tensors_is_a_warning_once() -> None:
    q, k = parameter(), parameter()
    optimizer = SGD([{"params": [q]}, {"params": [k]}], lr=LR)
    attached(optimizer, q, k)
    optimizer.param_groups.pop()
    give_gradients(q, k)
    with pytest.warns(UserWarning, match="^k: 1 of 2 weights on the paths are no longer in the optimizer") as seen:
        optimizer.step()
    assert seen[0].filename == __file__
    optimizer.step()


def test_parameters_that_are_no_longer_in_the_model_are_an_error_or_a_warning_if_only_some_are() -> None:
    def loaded_by_assignment(module: nn.Module) -> None:
        module.load_state_dict({name: value.clone() for name, value in module.state_dict().items()}, assign=True)

    model = layers(2, Separate)
    optimizer = SGD(model.parameters(), lr=LR)
    with QuacK(model, optimizer, tau=1.0):
        loaded_by_assignment(model[1])
        with pytest.warns(UserWarning, match=r"^1.q: 2 of 4 weights on the paths are no longer in the model") as seen:
            train(model, optimizer, steps=1)
        assert seen[0].filename == train.__code__.co_filename
    optimizer = SGD(model.parameters(), lr=LR)
    QuacK(model, optimizer, tau=1.0)
    loaded_by_assignment(model)
    with pytest.raises(RuntimeError, match=r"^0.q: 4 of 4 weights on the paths are no longer in the model"):
        train(model, optimizer, steps=1)


def test_a_first_step_without_any_gradient_is_an_error_but_zeros_are_gradients() -> None:
    """With an output projection that starts at zero, the first gradients of queries and keys are zeros."""
    q, k, other = parameter(), parameter(), parameter()
    optimizer = SGD([q, k, other], lr=LR)
    attached(optimizer, q, k)
    give_gradients(other)
    with pytest.raises(RuntimeError, match="no weight on a path had a gradient in the first step, so"):
        optimizer.step()
    q.grad, k.grad = torch.zeros_like(q), torch.zeros_like(k)
    optimizer.step()


def test_a_first_step_without_gradients_of_one_of_two_optimizers_is_a_warning() -> None:
    q, k = parameter(), parameter()
    optimizers: list[Optimizer] = [SGD([q], lr=LR), SGD([k], lr=LR)]
    attached(optimizers, q, k)
    give_gradients(q)
    optimizers[0].step()
    with pytest.warns(UserWarning, match="no weight on a path had a gradient in the first step of SGD") as seen:
        optimizers[1].step()
    assert seen[0].filename == __file__


class FillsItsStateFirst(SGD):
    """The first step moves nothing, as in SOAP and ADOPT, and every step clears the gradients, as in heavyball."""

    def step(self, *_: Any) -> None:  # type: ignore[override]
        if self.state:
            super().step()
        self.state[self.param_groups[0]["params"][0]]["filled"] = torch.ones(())
        self.zero_grad()


def test_a_first_step_that_moves_nothing_and_clears_its_gradients_is_no_error() -> None:
    model = nn.Sequential(Separate())
    optimizer = FillsItsStateFirst(model.parameters(), lr=0.1)
    start = [param.detach().clone() for param in model.parameters()]
    with QuacK(model, optimizer, tau=0.5):
        train(model, optimizer, steps=2)
    assert not any(torch.equal(now, was) for now, was in zip(model.parameters(), start, strict=True))


def transposed(param: Tensor) -> None:
    param.data = param.data.t()


def other_half(param: Tensor) -> None:
    """The same address, every second column of a wider tensor."""
    wide = torch.stack([param.data, torch.zeros_like(param.data)], 2).flatten(1)
    param.data = wide[:, ::2]


@pytest.mark.parametrize("change", [transposed, other_half])
def test_data_of_other_strides_is_read_as_it_is_now(change: Callable[[Tensor], None]) -> None:
    torch.manual_seed(0)
    q, k = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))
    optimizer = SGD([q, k], lr=LR)
    quack = QuacK(mha(Weight("q", q, torch.arange(4)), Weight("k", k, torch.arange(4))), optimizer, tau=1.0)
    start = k.detach().norm(dim=1)
    quack.rates()
    change(k)
    rates = start / k.detach().norm(dim=1)
    torch.testing.assert_close(quack.rates()["q"], rates)
    before = q.detach().clone()
    give_gradients(q, k)
    optimizer.step()
    torch.testing.assert_close(q.detach(), before - LR * rates.view(4, 1))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (torch.ones(2, 2, 3).transpose(0, 1), r"^q: .* not contiguous"),  # writing to a copy would have no effect
        (torch.ones(4, 3), r"^q: its parameter has shape \(4, 3\) now, and had \(2, 2, 3\)"),
    ],
)
def test_a_parameter_whose_rows_cannot_be_written_any_more_is_refused(data: Tensor, message: str) -> None:
    q, k = nn.Parameter(torch.ones(2, 2, 3)), nn.Parameter(torch.ones(4, 3))
    optimizer = SGD([q, k], lr=LR)
    QuacK(mha(Weight("q", q, torch.arange(4), dim=(0, 1)), Weight("k", k, torch.arange(4))), optimizer, tau=1.0)
    q.data = data
    give_gradients(q, k)
    with pytest.raises(ValueError, match=message):
        optimizer.step()
