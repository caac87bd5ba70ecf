"""Small stacks of attention layers for `check`, and right or wrong paths for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from models import layers
from quacklr import LogitPath, Weight, check
from quacklr.checking.report import CheckReport

X_BTD = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))


def stack(attention: Callable[[], nn.Module], count: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return layers(count, attention)


def checked(model: nn.Module, paths: list[LogitPath] | None = None, **options: Any) -> CheckReport:
    return check(model, AdamW(model.parameters(), lr=1e-2), X_BTD, paths=paths, **options)


def named(number: int, *weights: Weight) -> tuple[Weight, ...]:
    return tuple(replace(weight, name=f"{number}.{weight.name}") for weight in weights)


def of_each(
    model: nn.Sequential, weights: Callable[[Any], list[Weight]], read: Tensor | None = None
) -> list[LogitPath]:
    """One path per layer, of weights q and k; `read` (heads,) is the block of k that each head reads."""
    pairs = [named(number, *weights(layer)) for number, layer in enumerate(model)]
    return [LogitPath(pair, 4, None if read is None else (None, read)) for pair in pairs]


def q_and_k(layer: Any, block_of_row: Tensor) -> list[Weight]:
    return [Weight("q", layer.q.weight, block_of_row), Weight("k", layer.k.weight, block_of_row)]
