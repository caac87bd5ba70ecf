"""Optimizer hooks that compute in full precision, even where the caller is under autocast."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.optim import Optimizer


def without_autocast(hook: Callable[..., Any]) -> Callable[..., Any]:
    """The hook with autocast disabled: in float16, products of a small or large step would be 0 or inf."""

    @wraps(hook)
    def call(optimizer: Optimizer, *args: Any) -> Any:
        device = next((p.device.type for group in optimizer.param_groups for p in group["params"]), "cpu")
        if not torch.is_autocast_enabled(device):
            return hook(optimizer, *args)
        with torch.autocast(device, enabled=False):
            return hook(optimizer, *args)

    return call
