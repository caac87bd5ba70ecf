"""The default rule, Limit(0.02), judged from outside: the optimizer alone on a copy, and formula (4) in plain torch.

Nothing here reads what quacklr computes, except to compare `quack.rates()` with the rates that are seen in the weights.
sigma may be 16 % too large, so a limited rate may be up to 1.2 times smaller than (5) says, and never larger.

The models are layers of `models.Separate`, with heads of 4 rows. All numbers are float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from quacklr import QuacK

NATS, SIZE = 0.02, 4
Weights = dict[str, Tensor]
Make = Callable[[Any], Optimizer]


def made_by(kind: Any, **options: Any) -> Make:
    """Makes an optimizer for the parameters of a model."""
    return lambda model: kind(model.parameters(), **options)


def weights(model: nn.Module) -> Weights:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def same(actual: Any, expected: Any) -> None:
    """Bitwise; NaN equals NaN."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def alone(model: nn.Module, optimizer: Optimizer, make: Make, closure: Any = None, scale: float = 1.0) -> Weights:
    """The weights after the optimizer's own step: an optimizer without QuacK on a copy, with the same gradients."""
    copy = deepcopy(model)
    for param, to in zip(model.parameters(), copy.parameters(), strict=True):
        to.grad = None if param.grad is None else param.grad / scale
    other = make(copy)
    other.load_state_dict(deepcopy(optimizer.state_dict()))
    other.step(closure(copy)) if closure else other.step()
    return weights(copy)


def blocks(held: Weights, name: str, size: int = SIZE) -> Tensor:
    """(blocks, rows of a block, columns); a bias is one more column."""
    columns = [held[f"{name}.weight"], *(held[key][:, None] for key in [f"{name}.bias"] if key in held)]
    return torch.cat(columns, 1).double().unflatten(0, (-1, size))


def norm(matrix: Tensor) -> Tensor:
    return matrix.flatten(-2).norm(dim=-1)


def sigma(matrix: Tensor) -> Tensor:
    """The largest singular value; NaN of what is not finite."""
    largest = torch.linalg.svdvals(matrix.nan_to_num(0, 0, 0))[..., 0]
    return torch.where(matrix.isfinite().all(-1).all(-1), largest, torch.nan)


def by_head(held: Weights, layer: int) -> tuple[Tensor, Tensor]:
    q, k = blocks(held, f"{layer}.q"), blocks(held, f"{layer}.k")
    return q, k.repeat_interleave(len(q) // len(k), 0)


def asked(old: Weights, new: Weights, layer: int = 0, orders: int = 1) -> Tensor:
    """Formula (4) for the path q k; with all orders, norms have grown by the step."""
    (q, k), (new_q, new_k) = by_head(old, layer), by_head(new, layer)
    dq, dk = sigma(new_q - q), sigma(new_k - k)
    grow = 0.0 if orders == 1 else SIZE**0.5
    return (dq * (norm(k) + grow * dk) + (norm(q) + grow * dq) * dk) / SIZE**0.5


def change(old: Weights, new: Weights, layer: int = 0) -> Tensor:
    """The root mean square of the change of logits, exactly, for inputs without a preferred direction."""
    (q, k), (new_q, new_k) = by_head(old, layer), by_head(new, layer)
    return norm(new_q.mT @ new_k - q.mT @ k) / SIZE**0.5


def judge_block(old: Tensor, own: Tensor, new: Tensor, most: float, slack: float = 1.2) -> float:
    """The rate of one block, if its rows are old + rate * (the optimizer's own step) and `most` is formula (5)."""
    if most >= slack or torch.equal(old, own):
        same(*(torch.where(rows.isfinite(), rows, torch.nan) for rows in (new, own)))  # QuacK makes inf NaN
        return math.nan if torch.equal(old, own) else 1.0
    step, scaled = own - old, new - old
    rate = float((scaled * step).sum() / step.square().sum())
    assert min(most, 1) / slack <= rate <= min(most, 1) * 1.001
    torch.testing.assert_close(scaled, rate * step, rtol=1e-3, atol=1e-7)
    return rate


def judge(quack: QuacK, old: Weights, own: Weights, new: Weights, factors: tuple[float, float] = (1.0, 1.0)) -> Tensor:
    """The rates of all query and key blocks. `factors` are lr / initial lr of the query and of the key weights."""
    rates = []
    for layer in sorted({int(name[0]) for name in old}):
        most = NATS / asked(old, own, layer)
        most = torch.where(most.isnan(), torch.inf, most)  # what cannot be computed is not limited
        for part, factor in zip("qk", factors, strict=True):
            before, plain, after = (blocks(each, f"{layer}.{part}") for each in (old, own, new))
            limits = factor * most.view(len(before), -1).amin(1)  # the smallest of its heads
            rows = zip(before, plain, after, limits.tolist(), strict=True)
            seen = torch.tensor([judge_block(*each) for each in rows])
            said = quack.rates().get(f"{layer}.{part}", torch.ones(len(seen)))
            rates.append(torch.where(seen.isnan(), said, seen))  # nothing is seen of the rate of a step of zero
            torch.testing.assert_close(said, rates[-1], rtol=1e-3, atol=1e-9)
        moved = change(old, new, layer)
        assert (moved.nan_to_num(0, 0) <= NATS * max(factors) * 1.001).logical_or(most == math.inf).all()
    same({name: new[name] for name in new if ".v." in name}, {name: own[name] for name in own if ".v." in name})
    return torch.cat(rates)


class Judged:
    """A model under the default QuacK, of which every step is judged."""

    def __init__(self, model: Any, make: Make) -> None:
        self.model, self.make, self.optimizer = model, make, make(model)
        self.quack = QuacK(model, self.optimizer)

    def step(self, factors: tuple[float, float] = (1.0, 1.0), closure: Any = None) -> Tensor:
        old, own = weights(self.model), alone(self.model, self.optimizer, self.make, closure)
        self.optimizer.step(*([closure(self.model)] if closure else []))
        return judge(self.quack, old, own, weights(self.model), factors)


def limited(rates: Tensor) -> bool:
    return bool((rates < 0.9).all())
