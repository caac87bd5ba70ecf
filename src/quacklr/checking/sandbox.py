"""A copy of a model with its optimizers, to take real steps with; the original never notices."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from quacklr.checking.expected_rows import ExpectedRows
from quacklr.core.path import LogitPath
from quacklr.find import logit_paths
from quacklr.find.measure.assemble import measured_paths
from quacklr.logits.head_order import HeadOrders
from quacklr.util.modules import own_buffers, run, undisturbed, unwrapped

Loss = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True, eq=False)
class Sandbox:
    """A model, its optimizers without hooks or schedulers, its paths, and a batch with a loss to step on.

    `unmeasured`: why paths are those of the rules, if they could not be measured. `contradiction`: how what was
    measured differs from the rules, if it does.
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
        """Copies that belong together; the paths are measured in the copy unless they are given.

        Runs the batch once: some models put other modules in place when they first see what they are given.
        """
        given = paths if paths is None or isinstance(paths, list) else list(paths)
        twin, own, found = _copied((unwrapped(model), optimizers, given))
        with undisturbed(twin), own_buffers(twin):
            run(twin, batch)
        unmeasured = contradiction = ""
        if found is None:
            found, unmeasured, contradiction = found_paths(twin, batch)
        return cls(twin, own, found, batch, loss or default_loss, unmeasured, contradiction)

    def again(self) -> Sandbox:
        """A copy of the copy."""
        model, optimizers, paths = _copied((self.model, self.optimizers, self.paths))
        return replace(self, model=model, optimizers=optimizers, paths=paths)

    def claims(self) -> ExpectedRows:
        """What its paths say."""
        return ExpectedRows(self.paths, self.model)

    def reaches_a_path(self) -> bool:
        """Whether the loss of the batch has a gradient for any weight on a path."""
        self._backward()
        parts = [part for path in self.paths for weight in path.weights for part in weight.parts]
        return any(part.param.grad is not None for part in parts)

    def _backward(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        torch.clear_autocast_cache()
        with torch.enable_grad(), own_buffers(self.model):
            self.loss(self.model, self.batch).backward()

    def step(self) -> None:
        """One real step of all optimizers, in the mode that the model was given in; buffers stay what they are."""
        self._backward()
        for optimizer in self.optimizers:
            optimizer.step()


def found_paths(model: nn.Module, batch: Any) -> tuple[list[LogitPath], str, str]:
    """Measured paths; or those of the rules, with why they could not be measured, or how they were measured otherwise.

    ValueError if there are none.
    """
    try:
        return logit_paths(model, batch), "", ""
    except ValueError as error:
        why = str(error)
        try:
            ruled = logit_paths(model)
        except ValueError:
            raise error from None
    try:
        measurable = bool(measured_paths(model, batch))
    except ValueError:
        measurable = False
    return ruled, "" if measurable else why, why if measurable else ""


@contextmanager
def aside(params: Iterable[Tensor]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Parameters and copies of them; without gradients, and afterwards they are again what they were."""
    pairs = [(param, param.detach().clone()) for param in params]
    with torch.no_grad():
        try:
            yield pairs
        finally:
            for param, was in pairs:
                param.copy_(was)


def default_loss(model: nn.Module, batch: Any) -> Tensor:
    """The loss that the model returns; of other outputs the mean squared distance to fixed random numbers.

    Any real gradient will do. The mean square alone would have none where a norm comes last.
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
    return torch.stack(
        [(x.float() - torch.randn(x.shape, generator=noise).to(x.device)).square().mean() for x in outputs]
    ).sum()


def _tensors(returned: Any) -> Iterator[Tensor]:
    if isinstance(returned, Tensor):
        yield returned
    elif isinstance(returned, Mapping | tuple | list):
        for each in returned.values() if isinstance(returned, Mapping) else returned:
            yield from _tensors(each)


def _copied(together: tuple[nn.Module, list[Optimizer], Any]) -> tuple[nn.Module, list[Optimizer], Any]:
    """Copied in one go, so that they share parameters as the originals do."""
    memo: dict[int, Any] = {}
    try:
        copies = copy.deepcopy(together, memo)
        for before, after in zip(together[1], copies[1], strict=True):
            for name, value in vars(before).items():  # an optimizer copies nothing that is not torch's own
                if name not in vars(after) and not callable(value):
                    setattr(after, name, copy.deepcopy(value, memo))
    except (RuntimeError, TypeError) as error:
        kind = type(together[0]).__name__
        raise ValueError(f"{kind} cannot be copied, and only a copy is ever stepped: {error}") from error
    return copies
