"""Functions that compute in full precision, even where the caller is under autocast."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


def without_autocast(function: Callable[..., None], device: torch.device) -> Callable[..., None]:
    """The function with autocast disabled: in float16, products of a small or large step would be 0 or inf."""

    @wraps(function)
    def call(*args: Any) -> None:
        if not torch.is_autocast_enabled(device.type):
            return function(*args)
        with torch.autocast(device.type, enabled=False):
            return function(*args)

    return call
