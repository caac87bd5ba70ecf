"""Assign every parameter of a model to Muon or AdamW, with the hyperparameters of a recipe.

    Muon    the weight of every nn.Linear
    AdamW   embeddings, an output layer tied to one, and all vectors and scalars (norms, biases)

Any other parameter raises an error with its name, because a wrong optimizer would waste a run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import tyro
from torch import nn
from torch.optim import AdamW, Optimizer

from quacklr.lab.errors import UserError, validate_below_1, validate_non_negative, validate_positive
from quacklr.lab.optim.muon import SCALES, Muon, UpdateScale

Named = dict[str, nn.Parameter]


@dataclass(frozen=True, slots=True)
class MuonRecipe:
    """Muon for the matrices of linear layers, AdamW for everything else."""

    lr: float = 0.1
    """Learning rate of Muon, at its peak."""
    rest_lr: Annotated[float | None, tyro.conf.arg(metavar="FLOAT")] = None
    """Learning rate of AdamW, which trains embeddings, norms and biases; that of Muon unless given."""
    momentum: float = 0.95
    """Decay factor of Muon's momentum."""
    nesterov: bool = True
    """Nesterov momentum in Muon; the option turns it off."""
    weight_decay: float = 0.0
    """Decoupled weight decay, not applied to vectors and scalars."""
    scale: UpdateScale = "jordan"
    """Factor of an update: jordan sqrt(max(1, rows / columns)), rms 0.2 sqrt(max(rows, columns)), ratio the square root
    of rows / columns."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay factors of the running means of the gradient and of its square."""
    eps: float = 1e-8
    """AdamW's term in the denominator."""

    def __post_init__(self) -> None:
        validate_positive(lr=self.lr, rest_lr=self.peak_rest_lr, eps=self.eps)
        validate_non_negative(weight_decay=self.weight_decay)
        for beta in self.betas:
            validate_below_1(momentum=self.momentum, betas=beta)
        if self.scale not in SCALES:
            raise UserError(f"--scale must be one of {', '.join(SCALES)}, not {self.scale}")

    @property
    def peak_rest_lr(self) -> float:
        """AdamW's learning rate at its peak."""
        return self.lr if self.rest_lr is None else self.rest_lr


@dataclass(frozen=True, slots=True)
class AdamWRecipe:
    """AdamW for everything."""

    lr: float = 3e-3
    """Learning rate, at its peak."""
    weight_decay: float = 0.0
    """Decoupled weight decay, not applied to vectors and scalars."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay factors of the running means of the gradient and of its square."""
    eps: float = 1e-8
    """Term in the denominator."""

    def __post_init__(self) -> None:
        validate_positive(lr=self.lr, eps=self.eps)
        validate_non_negative(weight_decay=self.weight_decay)
        for beta in self.betas:
            validate_below_1(betas=beta)


Recipe = MuonRecipe | AdamWRecipe


def optimizers(recipe: Recipe, model: nn.Module) -> list[Optimizer]:
    """Make the optimizers of a model; every parameter with requires_grad is in exactly one param group.

    Each group has, besides `lr`, the recipe's learning rate as `peak_lr`, which `set_lr` multiplies by the schedule.
    """
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    if not params:
        raise UserError("the model has no parameter that requires a gradient, so there is nothing to train")
    if isinstance(recipe, AdamWRecipe):
        return [_adamw(recipe, recipe.lr, params)]
    matrices = _linear_weights(model, params)
    rest = {name: param for name, param in params.items() if name not in matrices}
    made: list[Optimizer] = []
    if matrices:
        settings = {name: getattr(recipe, name) for name in ("lr", "momentum", "nesterov", "weight_decay", "scale")}
        made.append(Muon([{"params": list(matrices.items()), "peak_lr": recipe.lr}], **settings))
    if rest:
        made.append(_adamw(recipe, recipe.peak_rest_lr, rest))
    return made


def _linear_weights(model: nn.Module, params: Named) -> Named:
    """The parameters that Muon trains. UserError for one that neither Muon nor AdamW can train."""
    linear, embedding = ({id(weight) for weight in _weights(model, kind)} for kind in (nn.Linear, nn.Embedding))
    for name, param in params.items():
        if param.ndim > 1 and id(param) not in linear | embedding:
            owner = type(model.get_submodule(name.rpartition(".")[0])).__name__
            raise UserError(
                f"{name} of shape {tuple(param.shape)} in a {owner} is neither the weight of an nn.Linear or "
                "nn.Embedding nor a vector, so neither Muon nor AdamW takes it; use one of these, or freeze it"
            )
    return {name: param for name, param in params.items() if id(param) in linear - embedding}


def _weights(model: nn.Module, kind: type[nn.Module]) -> Iterator[nn.Parameter]:
    """The weights of all modules of a type; under a parametrization, the original weight."""
    for module in model.modules():
        if isinstance(module, kind):
            named = dict(module.named_parameters())
            yield from (named[path] for path in ("weight", "parametrizations.weight.original") if path in named)


def _adamw(recipe: Recipe, lr: float, params: Named) -> AdamW:
    """AdamW with two groups: matrices with weight decay, vectors and scalars without."""
    matrices = [(name, param) for name, param in params.items() if param.ndim > 1]
    vectors = [(name, param) for name, param in params.items() if param.ndim <= 1]
    groups: list[dict[str, Any]] = [
        {"params": named, "peak_lr": lr, "weight_decay": decay}
        for named, decay in ((matrices, recipe.weight_decay), (vectors, 0.0))
        if named
    ]
    fused = all(param.device.type in ("cpu", "cuda") and param.is_floating_point() for param in params.values())
    return AdamW(groups, lr=lr, betas=recipe.betas, eps=recipe.eps, fused=fused)
