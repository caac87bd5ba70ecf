"""Real steps of a model with QuacK: are they scaled by the rates, and how much do they change the logits?

A layer's logits are measured with the inputs that the layer had before the step, because the bound on their change is
about the layer's own weights.

Shapes: B batch, H head, I query, J key.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_unflatten

from quacklr.attention.logits import MASKED
from quacklr.attention.monitor import LogitMonitor
from quacklr.core.changes import HeadChange
from quacklr.core.step_scaler import first_after_step
from quacklr.core.weight import Weight
from quacklr.quack import QuacK
from quacklr.util.modules import run, untouched
from quacklr.util.torch_functions import tensors_in

Loss = Callable[[nn.Module, Any], Tensor]
NOT_SCALED = (
    "{}: QuacK's rates are not applied to its step; does the optimizer, or a hook of it, write into the weights after "
    "the step?"
)


class Steps:
    """Takes steps of a model. Made after QuacK is attached: its hook runs before QuacK's.

    `layers` are the attention modules.
    """

    def __init__(self, model: nn.Module, layers: Iterable[nn.Module], batch: Any, loss: Loss, quack: QuacK) -> None:
        self.model, self.batch, self.loss, self.quack = model, batch, loss, quack
        self.monitor = LogitMonitor(model, batch)
        self.monitor.measure()  # the first measurement may run modules more than once, to find the heads
        self._own: dict[Tensor, Tensor] = {}  # parameters as the optimizer alone would have left them
        quack.changes()  # from now on it measures the steps
        for optimizer in quack.optimizers:
            first_after_step(optimizer, self._keep_own)
        self._inputs: list[list[Tensor | None]] = []  # of each call of a layer
        self._replays = False
        for layer in layers:
            layer.register_forward_pre_hook(self._hold_inputs, with_kwargs=True)

    def _keep_own(self, optimizer: Optimizer, *_: Any) -> None:
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            self._own.setdefault(param, param.detach().clone())  # a nested step runs hooks twice

    def _hold_inputs(self, _: nn.Module, *call: Any) -> Any:
        """Record the inputs of a call of a layer, or replace them by those that were recorded."""
        leaves, tree = tree_flatten(call)
        if self._replays:
            held = zip(leaves, self._inputs.pop(0), strict=True)
            return tree_unflatten([new if old is None else old for new, old in held], tree)
        copies = {id(x): x.detach().clone() for x in tensors_in(leaves) if x.is_floating_point()}  # one for q is k is v
        self._inputs.append([copies.get(id(leaf)) for leaf in leaves])
        return None

    @torch.no_grad()
    def step(self) -> tuple[dict[str, HeadChange], dict[str, Tensor]]:
        """One step of the rows on paths: the changes of logits by `quack.changes()`, and (H,) the measured ones."""
        paths = self.quack.rule.paths
        old = {part.param: part.param.clone() for part in paths.parts}
        before = self._logits(replays=False)
        self._take_step(old)
        for weight in paths.weights:
            for part in weight.parts:
                self._validate_scaled(weight, part, old[part.param])
        after = self._logits(replays=True)
        measured = {name: root_mean_square(logits, after.get(name)) for name, logits in before.items()}
        return self.quack.changes(), measured

    def _logits(self, replays: bool) -> dict[str, Tensor]:
        """(B, H, I, J) logits of the batch, by attention."""
        torch.clear_autocast_cache()  # it holds casts of weights that have changed since
        self._replays, self._inputs = replays, self._inputs if replays else []
        self.monitor.measure()
        self._replays = False
        return self.monitor.state_dict()

    def _take_step(self, params: Container[Tensor]) -> None:
        """One real step of these parameters. Other parameters, and the buffers of the model, are not changed."""
        self._own = {}
        with untouched(self.model), warnings.catch_warnings():
            torch.clear_autocast_cache()
            with torch.enable_grad():
                self.loss(self.model, self.batch).backward()
            for param in self.model.parameters():
                param.grad = param.grad if param in params else None
            warnings.simplefilter("ignore")  # that the optimizer has stepped before QuacK was attached
            for optimizer in self.quack.optimizers:
                optimizer.step()

    def _validate_scaled(self, weight: Weight, part: Weight, old: Tensor) -> None:
        """ValueError unless the rows are old + rate * (own step of the optimizer)."""
        new, own = part.param.float(), self._own.get(part.param, part.param).float()
        if not new.isfinite().all():
            raise ValueError("weights are NaN or inf after a step: lower the learning rate, or check the loss")
        rates = self.quack.rates(last=True).get(weight.name, torch.ones(weight.blocks)).to(new)
        rate_of_row = rates[part.block_of_row.clamp(min=0).to(new.device)]
        off = (torch.lerp(old.float(), own, part.spread(rate_of_row)) - new).abs()
        rounding = 4 * torch.finfo(part.param.dtype).eps * new.abs().max()
        if (off * part.spread(part.block_of_row >= 0).to(off) > rounding).any():
            raise ValueError(NOT_SCALED.format(part.name))


def default_loss(model: nn.Module, batch: Any) -> Tensor:
    """The loss that the model returns; for other outputs the mean squared distance to fixed random numbers."""
    returned = run(model, batch)
    loss = getattr(returned, "loss", None)
    loss = returned if loss is None else loss
    if isinstance(loss, Tensor) and loss.ndim == 0:
        return loss
    outputs = [each for each in tensors_in(returned) if each.requires_grad]
    if not outputs:
        raise ValueError(f"{type(model).__name__} gives nothing with a gradient; pass loss=, a function (model, batch)")
    noise = torch.Generator().manual_seed(0)
    targets = [torch.randn(x.shape, generator=noise).to(x.device) for x in outputs]
    return torch.stack([(x.float() - y).square().mean() for x, y in zip(outputs, targets, strict=True)]).sum()


def root_mean_square(one_BHIJ: Tensor, other_BHIJ: Tensor | None) -> Tensor:
    """(H,): of the differences of logits that are not masked. NaN if there are none, or if the shapes differ."""
    if other_BHIJ is None or one_BHIJ.shape != other_BHIJ.shape:
        return torch.full(one_BHIJ.shape[1:2], torch.nan)
    seen_BHIJ = (one_BHIJ > MASKED) & (other_BHIJ > MASKED)
    change_BHIJ = (other_BHIJ - one_BHIJ).where(seen_BHIJ, 0)
    return (change_BHIJ.square().sum((0, 2, 3)) / seen_BHIJ.sum((0, 2, 3))).sqrt().cpu()
