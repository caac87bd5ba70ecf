"""`quacklr.check`: compare the rows of all paths with a measurement, and take real steps on a copy of the model."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from quacklr.attention.monitor import LogitMonitor
from quacklr.checking.report import CheckReport, LayerReport
from quacklr.core.local import is_sharded
from quacklr.core.path import LogitPath, attentions_of, module_of
from quacklr.core.rule import Rule
from quacklr.core.step_scaler import first_after_step
from quacklr.core.validate import validate_number
from quacklr.core.weight import Weight
from quacklr.find.discover import logit_paths
from quacklr.find.finding import contradiction, differences, is_inside
from quacklr.find.measure.assemble import measured_paths
from quacklr.quack import QuacK, chosen_rule
from quacklr.util.modules import named_modules, named_parameters, run, run_uncompiled, untouched, unwrapped
from quacklr.util.torch_functions import tensors_in

Loss = Callable[[nn.Module, Any], Tensor]
NOT_SCALED = (
    "{}: QuacK's rates are not applied to its step; does the optimizer, or a hook of it, write into the weights after "
    "the step?"
)
SHARDED = (
    "{}: its parameter is sharded, and check needs the whole model; check it in one process, before it is sharded: the "
    "rows are the same"
)


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
    After each step, measuring the logits takes a forward pass for each layer.
    """
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    if steps < 1:
        raise ValueError(f"steps={steps}: at least one step must be taken")
    validate_number("growth", growth, "the factor of the weights")
    model, rule = unwrapped(model), copy.deepcopy(chosen_rule(tau, rule))
    if sharded := [name for name, param in model.named_parameters() if is_sharded(param)]:
        raise ValueError(SHARDED.format(sharded[0]))
    with untouched(model), run_uncompiled():
        model, optimizers, given = _copied(model, optimizers, None if paths is None else list(paths))
        given = logit_paths(model, batch) if given is None else given
        with QuacK(given, optimizers, rule=rule, verify=False) as quack:
            problems = _unmeasured(model, rule.paths.paths, batch)
            _multiply_rows(rule.paths.parts, growth)
            torch.manual_seed(0)
            layers, loss = attentions_of(rule.paths.paths), loss or default_loss
            steps_taken = [
                (quack.changes(), _measured_changes(model, batch, layers, old))
                for old in _real_steps(model, batch, loss, quack, steps)
            ]
            reports = []
            for name, of_layer in layers.items():
                changes = [(*in_step[name], measured[name]) for in_step, measured in steps_taken]
                reports.append(_report(of_layer, changes, problems.get(module_of(of_layer[0]), "")))
            return CheckReport(tuple(reports), dict(quack.left_alone))


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


def _unmeasured(model: nn.Module, paths: Sequence[LogitPath], batch: Any) -> dict[str, str]:
    """By module, why its rows could not be measured. ValueError if the rows are not those measured."""
    modules, measured, unmeasured = dict(named_modules(model)), measured_paths(model, batch), dict[str, str]()
    parameters = {id(parameter): name for name, parameter in named_parameters(model)}
    layers = dict.fromkeys(map(module_of, paths))
    for name in layers:
        given = [path for path in paths if module_of(path) == name]
        found = [finding for inner, finding in measured.items() if _innermost(inner, layers) == name]
        reasons = [finding.reason for finding in found if finding.unknown]
        if reasons or not found:
            reason = next(iter(reasons), "no attention was seen in the module that they are named after")
            unmeasured[name] = f"its rows could not be measured: {reason}"
        elif wrong := differences(given, [path for finding in found for path in finding.paths], parameters):
            raise contradiction("what is declared", name, modules[name], wrong)
    return unmeasured


def _innermost(attention: str, modules: Iterable[str]) -> str | None:
    """The innermost of these modules that contains an attention."""
    return max((name for name in modules if is_inside(attention, name)), key=len, default=None)


@torch.no_grad()
def _multiply_rows(parts: Iterable[Weight], growth: float) -> None:
    for part in parts:
        part.param.mul_(part.spread(torch.where(part.block_of_row >= 0, growth, 1.0).to(part.param)))


def _real_steps(model: nn.Module, batch: Any, loss: Loss, quack: QuacK, count: int) -> Iterator[dict[Tensor, Tensor]]:
    """Take real steps of the parameters on paths. After each, these parameters as they were before it.

    Other parameters, and the buffers of the model, are not changed. ValueError if a step is not scaled by its rates.
    """
    own: dict[Tensor, Tensor] = {}  # parameters as the optimizer alone would have left them

    def keep_own(optimizer: Optimizer, *_: Any) -> None:
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            own.setdefault(param, param.detach().clone())  # a nested step runs hooks twice

    for optimizer in quack.optimizers:
        first_after_step(optimizer, keep_own)
    quack.changes()  # from now on it measures the steps
    weights = quack.rule.paths.weights
    for _ in range(count):
        old = {part.param: part.param.detach().clone() for weight in weights for part in weight.parts}
        own.clear()
        torch.clear_autocast_cache()  # it holds casts of weights that have changed since
        with untouched(model), warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore")  # that the optimizer has stepped before QuacK was attached
            loss(model, batch).backward()
            for param in model.parameters():
                param.grad = param.grad if param in old else None
            for optimizer in quack.optimizers:
                optimizer.step()
        rates = quack.rates(last=True)
        for weight in weights:
            for part in weight.parts:
                _validate_scaled(part, rates.get(weight.name), old[part.param], own.get(part.param))
        yield old


@torch.no_grad()
def _validate_scaled(part: Weight, rates: Tensor | None, old: Tensor, own: Tensor | None) -> None:
    """ValueError unless the rows are old + rate * (own step of the optimizer). None: no rates, or no step."""
    new = part.param.float()
    if not new.isfinite().all():
        raise ValueError("weights are NaN or inf after a step: lower the learning rate, or check the loss")
    rates = torch.ones(part.blocks) if rates is None else rates
    rate_of_row = rates.to(new)[part.block_of_row.clamp(min=0).to(new.device)]
    expected = torch.lerp(old.float(), part.param.float() if own is None else own.float(), part.spread(rate_of_row))
    rounding = 4 * torch.finfo(part.param.dtype).eps * new.abs().max()
    if ((expected - new).abs() * part.spread(part.block_of_row >= 0).to(new) > rounding).any():
        raise ValueError(NOT_SCALED.format(part.name))


@torch.no_grad()
def _measured_changes(
    model: nn.Module, batch: Any, layers: Mapping[str, Sequence[LogitPath]], old: Mapping[Tensor, Tensor]
) -> dict[str, Tensor]:
    """By layer, (heads,): the mean |change| of its logits if only its own rows take the step.

    The bound is about these rows, and not about the effect of earlier layers on the inputs. -inf without logits.
    """
    new = {param: param.clone() for param in old}
    monitor, changes = LogitMonitor(model, batch), dict[str, Tensor]()
    for param in old:
        param.copy_(old[param])
    torch.clear_autocast_cache()
    monitor.measure()
    modules = [module_of(paths[0]) for paths in layers.values()]
    for name, paths in layers.items():
        parts = [part for path in paths for weight in path.weights for part in weight.parts]
        for part in parts:
            stepped = part.spread(part.block_of_row >= 0).to(part.param.device)
            part.param.copy_(torch.where(stepped, new[part.param], part.param))
        torch.clear_autocast_cache()
        measured = monitor.measure(keep=False)
        for part in parts:
            part.param.copy_(old[part.param])
        inside = [each for each in measured if _innermost(each.partition("#")[0], modules) == module_of(paths[0])]
        of_attention = [measured[each].mean_change for each in inside if len(measured[each].max) == paths[0].heads]
        changes[name] = torch.stack([torch.full((paths[0].heads,), -torch.inf), *of_attention]).amax(0)
    for param in old:
        param.copy_(new[param])
    return changes


def _report(paths: Sequence[LogitPath], changes: Iterable[Sequence[Tensor]], problem: str) -> LayerReport:
    """The line of a layer, with the largest changes of all steps. `changes` has (asked, given, measured) of each."""
    asked, given, measured = (torch.stack(each).amax(0).cpu() for each in zip(*changes, strict=True))
    trains = any(weight.trains for path in paths for weight in path.weights)
    if not problem and not measured.isfinite().all():
        problem = "no logits to compare"
    elif not problem and trains and not (given > 0).all():
        problem = "its rows took no step: no gradient, or lr is 0"
    return LayerReport(module_of(paths[0]), len(measured), asked, given, measured, problem)


def default_loss(model: nn.Module, batch: Any) -> Tensor:
    """The loss, if the model returns it first; otherwise the mean squared distance to fixed random numbers."""
    outputs = [each for each in tensors_in(run(model, batch)) if each.requires_grad]
    if not outputs:
        raise ValueError(f"{type(model).__name__} gives nothing with a gradient; pass loss=, a function (model, batch)")
    if outputs[0].ndim == 0:
        return outputs[0]
    noise = torch.Generator().manual_seed(0)
    targets = [torch.randn(x.shape, generator=noise).to(x.device) for x in outputs]
    return torch.stack([F.mse_loss(x.float(), y) for x, y in zip(outputs, targets, strict=True)]).sum()
