"""`quacklr.check`: compare the rows of all paths with a measurement, and take real steps on a copy of the model."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from quacklr.checking.report import CheckReport, LayerReport
from quacklr.checking.steps import Loss, Stepper, Trial, default_loss, innermost
from quacklr.core.path import LogitPath, attentions_of
from quacklr.core.rule import Rule
from quacklr.core.stepped import is_idle
from quacklr.core.validate import validate_number
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
    """Test that `QuacK(model, optimizer)` scales the right rows of every head, and nothing else.

        print(check(model, optimizer, batch))

    Raises ValueError if the rows of a path are not the rows that are measured on the batch (a tensor, a tuple, or a
    dict). Then QuacK is attached to a copy of the model, the weights on the paths are multiplied by `growth`, as if
    they had grown in a long training, and the copy takes a few real steps. Every row must move by its rate times the
    step of the optimizer alone. The report has the change of each head's logits without and with QuacK, in nats, each
    beside what `quack.changes()` says about it.

    `rule` and `tau` are those of QuacK; a rule is used up. `paths` defaults to `logit_paths(model, batch)`.
    `loss(model, batch)` defaults to the model's own loss, or to a distance to random numbers. Neither the model nor the
    optimizers are changed. Takes about 10 forward and backward passes, and holds three copies of the parameters.
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
        with QuacK(trial.paths, trial.optimizers, rule=chosen_rule(tau, rule)) as quack:
            modules, unmeasured = compared_rows(trial.model, trial.paths, batch)
            _grow(trial.paths, growth)
            stepper = Stepper(trial, quack, modules)
            of_steps = [stepper.step() for _ in range(steps)]
    layers = []
    for name, of_attention in attentions_of(trial.paths).items():
        numbers = torch.stack([of_step[name] for of_step in of_steps]).amax(0)
        trains = any(weight.trains for path in of_attention for weight in path.weights)
        layers.append(LayerReport(name, trains, unmeasured.get(modules[name], ""), *numbers))
    left_alone = dict(getattr(trial.paths, "left_alone", {}))
    return CheckReport(tuple(layers), tuple(sorted(stepper.wrong)), growth, left_alone)


def _validate(optimizers: list[Optimizer], steps: int, growth: float) -> None:
    if steps < 1:
        raise ValueError(f"steps={steps}: at least one step must be taken")
    validate_number("growth", growth, "the factor of the weights")
    if all(is_idle(optimizer) for optimizer in optimizers):
        raise ValueError("every learning rate is 0, so no step moves anything; check before a warmup begins, or set lr")


@torch.no_grad()
def _grow(paths: Iterable[LogitPath], growth: float) -> None:
    """Multiply the rows on the paths by a factor, each once."""
    weights = {weight for path in paths for weight in path.weights}
    parts = {(id(part.param), part.name): part for weight in weights for part in weight.parts}
    for part in parts.values():
        part.param.mul_(part.spread(torch.where(part.block_of_row >= 0, growth, 1.0).to(part.param)))


def compared_rows(model: nn.Module, paths: list[LogitPath], batch: Any) -> tuple[dict[str, str], dict[str, str]]:
    """The module of each attention; and for modules whose rows could not be measured, the reason.

    ValueError if the rows of a path are not those measured.
    """
    named, measured = dict(named_modules(model)), measured_paths(model, batch)
    attentions = attentions_of(paths)
    modules = {name: _module_of(of[0], named, measured) for name, of in attentions.items()}
    unmeasured: dict[str, str] = {}
    for module in dict.fromkeys(modules.values()):
        found = [finding for inner, finding in measured.items() if innermost(inner, modules.values()) == module]
        unknown = [finding.reason for finding in found if finding.unknown]
        ruled = [path for name, of in attentions.items() if modules[name] == module for path in of]
        if unknown or not found:
            unmeasured[module] = [*unknown, NOT_SEEN][0]
        elif wrong := differences(ruled, [path for finding in found for path in finding.paths], model):
            raise contradiction("what is declared", module, named[module], wrong)
    return modules, unmeasured


def _module_of(path: LogitPath, modules: Container[str], measured: Iterable[str]) -> str:
    """The module that a path is named after and that attends; if none does, the innermost one."""
    parts = path.weights[0].name.split(".")[:-1]
    outer = [name for n in range(len(parts), 0, -1) if (name := ".".join(parts[:n])) in modules]
    return next((name for name in outer if any(is_inside(attention, name) for attention in measured)), [*outer, ""][0])
