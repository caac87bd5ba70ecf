"""`quacklr.check`: compare the rows of all paths with a measurement, and take real steps on copies of the model."""

from __future__ import annotations

import copy
from collections.abc import Container, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from quacklr.checking.report import CheckReport, LayerReport
from quacklr.checking.steps import Layer, Layers, Loss, Trial, default_loss, innermost
from quacklr.core.path import LogitPath
from quacklr.core.rule import Rule
from quacklr.core.stepped import is_idle
from quacklr.find import logit_paths
from quacklr.find.compare import contradiction, differences
from quacklr.find.finding import is_inside
from quacklr.find.measure.assemble import measured_paths
from quacklr.quack import QuacK, chosen_rule
from quacklr.sharded.validate import validate_not_sharded
from quacklr.util.modules import named_modules, run_uncompiled, unwrapped

NOT_SEEN = "no attention was seen in it"


def check(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer],
    batch: Any,
    *,
    paths: Iterable[LogitPath] | None = None,
    loss: Loss | None = None,
    steps: int = 3,
    growth: float = 4.0,
    rule: Rule | None = None,
    tau: float | None = None,
) -> CheckReport:
    """Test that `QuacK(model, optimizer)` scales the right rows of every head, and changes no logit beyond its bound.

        print(check(model, optimizer, batch))

    Raises ValueError if the rows of a path are not the rows that are measured on the batch (a tensor, a tuple, or a
    dict). Then copies of the model take a few real steps in three series: with QuacK, from the weights as they are;
    without QuacK, from weights that were multiplied by `growth`; and with QuacK, from weights that were multiplied by
    `growth` after QuacK was attached, as if they had grown in a long training. For every head, the largest |change| of
    a logit in the step of its own rows is compared with the bound of docs/theory.md.

    `rule` and `tau` are those of QuacK. `paths` defaults to `logit_paths(model, batch)`.
    `loss(model, batch)` defaults to the model's own loss, or to a distance to random numbers. Neither the model nor the
    optimizers are changed. Takes about 10 forward and backward passes, and holds four copies of the parameters.
    """
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    _validate(optimizers, steps, growth)
    validate_not_sharded(model, "check", "check it in one process, before it is sharded: the rows are the same")
    devices = {param.device for param in model.parameters() if param.device.type != "cpu"}
    kind = next((device.type for device in devices), "cuda")
    given = paths if paths is None or isinstance(paths, list) else list(paths)
    with torch.random.fork_rng(devices, device_type=kind), run_uncompiled():
        trial = Trial(unwrapped(model), optimizers, given or [], batch, loss or default_loss).copy()
        if given is None:
            trial.paths = logit_paths(trial.model, batch)
        rule = chosen_rule(tau, rule)
        QuacK(trial.paths, trial.optimizers, rule=copy.deepcopy(rule)).remove()  # raises if it refuses the paths
        layers, unmeasured = compared_layers(trial.model, trial.paths, batch)
        start = trial.copy().changes(layers, steps, 1.0, rule)
        plain = trial.copy().changes(layers, steps, growth, None)
        quack = trial.copy().changes(layers, steps, growth, rule)
    trains = [any(w.trains for i in of for w in trial.paths[i].weights) for of in layers.values()]
    numbers = zip(layers, start, plain, quack, trains, strict=True)
    reports = [LayerReport(*layer, unmeasured.get(layer, ""), a, b, c, d) for layer, a, b, c, d in numbers]
    return CheckReport(tuple(reports), growth, dict(getattr(trial.paths, "left_alone", {})))


def _validate(optimizers: list[Optimizer], steps: int, growth: float) -> None:
    if steps < 1:
        raise ValueError(f"steps={steps}: at least one step must be taken")
    if not 0 < growth < float("inf"):
        raise ValueError(f"growth={growth}: the factor of the weights must be a positive number")
    if all(is_idle(optimizer) for optimizer in optimizers):
        raise ValueError("every learning rate is 0, so no step moves anything; check before a warmup begins, or set lr")


def compared_layers(model: nn.Module, paths: list[LogitPath], batch: Any) -> tuple[Layers, dict[Layer, str]]:
    """The indices of the paths of each layer; and for layers whose rows could not be measured, the reason.

    A layer is an attention module and its number of heads. ValueError if the rows of a layer are not those measured.
    """
    modules, measured = dict(named_modules(model)), measured_paths(model, batch)
    layers: Layers = {}
    for i, path in enumerate(paths):
        layers.setdefault((_module_of(path, modules, measured), path.heads), []).append(i)
    unmeasured: dict[Layer, str] = {}
    for name, module in modules.items():
        found = [finding for inner, finding in measured.items() if innermost(inner, layers) == name]
        unknown = [finding.reason for finding in found if finding.unknown]
        of_module = [layer for layer in layers if layer[0] == name]
        if unknown or not found:
            unmeasured |= dict.fromkeys(of_module, [*unknown, NOT_SEEN][0])
        elif of_module:
            ruled = [paths[i] for layer in of_module for i in layers[layer]]
            if wrong := differences(ruled, [path for finding in found for path in finding.paths], model):
                raise contradiction("what is declared", name, module, wrong)
    return layers, unmeasured


def _module_of(path: LogitPath, modules: Container[str], measured: Iterable[str]) -> str:
    """The module that a path is named after and that attends; if none does, the innermost one."""
    parts = path.weights[0].name.split(".")[:-1]
    outer = [name for n in range(len(parts), 0, -1) if (name := ".".join(parts[:n])) in modules]
    return next((name for name in outer if any(is_inside(attention, name) for attention in measured)), [*outer, ""][0])
