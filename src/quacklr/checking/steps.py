"""Real steps of a copy of a model: the largest change of each head's logits, and the bound of docs/theory.md on it.

    bound[h] = |scale| max ||x|| max ||y|| * sum over paths of (prod (||v|| + rate ||u||) - prod ||v||)

The norms are spectral norms of the blocks that head h reads; u is the optimizer's own step, before QuacK scales it.
The inputs of every attention are held at their values before the step, because the theorem is about the layer's own
weights. Operations between the weights of a path (rotations) are assumed to preserve norms.

Shapes: B batch, H head, I query, J key.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from quacklr.attention.monitor import LogitMonitor
from quacklr.checking.report import Change
from quacklr.core.path import LogitPath
from quacklr.core.rule import Rule
from quacklr.core.step_scaler import first_after_step
from quacklr.core.weight import Weight, distinct
from quacklr.find.finding import is_inside
from quacklr.quack import QuacK
from quacklr.util.modules import named_modules, run
from quacklr.util.torch_functions import ADDED_MATMUL, CONVOLUTION, MATMUL

Loss = Callable[[nn.Module, Any], Tensor]
Layer = tuple[str, int]  # an attention module and its number of heads
Layers = dict[Layer, list[int]]  # the indices of the paths of each layer
Values = dict[Tensor, Tensor]  # by parameter
Norms = dict[Weight, Tensor]  # (blocks,) by weight
MASKED = -1e37  # a logit below this number is masked
TOLERANCE = 1e-3  # relative: of a step to its rate, of a change to its bound


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

    def changes(self, layers: Layers, steps: int, growth: float, rule: Rule | None) -> list[Change]:
        """For each layer, the largest changes in some steps; without QuacK if there is no rule.

        The weights are multiplied by `growth` after QuacK is attached.
        """
        torch.manual_seed(0)
        quack = None if rule is None else QuacK(self.paths, self.optimizers, rule=copy.deepcopy(rule))
        stepper = Stepper(self, layers, quack)
        with torch.no_grad():
            for part in stepper.parts:
                part.param.mul_(part.spread(torch.where(part.block_of_row >= 0, growth, 1.0).to(part.param)))
        of_steps = [stepper.step() for _ in range(steps)]
        if quack is not None:
            quack.remove()
        return [Change.largest(of_layer) for of_layer in zip(*of_steps, strict=True)]

    def step(self) -> None:
        """One real step of all optimizers. The buffers of the model are not changed."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        torch.clear_autocast_cache()
        with kept_buffers(self.model), torch.enable_grad():
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
    """Takes steps, and measures the changes of logits. Made after QuacK is attached: its hook runs before QuacK's."""

    def __init__(self, trial: Trial, layers: Layers, quack: QuacK | None) -> None:
        self.trial, self.layers, self.quack = trial, layers, quack
        self.canonical = distinct(weight for path in trial.paths for weight in path.weights)
        self.weights = list(dict.fromkeys(self.canonical.values()))
        self.parts = [part for weight in self.weights for part in weight.parts]
        self.monitor = LogitMonitor(trial.model, trial.batch)
        self.monitor.measure()  # the first measurement may run modules more than once, to find the order of heads
        self._unscaled: Values = {}  # parameters as the optimizer alone would have left them
        for optimizer in trial.optimizers:
            first_after_step(optimizer, self._keep_unscaled)

    def _keep_unscaled(self, optimizer: Optimizer, *_: Any) -> None:
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            self._unscaled.setdefault(param, param.detach().clone())  # a nested step runs hooks twice

    def step(self) -> list[Change]:
        """One step; for each layer the change of the logits that the step of the rows on paths causes."""
        params = dict.fromkeys([*self.trial.model.parameters(), *(part.param for part in self.parts)])
        old = {param: param.detach().clone() for param in params}
        inputs: dict[str, list[Any]] = {module: [] for module, _ in self.layers}
        with InputNorms(self.parts) as lengths, held_inputs(self.trial.model, inputs, record=True):
            before = self._logits()
        self._unscaled = {}
        self.trial.step()
        new = {param: param.detach().clone() for param in params}
        with torch.no_grad():
            _assign(old)
            for part in self.parts:
                on_path = part.spread(part.block_of_row >= 0).to(part.param.device)
                part.param.copy_(torch.where(on_path, new[part.param], part.param))
            with held_inputs(self.trial.model, inputs, record=False):
                after = self._logits()
            _assign(new)
        norms, taken, own = self._norms(old), self._norms(new, old), self._norms(old | self._unscaled, old)
        rates = {} if self.quack is None else self.quack.rates(last=True)
        allowed = {weight: step * rates.get(weight.name, torch.ones(())).cpu() for weight, step in own.items()}
        excess = {weight: taken[weight] - allowed[weight] * (1 + TOLERANCE) for weight in taken}
        too_far = {w: excess[w] > 4 * torch.finfo(w.param.dtype).eps * norms[w] for w in excess}
        bounds = [self._bound(layer, lengths, norms, allowed) for layer in self.layers]
        pairs = zip(self.layers, bounds, strict=True)
        return [self._change(layer, bound_H, before, after, too_far) for layer, bound_H in pairs]

    def _change(
        self, layer: Layer, bound_H: Tensor, before: dict[str, Tensor], after: dict[str, Tensor], too_far: Norms
    ) -> Change:
        """The change of one layer, from the logits before and after the step."""
        module, heads = layer
        calls = []
        for name, logits_BHIJ in before.items():
            count = logits_BHIJ.shape[1]
            if count == heads and innermost(name.partition("#")[0], self.layers, count) == module:
                calls.append(_compared(logits_BHIJ, after.get(name)))
        seen = torch.stack(calls).amax(0) if calls else torch.full((3, heads), torch.nan)
        measured_H, root_mean_square_H, size_H = seen.double()
        reads = [pair for i in self.layers[layer] for pair in self._reads(self.trial.paths[i])]
        exceeds_rate_H = torch.stack([too_far[weight][read] for weight, read in reads]).any(0)
        eps = max(torch.finfo(weight.param.dtype).eps for weight, _ in reads)
        exceeds_H = measured_H > (1 + TOLERANCE) * bound_H + max(1e-5, 4 * eps) * size_H
        return Change(measured_H, bound_H, root_mean_square_H, exceeds_H, exceeds_rate_H)

    def _reads(self, path: LogitPath) -> list[tuple[Weight, Tensor]]:
        """The weights of a path, each with the block that each head reads."""
        return list(zip([self.canonical[weight] for weight in path.weights], path.reads, strict=True))

    def _logits(self) -> dict[str, Tensor]:
        """(B, H, I, J) logits of the batch, by attention."""
        torch.clear_autocast_cache()  # it holds casts of weights that have changed since
        self.monitor.measure()
        return self.monitor.state_dict()

    def _norms(self, values: Values, minus: Values | None = None) -> Norms:
        """The spectral norms of all blocks, or of their differences."""
        found = {}
        for weight in self.weights:
            parts = [(_rows(part, values[part.param]), part.block_of_row) for part in weight.parts]
            if minus is not None:
                old = [_rows(part, minus[part.param]) for part in weight.parts]
                parts = [(new - before, blocks) for (new, blocks), before in zip(parts, old, strict=True)]
            if not all(rows.isfinite().all() for rows, _ in parts):
                raise ValueError("weights are NaN or inf after a step: lower the learning rate, or check the loss")
            blocks = [torch.cat([rows[of == b] for rows, of in parts], 1) for b in range(weight.blocks)]
            found[weight] = torch.stack([torch.linalg.matrix_norm(block, ord=2) for block in blocks])
        return found

    def _bound(self, layer: Layer, lengths: InputNorms, norms: Norms, allowed: Norms) -> Tensor:
        """(H,): the bound of one layer."""
        paths = [self.trial.paths[i] for i in self.layers[layer]]
        bound_H = torch.zeros(layer[1], dtype=torch.float64)
        for path in paths:
            reads = self._reads(path)
            after_H = torch.stack([(norms[weight] + allowed[weight])[read] for weight, read in reads]).prod(0)
            before_H = torch.stack([norms[weight][read] for weight, read in reads]).prod(0)
            scale = math.sqrt(1 / _head_size(paths)) if path.scale is None else abs(path.scale)
            scale *= math.prod(abs(weight.gain) for weight in path.weights)
            ends = dict.fromkeys((path.weights[0], path.weights[-1]))
            bound_H += scale * math.prod(lengths.of(weight) for weight in ends) * (after_H - before_H)
        return bound_H


def _rows(part: Weight, value: Tensor) -> Tensor:
    """(rows, columns) of a parameter, in double precision."""
    return value.movedim(part.dims, tuple(range(len(part.dims)))).reshape(len(part.block_of_row), -1).cpu().double()


def _head_size(paths: Iterable[LogitPath]) -> int:
    """The number of features of a head. Paths that share a weight use the same features."""
    size, seen = 0, set[Weight]()
    for path in paths:
        meeting = path.weights[path.meeting : path.meeting + 2]
        size += 0 if seen.intersection(meeting) else int(meeting[0].rows_of_block[0])
        seen |= set(meeting)
    return size


def innermost(attention: str, layers: Iterable[Layer], heads: int | None = None) -> str | None:
    """The innermost module of the layers (with this number of heads) that contains an attention."""
    around = [name for name, count in layers if is_inside(attention, name) and heads in (None, count)]
    return max(around, key=len, default=None)


def _compared(one_BHIJ: Tensor, other_BHIJ: Tensor | None) -> Tensor:
    """(3, H): the largest |difference|, the root mean square difference, and the largest |logit|, without masked ones.

    NaN if all logits of a head are masked, or if the shapes differ.
    """
    if other_BHIJ is None or one_BHIJ.shape != other_BHIJ.shape:
        return torch.full((3, one_BHIJ.shape[1]), torch.nan)
    masked_BHIJ = (one_BHIJ < MASKED) | (other_BHIJ < MASKED)
    count_H = (~masked_BHIJ).sum((0, 2, 3))
    change_BHIJ = (other_BHIJ - one_BHIJ).masked_fill(masked_BHIJ, 0)
    mean_H = change_BHIJ.square().sum((0, 2, 3)) / count_H
    largest = [each.abs().amax((0, 2, 3)) for each in (change_BHIJ, one_BHIJ.masked_fill(masked_BHIJ, 0))]
    return torch.stack([largest[0], mean_H.sqrt(), largest[1]]).where(count_H > 0, torch.nan).cpu()


@contextmanager
def kept_buffers(model: nn.Module) -> Iterator[None]:
    """On exit, restore the values of the buffers."""
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    yield
    with torch.no_grad():
        for buffer, value in kept:
            buffer.copy_(value)


def _assign(values: Values) -> None:
    for param, value in values.items():
        param.copy_(value)


@contextmanager
def held_inputs(model: nn.Module, calls: dict[str, list[Any]], record: bool) -> Iterator[None]:
    """While entered, record the inputs of every call of some modules in `calls`, or replace them by those recorded."""

    def before(recorded: list[Any], args: Any, kwargs: Any) -> Any:
        leaves, tree = tree_flatten((args, kwargs))
        if record:
            copies = {id(each): each.detach().clone() for each in leaves if _is_float(each)}  # one for q is k is v
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


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


class InputNorms(TorchFunctionMode):
    """While entered, keeps the largest norm of the inputs that weights are multiplied with.

    A weight that is parametrised, cast or scaled before the product has no known input.
    """

    def __init__(self, weights: Iterable[Weight]) -> None:
        super().__init__()
        self._largest = {_storage(weight.param): torch.tensor(torch.nan) for weight in weights}

    def of(self, weight: Weight) -> float:
        """The largest norm, including the 1 that a bias multiplies; 1 for a single column; NaN if none was seen."""
        if weight.columns == 1:
            return 1.0
        return float(self._largest[_storage(weight.param)].square() + (weight.bias is not None)) ** 0.5

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record the norms of the inputs if the function is a product, and call it.

        The product of x squared with a weight of ones has the squared norms of the inputs.
        """
        kwargs = kwargs or {}
        first = 1 if func in ADDED_MATMUL else 0
        if func in (F.linear, torch.einsum) or func in MATMUL | ADDED_MATMUL | CONVOLUTION:
            factors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)][first : first + 2]
            for weight, x in zip(factors, reversed(factors), strict=True):
                if (storage := _storage(weight)) in self._largest:
                    values = {id(weight): torch.ones_like(weight).float(), id(x): x.detach().float().square()}
                    norms = _replaced(func, args, kwargs, values).max().sqrt().cpu()
                    self._largest[storage] = self._largest[storage].fmax(norms)  # inputs may be NaN to find head orders
        return func(*args, **kwargs)


def _replaced(func: Any, args: Any, kwargs: Any, values: dict[int, Tensor]) -> Tensor:
    """Call a function with other values of some tensors, and zeros for all others, such as a bias."""

    def value(each: Any) -> Any:
        return values.get(id(each), torch.zeros_like(each).float()) if isinstance(each, Tensor) else each

    device = next(iter(values.values())).device.type
    with torch.no_grad(), torch.autocast(device, enabled=False):
        result: Tensor = func(*tree_map(value, args), **tree_map(value, kwargs))
    return result


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
