"""`quacklr.check`: the wiring proof, on a copy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from quacklr.checking.diagnose import Diagnosis
from quacklr.checking.report import CheckReport, LayerReport
from quacklr.checking.sandbox import Loss, Sandbox
from quacklr.checking.steps import Change, Stepper, changes
from quacklr.core.norms import Norm, frobenius
from quacklr.core.path import LogitPath
from quacklr.distributed.validate import validate_not_sharded
from quacklr.optimizers.attach import as_optimizers, is_idle
from quacklr.quack import QuacK
from quacklr.util.modules import run_uncompiled


def check(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer],
    batch: Any,
    *,
    tau: float = 1.0,
    norm: Norm = frobenius,
    floor: float = 0.0,
    paths: Iterable[LogitPath] | None = None,
    loss: Loss | None = None,
    steps: int = 3,
    growth: float = 4.0,
) -> CheckReport:
    """Whether `QuacK(model, optimizer)` is wired right: every head's rows its own, and no logit moved out of bounds.

        print(check(model, optimizer, batch))

    A copy takes a few real steps on the batch (a tensor, a tuple, or a dict), and for every head the largest |change|
    of a logit that its own rows cause is held against the bound of docs/theory.md; as the weights are, and with all
    claimed rows grown `growth`-fold after QuacK was attached, as long training does, with QuacK and without. Then rows
    are nudged, to see that a head moves with its own rows and no others. `tau`, `norm`, `floor` are QuacK's; `paths`
    are `logit_paths(model, batch)` if not given, measured, or the rules' if the batch cannot show them, which the
    result says; `loss(model, batch)` is the model's own, or else a distance to random numbers. Neither the model nor
    the optimizers are touched. Takes about 10 forwards and backwards, and 10 forwards for each doubling of layers,
    heads and head size; holds six copies of the parameters.
    """
    optimizers = as_optimizers(optimizer)
    _refuse(optimizers, steps, growth)
    validate_not_sharded(model, "check", "check it in one process, before it is sharded: the rows are the same")
    devices = {param.device for param in model.parameters() if param.device.type != "cpu"}
    kind = next((device.type for device in devices), "cuda")
    with torch.random.fork_rng(devices, device_type=kind), run_uncompiled():
        twin = Sandbox.of(model, optimizers, paths, batch, loss)
        settings: dict[str, Any] | None = {"tau": tau, "norm": norm, "floor": floor}
        if not twin.again().reaches_a_path():  # QuacK raises if it has nothing to do
            settings = None
        start = _run(twin.again(), steps, 1.0, settings)
        plain = _run(twin.again(), steps, growth, None)
        quack = _run(twin.again(), steps, growth, settings)
        judge = Diagnosis(twin)
        faults = judge.faults()
    trains = [any(weight.trains for weight in layer.weights) for layer in judge.layers]
    layers = [
        LayerReport(layer.module, layer.heads, *each)
        for layer, *each in zip(judge.layers, judge.silent, start, plain, quack, faults, trains, strict=True)
    ]
    left_alone = dict(getattr(twin.paths, "left_alone", {}))
    return CheckReport(tuple(layers), growth, steps, left_alone, twin.unmeasured, twin.contradiction)


def _run(twin: Sandbox, steps: int, growth: float, settings: dict[str, Any] | None) -> list[Change]:
    """A few steps from weights that have grown since QuacK was attached; without it, if there are no settings."""
    torch.manual_seed(0)
    claims = twin.claims()
    quack = None if settings is None else QuacK(twin.paths, twin.optimizers, **settings)
    stepper = Stepper(twin, claims)
    with torch.no_grad():
        for rows in claims.rows:
            rows.part.param.mul_(rows.spread(torch.where(rows.claimed, growth, 1.0)))
    found = changes(stepper, steps, quack)
    if quack is not None:
        quack.remove()
    return found


def _refuse(optimizers: list[Optimizer], steps: int, growth: float) -> None:
    if steps < 1:
        raise ValueError(f"steps={steps}: at least one step must be taken")
    if not 0 < growth < float("inf"):
        raise ValueError(f"growth={growth}: what weights are multiplied with must be a positive number")
    if all(is_idle(optimizer) for optimizer in optimizers):
        raise ValueError("every learning rate is 0, so no step moves anything; check before a warmup begins, or set lr")
