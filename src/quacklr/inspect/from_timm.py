"""A model of timm by its name, with random weights."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from quacklr.inspect.target import BadTargetError, Target, told


def unavailable() -> str:
    """Why timm cannot be asked; nothing if it can."""
    try:
        import_module("timm")
    except ModuleNotFoundError as missing:
        needs = "it is not installed" if missing.name == "timm" else f"it needs {missing.name}"
        return f"{needs}: pip install {missing.name}"
    except Exception as error:  # timm and torchvision of versions that do not go together
        return told(error)
    return ""


def is_model(name: str) -> bool:
    """Whether timm can be asked and has a model of that name, with or without a tag of weights."""
    if unavailable():
        return False
    import timm

    return bool(timm.is_model(name))


def target(name: str) -> Target:
    """The model, and two images of the size that it takes."""
    import timm

    try:
        model: Any = timm.create_model(name, pretrained=False)
    except Exception as error:
        raise BadTargetError(f"{name}: timm cannot make it: {told(error)}") from error
    return Target(model, lambda: (model, torch.randn(2, *model.default_cfg["input_size"])))
