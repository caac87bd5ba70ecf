"""Validation when QuacK is attached: each error names the weight and how to fix it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from quacklr.core.flat_tensor import original
from quacklr.core.local import is_sharded
from quacklr.core.sensitivity import CompiledPaths
from quacklr.core.stepped import Stepped
from quacklr.core.weight import Weight

FLOAT32 = torch.finfo(torch.float32)


def validate_number(name: str, value: object, meaning: str, *, zero: bool = False, infinite: bool = False) -> None:
    """A setting must be a positive number that float32 can hold; with `zero` also 0, with `infinite` also inf."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    exceptions = [0.0] * zero + [float("inf")] * infinite
    if not is_number or not (FLOAT32.tiny <= value <= FLOAT32.max or value in exceptions):  # type: ignore[operator]
        kinds = "0 or a positive number" if zero else "a positive number"
        raise ValueError(f"{name}={value!r}: {meaning} must be {kinds} that float32 can hold")


def validate_norm(norm: object) -> None:
    """A norm must be a function."""
    if not callable(norm):
        raise ValueError(f"norm={norm!r}: a norm is a function, quacklr.frobenius or quacklr.spectral")


def validate_stepped(weights: Sequence[Weight], optimizers: Sequence[Optimizer], in_groups: Stepped) -> None:
    """Every parameter on a path must have values, and must be in one of the optimizers if it is not frozen."""
    for part in (part for weight in weights for part in weight.parts):
        if part.param.device.type == "meta":
            raise ValueError(f"{part.name}: its parameter is on the meta device; attach after materialising the model")
    if not any(weight.trains for weight in weights):
        raise ValueError(f"{weights[0].name} and all others on a path are frozen, so there is nothing to control")
    stepped = set().union(*map(in_groups.by, optimizers))
    for part in (part for weight in weights if weight.rated for part in weight.parts):
        if not part.param.requires_grad or id(part.param) in stepped:
            continue
        if is_sharded(part.param):
            raise ValueError(
                f"{part.name}: its parameter is sharded, and in none of the optimizers given; sharding "
                "replaces parameters, so make the optimizer after it, then attach"
            )
        raise ValueError(
            f"{part.name}: its parameter is in none of the optimizers given; pass the one that steps it too, "
            "or freeze it with requires_grad_(False)"
        )


def validate_not_attached_twice(weights: Iterable[Weight], taken: Iterable[Weight], who: str = "QuacK") -> None:
    """No parameter may be on the paths of two QuacKs on one optimizer: its step would be scaled twice."""
    others = {id(original(part.param)): part.name for weight in reversed(list(taken)) for part in weight.parts}
    for part in (part for weight in weights for part in weight.parts):
        param = id(original(part.param))
        if param in others:
            raise ValueError(
                f"{part.name}: another {who} is attached to its parameter (as {others[param]}); "
                "call remove() on that one first"
            )


def validate_norms(compiled: CompiledPaths, norms: Tensor, sensitivity: Tensor) -> None:
    """Norms must be finite and sensitivities positive, since Lemma 1 needs a lower bound on every norm."""
    weight_of = {int(b): weight for weight, index in compiled.blocks.flat_index.items() for b in index}
    for block in (~norms.isfinite()).nonzero().flatten().tolist():
        raise ValueError(
            f"{weight_of[block].name}: holds NaN or inf, or its norm is more than float32 can hold; attach QuacK to a "
            "model whose weights are finite"
        )
    rated = torch.tensor([weight_of[b].rated for b in range(len(norms))], device=norms.device)
    invalid = (rated & ~((sensitivity > 0) & sensitivity.isfinite())).nonzero().flatten().tolist()
    if not invalid:
        return
    name = weight_of[invalid[0]].name
    partners = {b for others in compiled.partners for b in others[compiled.block == invalid[0]].tolist()}
    zeros = sorted({weight_of[b].name for b in partners if b in weight_of and norms[b] == 0})
    if not zeros:
        where = "below" if sensitivity[invalid[0]] == 0 else "above"
        raise ValueError(
            f"{name}: the product of its partners' norms is {where} what float32 can hold; multiply the weights by a "
            "constant, and divide the logits by it"
        )
    partner = f"partner {zeros[0]} is" if len(zeros) == 1 else f"partners {' and '.join(zeros)} are"
    raise ValueError(
        f"{name}: its {partner} all zeros, so its rate has no bound; initialise what is zero, or pass floor=c to bound "
        "every norm from below by c"
    )
