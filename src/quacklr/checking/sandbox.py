"""A copy of a model with its optimizers, on which real steps can be taken without changing the original."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from quacklr.attention.head_order import HeadOrders
from quacklr.checking.expected_rows import ExpectedRows
from quacklr.core.path import LogitPath
from quacklr.find import logit_paths
from quacklr.find.measure.assemble import measured_paths
from quacklr.util.modules import run, undisturbed, untouched, unwrapped

Loss = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True, eq=False)
class Sandbox:
    """A copied model, its optimizers without hooks or schedulers, its paths, a batch and a loss.

    The paths are those of the rules if the batch could not be measured (`unmeasured` is the reason), or if the
    measurement differs from the rules (`contradiction` is the difference).
    """

    model: nn.Module
    optimizers: list[Optimizer]
    paths: list[LogitPath]
    batch: Any
    loss: Loss
    unmeasured: str = ""
    contradiction: str = ""
    orders: HeadOrders = field(default_factory=lambda: HeadOrders(strict=False))

    @classmethod
    def of(
        cls,
        model: nn.Module,
        optimizers: list[Optimizer],
        paths: Iterable[LogitPath] | None,
        batch: Any,
        loss: Loss | None,
    ) -> Sandbox:
        """Copy everything; paths that are not given are measured in the copy.

        Runs the batch once, because some models replace modules in their first forward pass.
        """
        given = paths if paths is None or isinstance(paths, list) else list(paths)
        model, optimizers, found = _copied(unwrapped(model), optimizers, given)
        with undisturbed(model):
            run(model, batch)
        found, unmeasured, contradiction = _found_paths(model, batch) if found is None else (found, "", "")
        return cls(model, optimizers, found, batch, loss or default_loss, unmeasured, contradiction)

    def copy(self) -> Sandbox:
        """A copy that can be stepped independently."""
        model, optimizers, paths = _copied(self.model, self.optimizers, self.paths)
        return replace(self, model=model, optimizers=optimizers, paths=paths)

    def expected_rows(self) -> ExpectedRows:
        """The rows that the paths assign to each head."""
        return ExpectedRows(self.paths, self.model)

    def has_gradients(self) -> bool:
        """Whether the loss of the batch has a gradient for any weight on a path."""
        self._backward()
        parts = [part for path in self.paths for weight in path.weights for part in weight.parts]
        return any(part.param.grad is not None for part in parts)

    def _backward(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        torch.clear_autocast_cache()
        with torch.enable_grad(), untouched(self.model):
            self.loss(self.model, self.batch).backward()
            gradients = [(parameter, parameter.grad) for parameter in self.model.parameters()]
        for parameter, gradient in gradients:
            parameter.grad = gradient

    def step(self) -> None:
        """One real step of all optimizers. Neither the training mode nor the buffers of the model are changed."""
        self._backward()
        for optimizer in self.optimizers:
            optimizer.step()


def _found_paths(model: nn.Module, batch: Any) -> tuple[list[LogitPath], str, str]:
    """The paths, `unmeasured` and `contradiction` of a Sandbox. ValueError if there are no paths."""
    try:
        return logit_paths(model, batch), "", ""
    except ValueError as error:
        why = str(error)
        try:
            by_rule = logit_paths(model)
        except ValueError:
            raise error from None
    try:
        measured = bool(measured_paths(model, batch))
    except ValueError:
        measured = False
    return (by_rule, "", why) if measured else (by_rule, why, "")


@contextmanager
def restored(params: Iterable[Tensor]) -> Iterator[dict[Tensor, Tensor]]:
    """Copies of parameters, by parameter. On exit the parameters have the copied values again. Disables gradients."""
    copies = {param: param.detach().clone() for param in params}
    with torch.no_grad():
        try:
            yield copies
        finally:
            for param, value in copies.items():
                param.copy_(value)


def default_loss(model: nn.Module, batch: Any) -> Tensor:
    """The loss that the model returns; for other outputs the mean squared distance to fixed random numbers.

    Any gradient can be used. A mean square alone would have none if the last module is a norm.
    """
    returned = run(model, batch)
    loss = getattr(returned, "loss", None)
    loss = returned if loss is None else loss
    if isinstance(loss, Tensor) and loss.ndim == 0:
        return loss
    outputs = [each for each in _tensors(returned) if each.requires_grad and each.is_floating_point()]
    if not outputs:
        raise ValueError(f"{type(model).__name__} gives nothing with a gradient; pass loss=, a function (model, batch)")
    noise = torch.Generator().manual_seed(0)
    targets = [torch.randn(x.shape, generator=noise).to(x.device) for x in outputs]
    return torch.stack([(x.float() - y).square().mean() for x, y in zip(outputs, targets, strict=True)]).sum()


def _tensors(returned: Any) -> Iterator[Tensor]:
    if isinstance(returned, Tensor):
        yield returned
    elif isinstance(returned, Mapping | tuple | list):
        for each in returned.values() if isinstance(returned, Mapping) else returned:
            yield from _tensors(each)


def _copied(model: nn.Module, optimizers: list[Optimizer], paths: Any) -> tuple[nn.Module, list[Optimizer], Any]:
    """Copies that share parameters with each other as the originals do."""
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
