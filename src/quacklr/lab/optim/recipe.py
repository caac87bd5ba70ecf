"""Which optimizer trains which parameter, and with what: the choice is made here, before a step is taken.

    Muon    the weight of every nn.Linear
    AdamW   embeddings, an output layer tied to one, and all vectors and scalars (norms, biases)

Anything else is an error that names it: a parameter that silently went to the wrong optimizer costs a run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import tyro
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from quacklr.lab.errors import UserError, validate_below_1, validate_non_negative, validate_positive
from quacklr.lab.optim.muon import SCALES, Muon, UpdateScale

Named = dict[str, nn.Parameter]
Group = dict[str, Any]


@dataclass(frozen=True, slots=True)
class MuonRecipe:
    """Muon for the matrices of linear layers, AdamW for everything else."""

    lr: float = 0.1
    """Learning rate of Muon, at its peak."""
    rest_lr: Annotated[float | None, tyro.conf.arg(metavar="FLOAT")] = None
    """Learning rate of AdamW, which trains embeddings, norms and biases; that of Muon unless given."""
    momentum: float = 0.95
    """How much of Muon's momentum is kept at a step."""
    nesterov: bool = True
    """Muon looks one step of momentum ahead; the option turns that off."""
    weight_decay: float = 0.0
    """Decoupled weight decay, of all but vectors and scalars."""
    scale: UpdateScale = "jordan"
    """Factor of an update: jordan is sqrt(max(1, rows / columns)), rms is 0.2 sqrt(max(rows, columns))."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's running means: how much is kept of the gradient, and of its square."""
    eps: float = 1e-8
    """AdamW's smallest divisor."""

    def __post_init__(self) -> None:
        validate_positive(lr=self.lr, rest_lr=self.peak_rest_lr, eps=self.eps)
        validate_non_negative(weight_decay=self.weight_decay)
        validate_below_1(momentum=self.momentum)
        _refuse_betas(self.betas)
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
    """Decoupled weight decay, of all but vectors and scalars."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Running means: how much is kept of the gradient, and of its square."""
    eps: float = 1e-8
    """Smallest divisor."""

    def __post_init__(self) -> None:
        validate_positive(lr=self.lr, eps=self.eps)
        validate_non_negative(weight_decay=self.weight_decay)
        _refuse_betas(self.betas)


Recipe = MuonRecipe | AdamWRecipe


def optimizers(recipe: Recipe, model: nn.Module) -> list[Optimizer]:
    """The optimizers that train the model, every parameter with requires_grad in exactly one group of one of them.

    Besides `lr` each group has `peak_lr`, the recipe's, which a schedule multiplies.
    """
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    if not params:
        raise UserError("the model has no parameter that requires a gradient, so there is nothing to train")
    if isinstance(recipe, AdamWRecipe):
        return [_adamw(recipe, recipe.lr, params)]
    matrices = _linear_weights(model, params)
    rest = {name: param for name, param in params.items() if name not in matrices}
    made: list[Optimizer] = [_muon(recipe, matrices)] if matrices else []
    return [*made, _adamw(recipe, recipe.peak_rest_lr, rest)] if rest else made


def _linear_weights(model: nn.Module, params: Named) -> Named:
    """Of these parameters the ones for Muon. UserError for one that is for neither Muon nor AdamW."""
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
    """The weights of all modules of a kind; of one with a parametrization, the matrix it is computed from."""
    for module in model.modules():
        if isinstance(module, kind):
            named = dict(module.named_parameters())
            yield from (named[path] for path in ("weight", "parametrizations.weight.original") if path in named)


def _muon(recipe: MuonRecipe, matrices: Named) -> Muon:
    group = {"params": list(matrices.items()), "peak_lr": recipe.lr}
    return Muon(
        [group],
        recipe.lr,
        momentum=recipe.momentum,
        nesterov=recipe.nesterov,
        weight_decay=recipe.weight_decay,
        scale=recipe.scale,
    )


def _adamw(recipe: Recipe, lr: float, params: Named) -> AdamW:
    """With one group that decays and one of vectors and scalars that does not."""
    decayed = [(name, param) for name, param in params.items() if param.ndim > 1]
    vectors = [(name, param) for name, param in params.items() if param.ndim <= 1]
    groups: list[Group] = [
        {"params": named, "peak_lr": lr, "weight_decay": decay}
        for named, decay in ((decayed, recipe.weight_decay), (vectors, 0.0))
        if named
    ]
    return AdamW(groups, lr=lr, betas=recipe.betas, eps=recipe.eps, fused=_fusable(params.values()))


def _fusable(params: Iterable[Tensor]) -> bool:
    return all(param.device.type in ("cpu", "cuda") and torch.is_floating_point(param) for param in params)


def _refuse_betas(betas: tuple[float, float]) -> None:
    for beta in betas:
        validate_below_1(betas=beta)
