"""Real steps of a copy of a model with QuacK, each beside the step that the optimizer alone takes from the same state.

Two things are compared: the rows, which must move by their rate times the optimizer's own step; and the change of each
head's logits by the steps of the weights on paths, with and without QuacK, for the inputs that its attention had before
the step.

Shapes: B batch, H head, I query, J key.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from quacklr.attention.monitor import LogitMonitor
from quacklr.core.path import LogitPath
from quacklr.find.finding import is_inside
from quacklr.quack import QuacK
from quacklr.util.modules import named_modules, named_parameters, run

Loss = Callable[[nn.Module, Any], Tensor]
MASKED = -1e37  # a logit below this number is masked
TOLERANCE = 1e-3  # of a step to its rate times the optimizer's own step


@dataclass(eq=False)
class Trial:
    """A copy of a model, its optimizers and its paths, which takes real steps."""

    model: nn.Module
    optimizers: list[Optimizer]
    paths: list[LogitPath]
    batch: Any
    loss: Loss

    def copy(self) -> Trial:
        """A copy that can be stepped independently. Parameters are shared as before; hooks are not copied."""
        memo: dict[int, Any] = {}
        try:
            model, optimizers, paths = copy.deepcopy((self.model, self.optimizers, self.paths), memo)
            for before, after in zip(self.optimizers, optimizers, strict=True):
                for name, value in vars(before).items():  # deepcopy of an optimizer keeps only torch's own attributes
                    if name not in vars(after) and not callable(value):
                        setattr(after, name, copy.deepcopy(value, memo))
        except (RuntimeError, TypeError) as error:
            kind = type(self.model).__name__
            raise ValueError(f"{kind} cannot be copied, and only a copy is ever stepped: {error}") from error
        return Trial(model, optimizers, paths, self.batch, self.loss)

    def step(self) -> None:
        """One real step of all optimizers."""
        torch.manual_seed(0)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        torch.clear_autocast_cache()  # it holds casts of weights that have changed since
        with torch.enable_grad():
            self.loss(self.model, self.batch).backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the optimizer has stepped before QuacK was attached
            for optimizer in self.optimizers:
                optimizer.step()


def default_loss(model: nn.Module, batch: Any) -> Tensor:
    """The loss that the model returns; for other outputs the mean squared distance to fixed random numbers."""
    returned = run(model, batch)
    loss = getattr(returned, "loss", None)
    loss = returned if loss is None else loss
    if isinstance(loss, Tensor) and loss.ndim == 0:
        return loss
    outputs = [each for each in tree_leaves(returned) if isinstance(each, Tensor) and each.requires_grad]
    if not outputs:
        raise ValueError(f"{type(model).__name__} gives nothing with a gradient; pass loss=, a function (model, batch)")
    noise = torch.Generator().manual_seed(0)
    targets = [torch.randn(x.shape, generator=noise).to(x.device) for x in outputs]
    return torch.stack([(x.float() - y).square().mean() for x, y in zip(outputs, targets, strict=True)]).sum()


class Stepper:
    """Takes steps with QuacK. `modules` has, by the name of each attention in `quack.changes()`, its module.

    `wrong` are the names of parameters with a row that did not move by its rate times the optimizer's own step.
    """

    def __init__(self, trial: Trial, quack: QuacK, modules: Mapping[str, str]) -> None:
        self.trial, self.quack, self.modules = trial, quack, modules
        self.wrong: set[str] = set()
        weights = dict.fromkeys(weight for path in trial.paths for weight in path.weights)
        self.parts = [part for weight in weights for part in weight.parts]
        self.monitor = LogitMonitor(trial.model, trial.batch)
        self.monitor.measure()  # the first measurement may run modules more than once
        quack.changes()  # from now on they are measured

    def step(self) -> dict[str, Tensor]:
        """By attention, (4, H): root mean square changes of its logits without and with QuacK; `asked` and `given`."""
        params = [param for _, param in named_parameters(self.trial.model)]
        inputs: dict[str, list[Any]] = {module: [] for module in self.modules.values()}
        before = self._logits(inputs, record=True)
        plain, old = self.trial.copy(), [param.detach().clone() for param in params]
        plain.step()
        self.trial.step()
        own = [param.detach() for _, param in named_parameters(plain.model)]
        new = [param.detach().clone() for param in params]
        self.wrong.update(self._wrong(old, own, new))
        afterwards = []
        for values in (own, new):
            self._assign_rows(params, old, values)
            afterwards.append(self._logits(inputs, record=False))
        _assign(params, new)
        rows = {name: [change.asked.cpu(), change.given.cpu()] for name, change in self.quack.changes().items()}
        moved = {name: [self._moved(name, len(rows[name][0]), before, after) for after in afterwards] for name in rows}
        return {name: torch.stack([*moved[name], *rows[name]]) for name in rows}

    @torch.no_grad()
    def _assign_rows(self, params: list[nn.Parameter], old: list[Tensor], values: list[Tensor]) -> None:
        """Give the rows on paths these values, and all other rows their old ones."""
        _assign(params, old)
        value_of = {id(param): value for param, value in zip(params, values, strict=True)}
        for part in self.parts:
            on_path = part.spread(part.block_of_row >= 0).to(part.param.device)
            part.param.copy_(torch.where(on_path, value_of[id(part.param)], part.param))

    def _wrong(self, old: list[Tensor], own: list[Tensor], new: list[Tensor]) -> Iterator[str]:
        named = named_parameters(self.trial.model)
        for (name, param), before, alone, after in zip(named, old, own, new, strict=True):
            if not alone.isfinite().all():
                raise ValueError("weights are NaN or inf after a step: lower the learning rate, or check the loss")
            rate = self.quack.rate_of(param, last=True)
            step = (alone - before) * (1.0 if rate is None else rate)
            rounding = 4 * torch.finfo(param.dtype).eps * (before.abs() + alone.abs())
            if ((after - before - step).abs() > TOLERANCE * step.abs() + rounding).any():
                yield name

    def _logits(self, inputs: dict[str, list[Any]], record: bool) -> dict[str, Tensor]:
        """(B, H, I, J) logits of the batch, by attention, while inputs are recorded or held."""
        torch.clear_autocast_cache()
        calls = inputs if record else {name: list(recorded) for name, recorded in inputs.items()}
        with held_inputs(self.trial.model, calls, record):
            self.monitor.measure()
        return self.monitor.state_dict()

    def _moved(self, name: str, heads: int, before: dict[str, Tensor], after: dict[str, Tensor]) -> Tensor:
        """(H,): the root mean square change of an attention's logits, the largest of its calls; NaN if not seen."""
        changes = [
            _change(logits_BHIJ, after.get(call))
            for call, logits_BHIJ in before.items()
            if innermost(call.partition("#")[0], self.modules.values()) == self.modules[name]
            and logits_BHIJ.shape[1] == heads
        ]
        return torch.stack(changes).amax(0) if changes else torch.full((heads,), torch.nan)


def innermost(attention: str, modules: Iterable[str]) -> str | None:
    """The innermost of the modules that contains an attention."""
    return max((name for name in modules if is_inside(attention, name)), key=len, default=None)


def _change(one_BHIJ: Tensor, other_BHIJ: Tensor | None) -> Tensor:
    """(H,): the root mean square difference, without masked logits; NaN if all are masked, or if the shapes differ."""
    if other_BHIJ is None or one_BHIJ.shape != other_BHIJ.shape:
        return torch.full((one_BHIJ.shape[1],), torch.nan)
    masked_BHIJ = (one_BHIJ < MASKED) | (other_BHIJ < MASKED)
    squares_H = (other_BHIJ - one_BHIJ).masked_fill(masked_BHIJ, 0).square().sum((0, 2, 3))
    return (squares_H / (~masked_BHIJ).sum((0, 2, 3))).sqrt().cpu()


@torch.no_grad()
def _assign(params: list[nn.Parameter], values: list[Tensor]) -> None:
    for param, value in zip(params, values, strict=True):
        param.copy_(value)


@contextmanager
def held_inputs(model: nn.Module, calls: dict[str, list[Any]], record: bool) -> Iterator[None]:
    """While entered, record the inputs of every call of some modules in `calls`, or replace them by those recorded."""

    def before(recorded: list[Any], args: Any, kwargs: Any) -> Any:
        leaves, tree = tree_flatten((args, kwargs))
        if record:
            floats = [each for each in leaves if isinstance(each, Tensor) and each.is_floating_point()]
            copies = {id(each): each.detach().clone() for each in floats}  # one for q is k is v
            recorded.append([copies.get(id(each)) for each in leaves])
        elif recorded:
            held = recorded.pop(0)
            return tree_unflatten([new if old is None else old for new, old in zip(leaves, held, strict=True)], tree)
        return None

    hooks = [
        module.register_forward_pre_hook(
            lambda _, args, kwargs, of=calls[name]: before(of, args, kwargs), with_kwargs=True
        )
        for name, module in named_modules(model)
        if name in calls
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
