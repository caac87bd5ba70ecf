"""`quacklr.check`: compare the rows of all paths with a measurement, and take real steps on a copy of the model."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from quacklr.attention.logits import MASKED
from quacklr.attention.monitor import LogitMonitor
from quacklr.core.local import is_sharded
from quacklr.core.path import LogitPath, attentions_of, module_of
from quacklr.core.rule import Rule, validate_number
from quacklr.core.step_scaler import first_after_step
from quacklr.core.weight import Weight
from quacklr.find.discover import completed, logit_paths
from quacklr.find.finding import DECLARED, NOT_VERIFIED, Finding, innermost
from quacklr.find.measure.assemble import measured_paths
from quacklr.quack import QuacK, chosen_rule
from quacklr.util.modules import run, run_uncompiled, untouched, unwrapped
from quacklr.util.text_table import columns, grouped, value_range
from quacklr.util.torch_functions import tensors_in

Loss = Callable[[nn.Module, Any], Tensor]
NOT_SCALED = "{}: QuacK's rates are not applied to its step; does the optimizer or its hook write to weights after it?"
NOT_SEEN = "no attention was seen in the module that they are named after"
SHARDED = "{}: its parameter is sharded, and check needs the whole model; check it in one process, before it is sharded"


@dataclass(frozen=True, slots=True, eq=False)
class LayerReport:
    """The largest change of each head's logits in a step, in nats, (heads,) each.

    `asked` and `given` are those of `quack.changes()`: by the optimizer's own step, and the bound for the step as QuacK
    scaled it. `measured`: the root mean square of the change of the batch's logits by the layer's own rows. `problem`:
    why the check does not show that the layer is right, or "".
    """

    module: str
    asked: Tensor
    given: Tensor
    measured: Tensor
    problem: str


@dataclass(frozen=True, slots=True, eq=False)
class CheckReport:
    """Whether QuacK scales the right rows: `ok`, and a table if printed.

    `left_alone`: the reason for each attention or weight that QuacK does not control.
    """

    layers: tuple[LayerReport, ...]
    left_alone: Mapping[str, str]

    @property
    def ok(self) -> bool:
        """Whether every layer was shown to be right."""
        return not any(layer.problem for layer in self.layers)

    def __str__(self) -> str:
        rows: list[Sequence[str]] = [("attention", "heads", "asked", "given", "measured", "")]
        for layer in self.layers:
            ranges = [value_range(of_H) for of_H in (layer.asked, layer.given, layer.measured)]
            right = "ok" if layer.given.any() else "ok, but its rows took no step: they are frozen"
            rows.append((layer.module or "(model)", str(len(layer.measured)), *ranges, layer.problem or right))
        verdict = f"correct: {sum(not layer.problem for layer in self.layers)} of {len(self.layers)} layers"
        sections = columns(rows), grouped("left alone:", self.left_alone), [verdict]
        return "\n\n".join("\n".join(section) for section in sections if section)


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
            problems = _problems(model, rule.paths.paths, batch)
            with torch.no_grad():
                for part in rule.paths.parts:
                    part.param.mul_(part.spread(torch.where(part.block_of_row >= 0, growth, 1.0).to(part.param)))
            torch.manual_seed(0)
            layers = attentions_of(rule.paths.paths)
            taken = _real_steps(model, batch, loss or default_loss, quack, steps)
            changes = [(quack.changes(), _measured_changes(model, batch, layers, old)) for old in taken]
            reports = [
                _report(of, [(*step[name], measured[name]) for step, measured in changes], problems[module_of(of[0])])
                for name, of in layers.items()
            ]
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


def _problems(model: nn.Module, paths: Sequence[LogitPath], batch: Any) -> dict[str, str]:
    """By module, why its rows could not be measured, or "". ValueError if the rows are not those measured."""
    given = {name: [path for path in paths if module_of(path) == name] for name in map(module_of, paths)}
    found = {name: Finding(of, origin=DECLARED, note=NOT_SEEN) for name, of in given.items()}
    found |= completed(found, measured_paths(model, batch), model)
    reasons = {name: found[name].note.removeprefix(NOT_VERIFIED) for name in given}
    return {name: reason and f"its rows could not be measured: {reason}" for name, reason in reasons.items()}


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
    """By layer, (heads,): the root mean square of the change of its logits if only its own rows take the step.

    The bound is about these rows, and not about the effect of earlier layers on the inputs. -inf without logits.
    """
    new, changes = {param: param.clone() for param in old}, dict[str, Tensor]()
    monitor, modules = LogitMonitor(model, batch), [module_of(paths[0]) for paths in layers.values()]

    def logits_with(values: Mapping[Tensor, Tensor]) -> dict[str, Tensor]:
        for param, value in values.items():
            param.copy_(value)
        torch.clear_autocast_cache()
        monitor.measure()
        return monitor.state_dict()

    before = logits_with(old)
    for name, paths in layers.items():
        values = dict(old)
        for part in (part for path in paths for weight in path.weights for part in weight.parts):
            own = part.spread(part.block_of_row >= 0).to(part.param.device)
            values[part.param] = torch.where(own, new[part.param], values[part.param])
        now = logits_with(values)
        inside = [each for each in before if innermost(each.partition("#")[0], modules) == module_of(paths[0])]
        pairs = [(now[each], before[each]) for each in inside if each in now and now[each].shape == before[each].shape]
        found = [_root_mean_square(*pair) for pair in pairs if pair[0].shape[1] == paths[0].heads]
        changes[name] = torch.stack([torch.full((paths[0].heads,), -torch.inf), *found]).amax(0)
    for param in old:
        param.copy_(new[param])
    return changes


def _root_mean_square(now_BHIJ: Tensor, before_BHIJ: Tensor) -> Tensor:
    """(heads,): of the change of the logits that are not masked; NaN for a head without any."""
    masked_BHIJ = (now_BHIJ <= MASKED) | (before_BHIJ <= MASKED)
    squares_BHIJ = (now_BHIJ - before_BHIJ).masked_fill(masked_BHIJ, 0).square()
    return (squares_BHIJ.sum((0, 2, 3)) / masked_BHIJ.logical_not().sum((0, 2, 3))).sqrt().cpu()


def _report(paths: Sequence[LogitPath], changes: Iterable[Sequence[Tensor]], problem: str) -> LayerReport:
    """The line of a layer, with the largest changes of all steps. `changes` has (asked, given, measured) of each."""
    asked, given, measured = (torch.stack(each).amax(0).cpu() for each in zip(*changes, strict=True))
    trains = any(weight.trains for path in paths for weight in path.weights)
    if not problem and not measured.isfinite().all():
        problem = "no logits to compare"
    elif not problem and trains and not (given > 0).all():
        problem = "its rows took no step: no gradient, or lr is 0"
    return LayerReport(module_of(paths[0]), asked, given, measured, problem)


def default_loss(model: nn.Module, batch: Any) -> Tensor:
    """The loss, if the model returns it first; otherwise the mean squared distance to random numbers."""
    outputs = [each for each in tensors_in(run(model, batch)) if each.requires_grad]
    if not outputs:
        raise ValueError(f"{type(model).__name__} gives nothing with a gradient; pass loss=, a function (model, batch)")
    if outputs[0].ndim == 0:
        return outputs[0]
    return torch.stack([F.mse_loss(x.float(), torch.randn_like(x.float())) for x in outputs]).sum()
