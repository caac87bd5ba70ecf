"""`quacklr.check`: compare the rows of all paths with a measurement, and take real steps on a copy of the model."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from quacklr.checking.report import CheckReport, LayerReport
from quacklr.checking.steps import Loss, Steps, default_loss
from quacklr.core.changes import HeadChange
from quacklr.core.local import is_sharded
from quacklr.core.path import LogitPath, attentions_of
from quacklr.core.rule import Rule
from quacklr.core.stepped import is_idle
from quacklr.core.validate import validate_number
from quacklr.core.weight import Weight
from quacklr.find.compare import contradiction, differences
from quacklr.find.discover import by_module, logit_paths
from quacklr.find.finding import is_inside
from quacklr.find.measure.assemble import measured_paths
from quacklr.quack import QuacK, chosen_rule
from quacklr.util.modules import named_modules, run_uncompiled, untouched, unwrapped

SHARDED = (
    "{}: its parameter is sharded, and check needs the whole model; check it in one process, before it is sharded: the "
    "rows are the same"
)

Changes = tuple[Mapping[str, HeadChange], Mapping[str, Tensor]]


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
    """Test that `QuacK(model, optimizer)` scales the right rows of every head, each by its rate.

        print(check(model, optimizer, batch))

    Raises ValueError if the rows of a path are not the rows that are measured on the batch (a tensor, a tuple, or a
    dict). Then a copy of the model takes a few real steps with QuacK, after its rows were multiplied by `growth`, as if
    they had grown in a long training. Raises ValueError if a step is not the optimizer's own step times the rate. The
    report has the change of each head's logits in a step, beside the bound of `quack.changes()`.

    `rule` and `tau` are those of QuacK. `paths` defaults to `logit_paths(model, batch)`. `loss(model, batch)` defaults
    to the model's own loss, or to a distance to random numbers. Neither the model nor the optimizers are changed.
    """
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    if steps < 1:
        raise ValueError(f"steps={steps}: at least one step must be taken")
    validate_number("growth", growth, "the factor of the weights")
    if all(is_idle(each) for each in optimizers):
        raise ValueError("every learning rate is 0, so no step moves anything; check before a warmup begins, or set lr")
    model, rule = unwrapped(model), copy.deepcopy(chosen_rule(tau, rule))
    if sharded := [name for name, param in model.named_parameters() if is_sharded(param)]:
        raise ValueError(SHARDED.format(sharded[0]))
    given = paths if paths is None or isinstance(paths, list) else list(paths)
    with untouched(model), run_uncompiled():
        model, optimizers, given = _copied(model, optimizers, given)
        given = logit_paths(model, batch) if given is None else given
        with QuacK(given, optimizers, rule=rule) as quack:
            problems, layers = _unmeasured(model, rule.paths.paths, batch), attentions_of(rule.paths.paths)
            _multiply_rows(rule.paths.parts, growth)
            torch.manual_seed(0)
            modules = [module for name, module in named_modules(model) if name in by_module(rule.paths.paths)]
            stepper = Steps(model, modules, batch, loss or default_loss, quack)
            taken = [stepper.step() for _ in range(steps)]
            return CheckReport(tuple(_report(n, layers, taken, problems) for n in layers), dict(quack.left_alone))


def _copied(model: nn.Module, optimizers: list[Optimizer], paths: Any) -> tuple[nn.Module, list[Optimizer], Any]:
    """Copies that can be stepped. Parameters are shared as before; hooks of optimizers are not copied."""
    memo: dict[int, Any] = {}
    try:
        copies = copy.deepcopy((model, optimizers, paths), memo)
        for before, after in zip(optimizers, copies[1], strict=True):
            for name, value in vars(before).items():  # deepcopy of an optimizer keeps only torch's own attributes
                if name not in vars(after) and not callable(value):
                    setattr(after, name, copy.deepcopy(value, memo))
    except (RuntimeError, TypeError) as error:
        kind = type(model).__name__
        raise ValueError(f"{kind} cannot be copied, and only a copy is ever stepped: {error}") from error
    return copies


@torch.no_grad()
def _multiply_rows(parts: Iterable[Weight], growth: float) -> None:
    for part in parts:
        part.param.mul_(part.spread(torch.where(part.block_of_row >= 0, growth, 1.0).to(part.param)))


def _module(path: LogitPath) -> str:
    """The attention module of a path: a weight is named `<module>.<role>`."""
    return path.weights[0].name.rpartition(".")[0]


def _unmeasured(model: nn.Module, paths: Iterable[LogitPath], batch: Any) -> dict[str, str]:
    """By module, why its rows could not be measured. ValueError if the rows are not those measured."""
    modules, measured, unmeasured = dict(named_modules(model)), measured_paths(model, batch), dict[str, str]()
    layers = by_module(paths)
    for name, given in layers.items():
        found = [finding for inner, finding in measured.items() if _innermost(inner, layers) == name]
        reasons = [finding.reason for finding in found if finding.unknown]
        if reasons or not found:
            reason = next(iter(reasons), "no attention was seen in the module that they are named after")
            unmeasured[name] = f"its rows could not be measured: {reason}"
        elif wrong := differences(given, [path for finding in found for path in finding.paths], model):
            raise contradiction("what is declared", name, modules[name], wrong)
    return unmeasured


def _innermost(attention: str, modules: Iterable[str]) -> str | None:
    """The innermost of these modules that contains an attention."""
    return max((name for name in modules if is_inside(attention, name)), key=len, default=None)


def _report(
    name: str, layers: Mapping[str, list[LogitPath]], taken: Sequence[Changes], problems: Mapping[str, str]
) -> LayerReport:
    """The largest changes of a layer in all steps."""
    module, heads = _module(layers[name][0]), layers[name][0].heads
    modules = [_module(paths[0]) for paths in layers.values() if paths[0].heads == heads]
    logits = [torch.full((heads,), -torch.inf)]  # not finite if the layer has no logits
    for _, measured in taken:
        own = [attention for attention in measured if _innermost(attention.partition("#")[0], modules) == module]
        logits += [measured[attention] for attention in own if len(measured[attention]) == heads]
    measured_H = torch.stack(logits).amax(0)
    asked_H, given_H = (torch.stack([getattr(c[name], of) for c, _ in taken]).amax(0) for of in HeadChange._fields)
    problem = problems.get(module, "" if measured_H.isfinite().all() else "no logits to compare")
    trains = any(weight.trains for path in layers[name] for weight in path.weights)
    if not problem and trains and not (given_H > 0).all():
        problem = "its rows took no step: no gradient, or lr is 0"
    return LayerReport(module, heads, asked_H.cpu(), given_H.cpu(), measured_H, problem)
