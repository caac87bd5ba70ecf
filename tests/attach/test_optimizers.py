"""For an update linear in lr, a scaled step is a step with a scaled lr. Judge: the same optimizer with that lr."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import reference
from models import PerHead, Separate, assert_equal, layers, train
from quacklr import ConstantTau, Paper, QuacK, Weight, frobenius, mha, packed, spectral
from quacklr.attach.optimizers import KNOWN_LINEAR, NOT_LINEAR
from quacklr.core.norms import Norm

ACCEPTED: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "Adam": {"weight_decay": 0.1, "amsgrad": True},
    "AdamW": {"weight_decay": 0.1},
    "Adamax": {"weight_decay": 0.1},
    "NAdam": {"weight_decay": 0.1, "decoupled_weight_decay": True},
    "RAdam": {"weight_decay": 0.1, "decoupled_weight_decay": True},
    "Adagrad": {"lr_decay": 0.1, "weight_decay": 0.1},
    "Adadelta": {"weight_decay": 0.1},
    "RMSprop": {"momentum": 0.9, "centered": True, "weight_decay": 0.1},
    "Muon": {"weight_decay": 0.1},
    "SparseAdam": {},
}
TAUS = [0.375, 0.375, 0.75, 1.5, 0.25]  # exact in fp32
REFUSED = [cls.__name__ for cls in NOT_LINEAR]


def torch_optimizers() -> Iterator[str]:
    for name, cls in vars(torch.optim).items():
        if inspect.isclass(cls) and issubclass(cls, Optimizer) and cls is not Optimizer:
            yield name


def test_every_optimizer_of_torch_is_known_but_adafactor_which_depends_on_its_lr() -> None:
    assert set(ACCEPTED) == {cls.__name__ for cls in KNOWN_LINEAR}
    assert set(torch_optimizers()) == {*ACCEPTED, *REFUSED, "Adafactor"}


def gradients(name: str, params: list[nn.Parameter], step: int) -> None:
    """The same gradients whatever the weights are, so that only the step differs."""
    random = torch.Generator().manual_seed(step)
    for param in params:
        grad = torch.randn(param.shape, generator=random, dtype=param.dtype)
        param.grad = grad.to_sparse(1) if name == "SparseAdam" else grad


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_scaled_step_is_a_step_with_a_scaled_lr(name: str) -> None:
    torch.manual_seed(0)
    with_quack = Separate().double()
    with_lr = Separate().double()
    with_lr.load_state_dict(with_quack.state_dict())
    start = [param.detach().clone() for param in with_quack.parameters()]
    make: Callable[..., Optimizer] = getattr(torch.optim, name)
    one = make([with_quack.q.weight, with_quack.k.weight, with_quack.v.weight], lr=0.02, **ACCEPTED[name])
    two = make(
        [{"params": [with_lr.q.weight, with_lr.k.weight]}, {"params": [with_lr.v.weight]}], lr=0.02, **ACCEPTED[name]
    )
    with QuacK(nn.Sequential(with_quack), one, rule=ConstantTau(TAUS[0])) as quack:
        for step, tau in enumerate(TAUS):
            quack.rule.tau, two.param_groups[0]["lr"] = tau, tau * 0.02  # type: ignore[attr-defined]
            gradients(name, list(with_quack.parameters()), step)
            gradients(name, list(with_lr.parameters()), step)
            one.step()
            two.step()
    for mine, theirs, before in zip(with_quack.parameters(), with_lr.parameters(), start, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-13, atol=1e-15)
        assert (mine - before).norm() > 1e-4  # it was trained


@pytest.mark.parametrize("name", [name for name in ACCEPTED if name != "SparseAdam"])
def test_the_test_on_small_parameters_finds_that_the_optimizers_of_torch_are_linear(name: str) -> None:
    cls = getattr(torch.optim, name)
    model = nn.Sequential(Separate(bias=name != "Muon"))
    QuacK(model, type("Mine", (cls,), {})(model.parameters(), **ACCEPTED[name])).remove()


@pytest.mark.parametrize("name", REFUSED)
def test_an_optimizer_of_torch_that_is_not_linear_in_lr_is_refused_by_name(name: str) -> None:
    model = nn.Sequential(Separate())
    optimizer: Optimizer = getattr(torch.optim, name)(model.parameters())
    with pytest.raises(ValueError, match=f"^{name} is not linear in lr"):
        QuacK(model, optimizer)
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_a_subclass_of_a_refused_optimizer_is_refused() -> None:
    class Mine(torch.optim.Rprop):
        pass

    model = nn.Sequential(Separate())
    with pytest.raises(ValueError, match="Mine is not linear"):
        QuacK(model, Mine(model.parameters()))


def test_what_is_no_optimizer_is_refused() -> None:
    model = nn.Sequential(Separate())
    with pytest.raises(ValueError, match="Sequential is not a torch.optim.Optimizer"):
        QuacK(model, [model])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="no optimizer given"):
        QuacK(model, [])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SGD", {"momentum": 0.9}),
        ("AdamW", {"foreach": True}),
        ("AdamW", {"fused": True}),
        ("AdamW", {"foreach": False, "fused": False}),
        ("Muon", {}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", [frobenius, spectral])
def test_the_first_step_at_tau_1_is_the_plain_step_bitwise(
    name: str, options: dict[str, Any], dtype: torch.dtype, norm: Norm
) -> None:
    results = []
    for attach in (False, True):
        torch.manual_seed(0)
        model = layers(2, PerHead).to(dtype)
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1, **options)
        quack = QuacK(model, optimizer, rule=Paper(norm=norm)) if attach else None
        train(model, optimizer, steps=1)
        results.append([param.detach() for param in model.parameters()])
        if quack:
            assert min(rate.min() for rate in quack.rates().values()) < 0.99  # there was a step to scale
    assert_equal(results[1], results[0])


@pytest.mark.parametrize(("name", "options"), [("SGD", {"momentum": 0.9}), ("AdamW", {"weight_decay": 0.1})])
def test_a_fused_weight_equals_one_param_group_a_head(name: str, options: dict[str, float]) -> None:
    """[h, 3, d] under QuacK against Algorithm 1 taken literally: a parameter and a learning rate for each head."""
    torch.manual_seed(0)
    fused, tau, lr = PerHead().double(), 0.7, 0.05
    heads = [fused.qkv.weight.detach()[i * 4 : i * 4 + 4].clone().requires_grad_() for i in range(12)]
    make = getattr(torch.optim, name)
    one = make(fused.parameters(), lr=lr, **options)
    many = make([{"params": [head], "lr": lr} for head in heads], **options)

    def as_layers() -> list[reference.Layer]:
        return [{"q": [h.tolist() for h in heads[0::3]], "k": [h.tolist() for h in heads[1::3]]}]

    init = reference.mha_init_norms(as_layers())
    other = PerHead().double()
    with QuacK(nn.Sequential(fused), one, tau=tau):
        for step in range(6):
            train(fused, one, steps=1, seed=step)
            (lrs,) = reference.mha_lrs(as_layers(), init, tau, lr)
            for role, offset in (("q", 0), ("k", 1)):
                for group, value in zip(many.param_groups[offset::3], lrs[role], strict=True):
                    group["lr"] = value
            x_BTD = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(step)).double()
            many.zero_grad()
            out = torch.func.functional_call(other, {"qkv.weight": torch.cat(heads)}, x_BTD)
            (100 * out.float().square().mean()).backward()
            many.step()
    torch.testing.assert_close(fused.qkv.weight.detach(), torch.cat(heads).detach(), rtol=1e-6, atol=1e-8)
    assert min(abs(value / (tau * lr) - 1) for value in lrs["q"]) > 0.01  # the rates were not just tau


def test_weight_decay_is_scaled_with_the_step() -> None:
    param = nn.Parameter(torch.ones(2, 3))
    other = nn.Parameter(torch.ones(2, 3))
    optimizer = torch.optim.AdamW([param, other], lr=0.1, weight_decay=0.5)
    paths = mha(Weight("q", param, torch.arange(2)), Weight("k", other, torch.arange(2)))
    with QuacK(paths, optimizer, tau=0.5):
        param.grad, other.grad = torch.zeros(2, 3), torch.zeros(2, 3)
        optimizer.step()
    torch.testing.assert_close(param.detach(), torch.full((2, 3), 1 - 0.5 * 0.1 * 0.5))


def test_packed_bias_steps_with_its_head() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(3, 4)
    (q,) = packed(linear, ("q", 2, 2))
    (k,) = packed(nn.Linear(3, 4, bias=False).requires_grad_(False), ("k", 2, 2))
    before: list[Tensor] = [linear.weight.detach().clone(), linear.bias.detach().clone()]
    optimizer = torch.optim.SGD(linear.parameters(), lr=1.0)
    with QuacK(mha(q, k), optimizer, tau=0.25):
        linear.weight.grad, linear.bias.grad = torch.ones(4, 3), torch.ones(4)
        optimizer.step()
    torch.testing.assert_close([before[0] - 0.25, before[1] - 0.25], [linear.weight.detach(), linear.bias.detach()])


class FillsItsStateFirst(torch.optim.SGD):
    """The first step moves nothing, as in SOAP and ADOPT, and every step clears the gradients, as in heavyball."""

    def step(self, *_: Any) -> None:  # type: ignore[override]
        if self.state:
            super().step()
        self.state[self.param_groups[0]["params"][0]]["filled"] = torch.ones(())
        self.zero_grad()


def test_a_first_step_that_moves_nothing_and_clears_its_gradients_is_no_error() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Separate())
    optimizer = FillsItsStateFirst(model.parameters(), lr=0.1)
    start = [param.detach().clone() for param in model.parameters()]
    with QuacK(model, optimizer, tau=0.5):
        train(model, optimizer, steps=2)
    assert not any(torch.equal(now, was) for now, was in zip(model.parameters(), start, strict=True))
