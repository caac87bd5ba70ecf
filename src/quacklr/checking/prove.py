"""`quacklr.check`: real steps and perturbations on a copy of a model."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from quacklr.attach.optimizers import as_optimizers
from quacklr.checking.diagnose import Diagnosis
from quacklr.checking.layer_report import LayerReport
from quacklr.checking.report import CheckReport
from quacklr.checking.sandbox import Loss, Sandbox
from quacklr.checking.steps import Change, Stepper
from quacklr.core.norms import Norm, frobenius
from quacklr.core.path import LogitPath
from quacklr.core.stepped import is_idle
from quacklr.quack import QuacK
from quacklr.rules.budget import Budget
from quacklr.rules.paper import Paper
from quacklr.sharded.validate import validate_not_sharded
from quacklr.util.modules import run_uncompiled


def check(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer],
    batch: Any,
    *,
    tau: float = 1.0,
    norm: Norm = frobenius,
    floor: float = 0.0,
    budget: float | None = None,
    paths: Iterable[LogitPath] | None = None,
    loss: Loss | None = None,
    steps: int = 3,
    growth: float = 4.0,
) -> CheckReport:
    """Test that `QuacK(model, optimizer)` scales the right rows of every head, and changes no logit beyond its bound.

        print(check(model, optimizer, batch))

    A copy takes a few real steps on the batch (a tensor, a tuple, or a dict). For every head, the largest |change| of a
    logit in the step of its own rows is compared with the bound of docs/theory.md. There are three series of steps:
    with QuacK, from the weights as they are; without QuacK, from weights that were multiplied by `growth`; and with
    QuacK, from weights that were multiplied by `growth` after QuacK was attached, as if they had grown in a long
    training. Then rows are perturbed, to test that a head depends on its own rows and on no others.

    `tau`, `norm`, `floor` and `budget` are those of QuacK. With a budget, the report also has the root mean square of
    the changes, which is the quantity that the budget limits. `paths` defaults to `logit_paths(model, batch)`; if the
    batch cannot be measured, to the paths of the rules, and the report says so. `loss(model, batch)` defaults to the
    model's own loss, or to a distance to random numbers. Neither the model nor the optimizers are changed. Takes about
    10 forward and backward passes, and 10 forward passes for each doubling of layers, heads and head size; holds six
    copies of the parameters.
    """
    optimizers = as_optimizers(optimizer, linear=budget is None)
    _validate(optimizers, steps, growth)
    validate_not_sharded(model, "check", "check it in one process, before it is sharded: the rows are the same")
    devices = {param.device for param in model.parameters() if param.device.type != "cpu"}
    kind = next((device.type for device in devices), "cuda")
    with torch.random.fork_rng(devices, device_type=kind), run_uncompiled():
        sandbox = Sandbox.of(model, optimizers, paths, batch, loss)
        settings: Any = partial(Paper, tau, norm=norm, floor=floor) if budget is None else partial(Budget, budget)
        if not sandbox.copy().has_gradients():  # QuacK raises if it has nothing to control
            settings = None
        start = _changes(sandbox.copy(), steps, 1.0, settings)
        plain = _changes(sandbox.copy(), steps, growth, None)
        quack = _changes(sandbox.copy(), steps, growth, settings)
        diagnosis = Diagnosis(sandbox)
        faults = diagnosis.faults()
    trains = [any(weight.trains for weight in layer.weights) for layer in diagnosis.layers]
    layers = [
        LayerReport(layer.module, layer.heads, *each)
        for layer, *each in zip(
            diagnosis.layers, diagnosis.unobserved, start, plain, quack, faults, trains, strict=True
        )
    ]
    left_alone = dict(getattr(sandbox.paths, "left_alone", {}))
    return CheckReport(tuple(layers), growth, steps, left_alone, sandbox.unmeasured, sandbox.contradiction, budget)


def _changes(sandbox: Sandbox, steps: int, growth: float, settings: Any) -> list[Change]:
    """Steps from weights that have grown since QuacK was attached; without QuacK if settings are None."""
    torch.manual_seed(0)
    expected = sandbox.expected_rows()
    quack = None if settings is None else QuacK(sandbox.paths, sandbox.optimizers, rule=settings())
    if quack is not None:
        quack.rule.start_is_known()
    stepper = Stepper(sandbox, expected, quack)
    with torch.no_grad():
        for rows in expected.rows:
            rows.part.param.mul_(rows.spread(torch.where(rows.on_path, growth, 1.0)))
    changes = stepper.changes(steps)
    if quack is not None:
        quack.remove()
    return changes


def _validate(optimizers: list[Optimizer], steps: int, growth: float) -> None:
    if steps < 1:
        raise ValueError(f"steps={steps}: at least one step must be taken")
    if not 0 < growth < float("inf"):
        raise ValueError(f"growth={growth}: the factor of the weights must be a positive number")
    if all(is_idle(optimizer) for optimizer in optimizers):
        raise ValueError("every learning rate is 0, so no step moves anything; check before a warmup begins, or set lr")
