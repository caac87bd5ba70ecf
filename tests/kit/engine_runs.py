"""Three steps of a small Llama: in one process without an engine, and what an engine's steps are compared with.

All ranks see the same batch, so that the mean gradient is that of one process. Its shapes are such that a flat half of
a weight ends in the middle of a row, and of a head. AdamW has eps=1e-4: with a small eps it makes steps of the rounding
errors of tiny gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode
from transformers import LlamaConfig, LlamaForCausalLM

from quacklr import Budget, Paper, QKClip, QuacK, Rule, spectral
from quacklr.core.local import FlatTensor

STEPS = 3
TAU = 0.5


@dataclass
class Result:
    """`rates` before each step and after the last, `weights` after the last, `counts` of collectives in each step."""

    rates: list[dict[str, Tensor]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    counts: list[int] = field(default_factory=list)
    rate_of: dict[str, Tensor] = field(default_factory=dict)
    layout: dict[str, tuple[int, int]] = field(default_factory=dict)  # of FlatTensors: start, count
    state: dict[str, Any] = field(default_factory=dict)


def llama(dtype: torch.dtype = torch.float32) -> nn.Module:
    """6 query heads and 3 key heads of size 6, with biases; large weights, so that rates change in three steps."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=42, intermediate_size=20, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=3, head_dim=6, attention_bias=True, initializer_range=0.15, max_position_embeddings=32,
        tie_word_embeddings=True,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    return model.to(dtype)


def batch(step: int) -> Tensor:
    return torch.randint(0, 61, (2, 12), generator=torch.Generator().manual_seed(step))


def optimizer_of(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    """Biases and norms are in a param group of their own; with "one group" they are not."""
    if kind == "one group":
        return torch.optim.AdamW(model.parameters(), lr=0.03, eps=1e-4)
    named = list(model.named_parameters())
    groups = [
        {"params": [p for name, p in named if name.endswith(("bias", "norm.weight", "layernorm.weight"))]},
        {"params": [p for name, p in named if not name.endswith(("bias", "norm.weight", "layernorm.weight"))]},
    ]
    if kind == "SGD":
        return torch.optim.SGD(groups, lr=1.0, momentum=0.5)
    groups[0]["weight_decay"] = 0.0  # type: ignore[assignment]
    return torch.optim.AdamW(groups, lr=0.03, eps=1e-4, weight_decay=0.1)


def loss_of(model: Any, step: int) -> Tensor:
    return model(batch(step), labels=batch(step)).loss


RULES: dict[str, Callable[[], Rule]] = {
    "frobenius": lambda: Paper(TAU),
    "spectral": lambda: Paper(TAU, norm=spectral),
    "budget": lambda: Budget(0.02),
}


@cache
def alone(kind: str, rule: str) -> Result:
    """In one process, without an engine; without QuacK if `rule` is empty."""
    model = llama()
    optimizer = optimizer_of(model, kind)
    quack = QuacK(model, optimizer, rule=RULES[rule](), verify=False) if rule else None
    params = dict(model.named_parameters())
    return trained(quack, lambda number: loss_of(model, number).backward(), stepping(optimizer), lambda: params, params)


def stepping(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """A function that takes a step and forgets the gradients."""

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return step


def alone_in_16_bits(rule: str, dtype: torch.dtype) -> Result:
    """In one process, with fp32 copies of 16-bit weights: QuacK is attached to the copies."""
    model, copies = llama(dtype=dtype), llama(dtype=dtype).float()
    optimizer = optimizer_of(copies, "SGD")
    quack = QuacK(copies, optimizer, rule=RULES[rule](), verify=False) if rule else None

    def step() -> None:
        for param, copy in zip(model.parameters(), copies.parameters(), strict=True):
            assert param.grad is not None
            copy.grad, param.grad = param.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for param, copy in zip(model.parameters(), copies.parameters(), strict=True):
                param.copy_(copy)

    params = dict(model.named_parameters()), dict(copies.named_parameters())
    return trained(quack, lambda number: loss_of(model, number).backward(), step, lambda: params[0], params[1])


def trained(
    quack: QuacK | None,
    backward: Callable[[int], Any],
    step: Callable[[], Any],
    weights: Callable[[], Mapping[str, Tensor]],
    params: Mapping[str, Tensor],
) -> Result:
    """Take the steps; `weights` returns the whole weights, by name, and `params` are the model's parameters.

    CommDebugMode allows no forward in a step, so QuacK must not have anything to verify.
    """
    found = Result()
    budget = quack is not None and quack.rule.measures
    for number in range(STEPS):
        if quack is not None and not budget:
            found.rates.append(quack.rates())
        backward(number)
        with CommDebugMode() as comm:
            step()
        found.counts.append(comm.get_total_counts())
        if quack is not None and budget:
            found.rates.append(quack.rates())
    if quack is not None:
        found.rates.append(quack.rates())
        found.state = quack.state_dict()
        rate_of = {name: quack.rate_of(param) for name, param in params.items()}
        found.rate_of = {name: rate for name, rate in rate_of.items() if rate is not None}
        found.layout = {
            part.name: (part.param.start, part.param.count)
            for part in quack.rule.paths.parts
            if isinstance(part.param, FlatTensor)
        }
        quack.remove()
    found.weights = {name: weight.detach().float().clone() for name, weight in weights().items()}
    return found


def difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).detach().abs().max()) for name in one)


def mean_difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """The mean difference of the query and key weights."""
    names = [name for name in one if name.endswith(("q_proj.weight", "k_proj.weight"))]
    return sum(float((one[name] - other[name]).detach().abs().mean()) for name in names) / len(names)


def rates_difference(one: Result, other: Result) -> float:
    return max(difference(here, there) for here, there in zip(one.rates, other.rates, strict=True))


def moved(rates: Mapping[str, Tensor], tau: float = TAU) -> float:
    """How far rates are from where they began."""
    return max(float((rate / tau - 1).abs().max()) for rate in rates.values())


def assert_as_alone(found: Result, control: Result, wanted: Result, plain: Result) -> None:
    """As in one process: rates to 1e-6, weights to what the engine itself differs by without QuacK (`control`).

    FSDP1 without QuacK is exact; 3e-6 is for the rounding of the sums in the norms.
    """
    assert moved(wanted.rates[-1]) > 0.02
    assert difference(wanted.weights, plain.weights) > 1e-3, "QuacK makes a difference"
    assert rates_difference(found, wanted) <= 2e-6
    assert difference(found.rate_of, wanted.rate_of) <= 2e-6
    assert difference(found.weights, wanted.weights) <= 3 * difference(control.weights, plain.weights) + 3e-6


def assert_budget_as_alone(found: Result, wanted: Result, tolerance: float) -> None:
    assert moved(wanted.rates[-1], 1.0) > 0.1
    largest = max(float(rate.max()) for rate in wanted.rates[-1].values())
    assert rates_difference(found, wanted) <= tolerance * largest
    assert difference(found.weights, wanted.weights) <= tolerance


def assert_near_alone(found: Result, control: Result, wanted: Result, plain: Result) -> None:
    """As in one process, up to the rounding of gradients in 16 bits."""
    effect = mean_difference(wanted.weights, plain.weights)
    assert moved(wanted.rates[-1]) > 0.02
    assert rates_difference(found, wanted) <= 0.1 * TAU * moved(wanted.rates[-1])
    assert mean_difference(found.weights, wanted.weights) < 0.25 * effect
    assert mean_difference(control.weights, plain.weights) < 0.25 * effect


THRESHOLD = 3.0


@cache
def clipped_alone(threshold: float) -> dict[str, Tensor]:
    """The weights after three steps with QK clip."""
    model = llama()
    step = stepping(optimizer := optimizer_of(model, "SGD"))
    with QKClip(model, optimizer, threshold=threshold):
        for number in range(STEPS):
            loss_of(model, number).backward()
            step()
    return {name: param.detach().clone() for name, param in model.named_parameters()}
