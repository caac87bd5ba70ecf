"""The tensors that a step moves: nested steps, changing param groups, replaced tensors."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models import Separate, assert_equal, layers, train
from quacklr import ConstantTau, Paper, QuacK, Weight, mha

LR, TAU = 0.1, 0.5


def parameter(value: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.full((2, 3), value))


def attached(
    optimizer: torch.optim.Optimizer | list[torch.optim.Optimizer], q: Tensor, k: Tensor, adapt: bool = True
) -> QuacK:
    weights = Weight("q", q, torch.arange(2)), Weight("k", k, torch.arange(2))
    return QuacK(mha(*weights), optimizer, rule=Paper(TAU) if adapt else ConstantTau(TAU))


def give_gradients(*params: Tensor) -> None:
    for param in params:
        param.grad = torch.ones_like(param)


class TwiceSGD(torch.optim.SGD):
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
        torch.optim.SGD.step(self, closure)


class ThriceSGD(TwiceSGD):
    """Three classes deep: 3 * lr * gradient."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        self._again()


class RetriesSGD(TwiceSGD):
    """Its parent's step fails first, and the failure is handled within the step."""

    def step(self, closure: Any = None) -> Any:
        try:
            torch.optim.SGD.step(self, _fails)
        except ArithmeticError:
            torch.optim.SGD.step(self, closure)
        self._again()


def _fails() -> float:
    raise ArithmeticError


@pytest.mark.parametrize(
    ("cls", "times"), [(torch.optim.SGD, 1), (TwiceSGD, 2), (BeforeSGD, 2), (ThriceSGD, 3), (RetriesSGD, 2)]
)
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
    torch.optim.SGD([parameter()], lr=LR)
    q, k = parameter(), parameter()
    optimizer = TwiceSGD([q, k], lr=LR)
    attached(optimizer, q, k, adapt=False)
    give_gradients(q, k)
    torch.compile(optimizer.step, backend="eager")()
    torch.testing.assert_close(q.detach(), torch.full((2, 3), 1 - 2 * TAU * LR))


class Outer(TwiceSGD):
    """Steps another optimizer that has the same tensors, then moves them itself."""

    def __init__(self, inside: torch.optim.Optimizer, **options: Any) -> None:
        self.inside = inside
        super().__init__([param for group in inside.param_groups for param in group["params"]], **options)

    def step(self, closure: Any = None) -> Any:
        self.inside.step(closure)
        self._again()


@pytest.mark.filterwarnings("ignore:Outer could not be tested")
def test_a_step_that_calls_another_optimizers_step_on_the_same_tensors_is_scaled_once() -> None:
    q, k = parameter(), parameter()
    inside = torch.optim.SGD([q, k], lr=LR)
    outside = Outer(inside, lr=LR)
    attached([inside, outside], q, k, adapt=False)
    give_gradients(q, k)
    outside.step()
    torch.testing.assert_close(q.detach(), torch.full((2, 3), 1 - 2 * TAU * LR))


def test_a_nested_step_begins_no_iteration_in_the_middle_of_a_step() -> None:
    """Two optimizers with a parameter each. The second must use the rates that the first began with."""
    q, k = parameter(), parameter()
    first, second = TwiceSGD([q], lr=LR), torch.optim.SGD([k], lr=LR)
    quack = attached([first, second], q, k)
    with torch.no_grad():
        q.mul_(3)
    rates = quack.rates()
    give_gradients(q, k)
    first.step()
    second.step()
    torch.testing.assert_close(k.detach(), 1 - LR * rates["k"].view(2, 1).expand(2, 3))


def test_after_a_nested_step_that_raised_the_next_step_starts_anew() -> None:
    q, k = parameter(), parameter()
    optimizer = TwiceSGD([q, k], lr=LR)
    attached(optimizer, q, k, adapt=False)
    with pytest.raises(ArithmeticError):
        optimizer.step(_fails)
    with torch.no_grad():
        q.fill_(5)
    give_gradients(q, k)
    optimizer.step()
    torch.testing.assert_close(q.detach(), torch.full((2, 3), 5 - 2 * TAU * LR))


@pytest.mark.filterwarnings("ignore:k. 1 of 2 weights on the paths are no longer")
def test_an_iteration_begins_when_a_tensor_steps_again_not_when_an_optimizer_does() -> None:
    """As DeepSpeed's ZeRO does: one optimizer steps several times an iteration, each time with other groups."""
    q, k = parameter(), parameter()
    optimizer = torch.optim.SGD([{"params": [q]}, {"params": [k]}], lr=LR)
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
    weights, rest = torch.optim.SGD([q, k], lr=LR), torch.optim.SGD([other], lr=LR)
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


def append_to_a_group(optimizer: torch.optim.Optimizer, param: Tensor) -> None:
    optimizer.param_groups[0]["params"].append(param)


def put_into_a_new_group(optimizer: torch.optim.Optimizer, param: Tensor) -> None:
    optimizer.add_param_group({"params": [param]})


def exchange_a_group(optimizer: torch.optim.Optimizer, param: Tensor) -> None:
    optimizer.param_groups.pop()
    optimizer.add_param_group({"params": [param]})


def exchange_a_parameter(optimizer: torch.optim.Optimizer, param: Tensor) -> None:
    optimizer.param_groups[1]["params"][0] = param


def exchange_all_groups(optimizer: torch.optim.Optimizer, param: Tensor) -> None:
    optimizer.param_groups = [
        {**group, "params": [*group["params"], *([param] if not i else [])]}
        for i, group in enumerate(optimizer.param_groups)
    ]


@pytest.mark.parametrize(
    "change",
    [append_to_a_group, put_into_a_new_group, exchange_a_group, exchange_a_parameter, exchange_all_groups],
)
def test_a_parameter_that_joins_the_optimizer_later_is_scaled(
    change: Callable[[torch.optim.Optimizer, Tensor], None],
) -> None:
    q, k, head = parameter(), parameter(), parameter()
    k.requires_grad_(False)  # gradual unfreezing
    optimizer = torch.optim.SGD([{"params": [q]}, {"params": [head]}], lr=LR)
    quack = attached(optimizer, q, k, adapt=False)
    give_gradients(q, head)
    optimizer.step()
    k.requires_grad_(True)
    change(optimizer, k)
    give_gradients(q, k, head)
    optimizer.step()
    assert quack.rates()["k"].tolist() == [TAU, TAU]
    torch.testing.assert_close(k.detach(), torch.full((2, 3), 1 - TAU * LR))


def flattened(optimizer: torch.optim.Optimizer) -> None:
    """As ZeRO: the groups hold flat copies, which are stepped instead of the parameters."""
    for group in optimizer.param_groups:
        flat = nn.Parameter(torch.cat([param.detach().flatten() for param in group["params"]]))
        flat.grad = torch.ones_like(flat)
        group["params"] = [flat]


def test_an_optimizer_that_steps_other_tensors_is_an_error_at_the_first_step() -> None:
    q, k = parameter(), parameter()
    optimizer = torch.optim.SGD([q, k], lr=LR)
    attached(optimizer, q, k)
    flattened(optimizer)
    for _ in range(2):  # not only once
        with pytest.raises(
            RuntimeError,
            match=r"^q: 2 of 2 weights on the paths are no longer in the optimizer.* deepspeed\.initialize",
        ):
            optimizer.step()


def test_an_optimizer_that_steps_some_of_the_tensors_is_a_warning_once() -> None:
    q, k = parameter(), parameter()
    optimizer = torch.optim.SGD([{"params": [q]}, {"params": [k]}], lr=LR)
    attached(optimizer, q, k)
    optimizer.param_groups.pop()
    give_gradients(q, k)
    with pytest.warns(UserWarning, match="^k: 1 of 2 weights on the paths are no longer in the optimizer") as seen:
        optimizer.step()
    assert seen[0].filename == __file__
    optimizer.step()


def replaced(model: nn.Module) -> None:
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(param.detach().clone()))


def loaded_by_assignment(model: nn.Module) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


@pytest.mark.parametrize("replace", [replaced, loaded_by_assignment])
def test_parameters_that_are_no_longer_in_the_model_are_an_error(replace: Callable[[nn.Module], None]) -> None:
    model = layers(2, Separate)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    QuacK(model, optimizer)
    replace(model)
    with pytest.raises(RuntimeError, match=r"^0.q: 4 of 4 weights on the paths are no longer in the model"):
        train(model, optimizer, steps=1)


def test_some_parameters_that_are_no_longer_in_the_model_are_a_warning() -> None:
    model = layers(2, Separate)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    QuacK(model, optimizer)
    replaced(model[1])
    with pytest.warns(UserWarning, match=r"^1.q: 2 of 4 weights on the paths are no longer in the model") as seen:
        train(model, optimizer, steps=1)
    assert seen[0].filename == train.__code__.co_filename


def test_a_first_step_without_any_gradient_is_an_error() -> None:
    q, k, other = parameter(), parameter(), parameter()
    optimizer = torch.optim.SGD([q, k, other], lr=LR)
    attached(optimizer, q, k)
    give_gradients(other)
    with pytest.raises(RuntimeError, match="no weight on a path had a gradient in the first step"):
        optimizer.step()


def test_a_first_step_without_gradients_of_one_of_two_optimizers_is_a_warning() -> None:
    q, k = parameter(), parameter()
    optimizers = [torch.optim.SGD([q], lr=LR), torch.optim.SGD([k], lr=LR)]
    attached(list(optimizers), q, k)
    give_gradients(q)
    optimizers[0].step()
    with pytest.warns(UserWarning, match="no weight on a path had a gradient in the first step") as seen:
        optimizers[1].step()
    assert seen[0].filename == __file__


def test_gradients_that_are_exactly_zero_are_gradients() -> None:
    """With an output projection that starts at zero, the first gradients of queries and keys are zeros."""
    q, k = parameter(), parameter()
    optimizer = torch.optim.SGD([q, k], lr=LR)
    attached(optimizer, q, k)
    q.grad, k.grad = torch.zeros_like(q), torch.zeros_like(k)
    optimizer.step()


def transposed(param: Tensor) -> None:
    param.data = param.data.t()


def transposed_in_memory(param: Tensor) -> None:
    param.data = param.data.t().contiguous().t()


def other_half(param: Tensor) -> None:
    """The same address, every second column of a wider tensor."""
    wide = torch.stack([param.data, torch.zeros_like(param.data)], 2).flatten(1)
    param.data = wide[:, ::2]


@pytest.mark.parametrize("change", [transposed, transposed_in_memory, other_half])
def test_data_of_other_strides_is_read_as_it_is_now(change: Callable[[Tensor], None]) -> None:
    torch.manual_seed(0)
    q, k = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))
    optimizer = torch.optim.SGD([q, k], lr=LR)
    quack = QuacK(mha(Weight("q", q, torch.arange(4)), Weight("k", k, torch.arange(4))), optimizer)
    start = k.detach().norm(dim=1)
    quack.rates()
    change(k)
    rates = start / k.detach().norm(dim=1)
    torch.testing.assert_close(quack.rates()["q"], rates)
    before = q.detach().clone()
    give_gradients(q, k)
    optimizer.step()
    torch.testing.assert_close(q.detach(), before - LR * rates.view(4, 1))


def test_a_stack_of_matrices_that_is_no_longer_contiguous_is_refused_not_lost() -> None:
    """With these strides there is no view of its rows, and writing to a copy would have no effect."""
    q, k = nn.Parameter(torch.ones(2, 2, 3)), nn.Parameter(torch.ones(4, 3))
    optimizer = torch.optim.SGD([q, k], lr=LR)
    QuacK(mha(Weight("q", q, torch.arange(4), dim=(0, 1)), Weight("k", k, torch.arange(4))), optimizer)
    q.data = q.data.transpose(0, 1)
    give_gradients(q, k)
    with pytest.raises(ValueError, match=r"^q: .* not contiguous"):
        optimizer.step()


def test_a_parameter_of_another_shape_than_when_attached_is_refused() -> None:
    q, k = parameter(), parameter()
    optimizer = torch.optim.SGD([q, k], lr=LR)
    attached(optimizer, q, k)
    q.data = torch.ones(4, 3)
    give_gradients(q, k)
    with pytest.raises(ValueError, match=r"^q: its parameter has shape \(4, 3\) now, and had \(2, 3\)"):
        optimizer.step()


def test_a_convolution_in_another_memory_format_is_followed() -> None:
    torch.manual_seed(0)
    q, k = nn.Conv2d(4, 4, 3, bias=False), nn.Conv2d(4, 4, 3, bias=False)
    plain = copy.deepcopy(q)
    optimizer = torch.optim.SGD([*q.parameters(), *k.parameters()], lr=LR)
    heads = torch.arange(4)
    quack = QuacK(mha(Weight("q", q.weight, heads), Weight("k", k.weight, heads)), optimizer, tau=TAU)
    quack.rates()
    nn.Module.to(q, memory_format=torch.channels_last)  # type: ignore[call-overload]
    give_gradients(q.weight, k.weight)
    optimizer.step()
    torch.testing.assert_close(q.weight.detach(), plain.weight.detach() - LR * TAU)


def test_no_reference_to_the_model_is_kept() -> None:
    model = layers(1, Separate)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    quack = QuacK(model, optimizer)
    alive = [module for module in gc.get_referrers(model) if module is vars(quack)]
    assert not alive
