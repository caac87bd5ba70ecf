"""For an update linear in lr, a scaled step is a step with a scaled lr. Judge: the same optimizer with that lr."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import reference
from models import PerHead, Separate, assert_equal, layers, train
from quacklr import ConstantTau, Paper, QuacK, frobenius, spectral
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


def test_every_optimizer_of_torch_is_known_but_adafactor_which_depends_on_its_lr() -> None:
    classes = {name for name, cls in vars(torch.optim).items() if inspect.isclass(cls) and issubclass(cls, Optimizer)}
    assert set(ACCEPTED) == {cls.__name__ for cls in KNOWN_LINEAR}
    assert classes == {*ACCEPTED, *REFUSED, "Adafactor", "Optimizer"}


def gradients(name: str, params: list[nn.Parameter], step: int) -> None:
    """The same gradients whatever the weights are, so that only the step differs."""
    random = torch.Generator().manual_seed(step)
    for param in params:
        grad = torch.randn(param.shape, generator=random, dtype=param.dtype)
        param.grad = grad.to_sparse(1) if name == "SparseAdam" else grad


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_scaled_step_is_a_step_with_a_scaled_lr(name: str) -> None:
    torch.manual_seed(0)
    with_quack, with_lr = Separate().double(), Separate().double()
    with_lr.load_state_dict(with_quack.state_dict())
    start = [param.detach().clone() for param in with_quack.parameters()]
    make: Callable[..., Optimizer] = getattr(torch.optim, name)
    one = make([with_quack.q.weight, with_quack.k.weight, with_quack.v.weight], lr=0.02, **ACCEPTED[name])
    groups = [{"params": [with_lr.q.weight, with_lr.k.weight]}, {"params": [with_lr.v.weight]}]
    two = make(groups, lr=0.02, **ACCEPTED[name])
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
    model = nn.Sequential(Separate(bias=name != "Muon"))
    cls = type("Mine", (getattr(torch.optim, name),), {})
    QuacK(model, cls(model.parameters(), **ACCEPTED[name]), tau=1.0).remove()


@pytest.mark.parametrize("name", REFUSED)
def test_an_optimizer_of_torch_that_is_not_linear_in_lr_is_refused_by_name_also_a_class_derived_from_it(
    name: str,
) -> None:
    model = nn.Sequential(Separate())
    for cls in (getattr(torch.optim, name), type("Mine", (getattr(torch.optim, name),), {})):
        optimizer = cls(model.parameters())
        with pytest.raises(ValueError, match=f"^{cls.__name__} is not linear in lr"):
            QuacK(model, optimizer, tau=1.0)
        assert not optimizer._optimizer_step_pre_hooks
        assert not optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize(
    ("name", "options", "dtype", "norm"),
    [
        ("SGD", {"momentum": 0.9}, torch.float32, spectral),
        ("AdamW", {"foreach": True}, torch.bfloat16, frobenius),
        ("AdamW", {"fused": True}, torch.float32, frobenius),
        ("Muon", {}, torch.float32, frobenius),
    ],
)
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
