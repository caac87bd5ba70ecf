"""The independent check of `optimizers.py`: compares training with QuacK to training with one param group per tensor.

The model has two attention layers of one head each. Without QuacK, the lr of each param group is lr * rate, with the
rates of the paper's Algorithm 1 (`tests/kit/reference.py`). An optimizer that does not allow different lr is trained
with a single one, lr * tau. The deviation is the distance between the weights of both runs, relative to the distance
that the weights moved.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import itertools
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import reference
from models import Separate
from quacklr import ConstantTau, Paper, QuacK

WIDTH, TAU, STEPS, SHORT = 64, 0.5, 40, 12
EQUAL = 1e-3
NEEDED = {"lr": 1e-3, "num_data": 10, "num_iterations": 100, "num_epochs": 1, "num_batches_per_epoch": 100}
SET = {"d0": 1e-3}  # where the search for a step size begins: by default it takes longer than the judge runs
GROUPS: list[dict[str, Any]] = [
    {},
    {"use_muon": True},
    {"use_muon": True, "lr": 0.02, "momentum": 0.95, "weight_decay": 0.0},
]
CHAOTIC = "as far off after a change of 1e-6 of weights and lr, or diverged"


def make(cls: type[Optimizer], net: nn.Module, params: list[list[nn.Parameter]]) -> Any:
    """One of these optimizers, with a param group for each list of parameters."""
    signature = inspect.signature(cls).parameters
    unset = [name for name, argument in signature.items() if argument.default in (None, argument.empty)]
    given: dict[str, Any] = {name: value for name, value in NEEDED.items() if name in unset}
    given |= {name: value for name, value in SET.items() if name in signature}
    if "base_optimizer" in signature:
        given |= {"base_optimizer": torch.optim.AdamW, "lr": 1e-3}
    errors = []
    for extra in GROUPS:
        first: Any = [{"params": list(each), **extra} for each in params]
        match next(iter(signature)):
            case "model":
                first = net
            case "named_parameters":
                first = [(name, param) for name, param in net.named_parameters() if param.requires_grad]
            case "optimizer" | "base":
                first = torch.optim.AdamW(first, lr=1e-3)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                made: Any = cls(first, **given)
        except Exception as error:
            errors.append(error)
        else:
            with contextlib.suppress(AttributeError):
                made.train()
            return made
    raise errors[0]


def model(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Separate(WIDTH, heads=1, groups=1) for _ in range(2))).to(dtype)


def backward(net: nn.Sequential, step: int, graph: bool) -> Tensor:
    """Gradients of full rank, since what orthogonalises them amplifies rounding where they have none."""
    numbers = torch.Generator().manual_seed(step)
    x_BTD, y_BTD = (torch.randn(4, 32, WIDTH, generator=numbers).to(next(net.parameters())) for _ in range(2))
    net.zero_grad()
    loss = 9 * (x_BTD + net(x_BTD) - y_BTD).square().mean()
    loss.backward(create_graph=graph)
    for param in net.parameters():
        if param.grad is not None and not graph:
            param.grad += 0.1 * param.grad.norm() / WIDTH * torch.randn(param.shape, generator=numbers).to(param)
    return loss


def trained(
    cls: type[Optimizer], dtype: torch.dtype, several: bool, how: str, steps: int, quack: bool, change: float = 1.0
) -> list[list[Tensor]]:
    """The weights of queries and keys at the start and after every step."""
    net = model(dtype)
    weights: list[Tensor] = [net.get_parameter(f"{i}.{name}.weight") for i in range(2) for name in "qk"]
    if not several:
        net.requires_grad_(False)
        for weight in weights:
            weight.requires_grad_(True)
    trainable = [param for param in net.parameters() if param.requires_grad]
    optimizer = make(cls, net, [[param] for param in trainable] if several else [trainable])
    lrs = [float(group["lr"]) for group in optimizer.param_groups]
    rule = Paper(TAU) if several else ConstantTau(TAU)
    attached = QuacK(net, optimizer, rule=rule) if quack else None
    start = reference.mha_init_norms(layers(weights))
    seen = [[weight.detach().clone() for weight in weights]]
    with torch.no_grad():
        for param in net.parameters():
            param.mul_(change)
    torch.manual_seed(0)
    for step in range(steps):
        if not quack:
            rates = [
                rate for layer in reference.mha_lrs(layers(weights), start, TAU, change) for rate in layer.values()
            ]
            rate_of = {id(weight): rate[0] for weight, rate in zip(weights, rates, strict=True)}
            for group, lr in zip(optimizer.param_groups, lrs, strict=True):
                group["lr"] = lr * (rate_of.get(id(group["params"][0]), 1.0) if several else change * TAU)
        loss = backward(net, step, how == "graph")
        closure = (lambda step=step: backward(net, step, False)) if how == "closure" else None
        optimizer.step(closure) if closure else optimizer.step()
        del loss
        seen.append([weight.detach().clone() for weight in weights])
    if attached:
        attached.remove()
    return seen


def layers(weights: list[Tensor]) -> list[reference.Layer]:
    q, k = weights[::2], weights[1::2]
    return [{"q": [a.tolist()], "k": [b.tolist()]} for a, b in zip(q, k, strict=True)]


@contextlib.contextmanager
def accepted() -> Iterator[None]:
    """QuacK attaches to any optimizer."""
    with mock.patch("quacklr.attach.attachment.validate_linear"):
        yield


def deviation(cls: type[Optimizer], steps: int = STEPS) -> tuple[float, float, str]:
    """Relative distance after a few steps and after all, and how it was measured."""
    reason = ""
    dtypes = (torch.float64, torch.float32)
    for several, dtype, how in itertools.product((True, False), dtypes, ("plain", "closure", "graph")):
        try:
            with accepted():
                one, two = (trained(cls, dtype, several, how, steps, quack) for quack in (True, False))
                short, long = apart(one, two, SHORT), apart(one, two, steps)
                nearly = trained(cls, dtype, several, how, SHORT, False, 1 + 1e-6) if short > EQUAL else two
            chaotic = short > EQUAL and (apart(nearly, two, SHORT) > short / 3 or exploded(two))
            return short, long, CHAOTIC if chaotic else "" if several else "one lr"
        except Exception as error:
            reason = reason or f"{type(error).__name__}: {error}"
    return math.nan, math.nan, reason


def exploded(seen: list[list[Tensor]]) -> bool:
    """Whether the weights became many times as large: then rounding did, too."""
    return any(float(last.norm()) > 100 * float(first.norm()) for first, last in zip(seen[0], seen[-1], strict=True))


def apart(one: list[list[Tensor]], two: list[list[Tensor]], end: int) -> float:
    far = [max(float((b[i] - two[0][i]).norm()) for b in two[: end + 1]) for i in range(len(two[0]))]
    return max(float((a - b).norm()) / length for a, b, length in zip(one[end], two[end], far, strict=True))
