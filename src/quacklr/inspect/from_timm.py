"""A model of timm by its name, with random weights."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from quacklr.inspect.target import BadTargetError, Target, one_line


def unavailable() -> str:
    """Why timm cannot be imported, or ""."""
    try:
        import_module("timm")
    except ModuleNotFoundError as missing:
        needs = "it is not installed" if missing.name == "timm" else f"it needs {missing.name}"
        return f"{needs}: pip install {missing.name}"
    except Exception as error:  # versions of timm and torchvision that do not fit together
        return one_line(error)
    return ""


def is_model(name: str) -> bool:
    """Whether timm can be imported and has a model of that name, with or without a tag of weights."""
    return not unavailable() and bool(import_module("timm").is_model(name))


def target(name: str) -> Target:
    """The model, and two images of the size that it takes."""
    try:
        model: Any = import_module("timm").create_model(name, pretrained=False)
    except Exception as error:  # timm's constructors raise errors of any type
        raise BadTargetError(f"{name}: timm cannot make it: {one_line(error)}") from error
    return Target(model, lambda: (model, torch.randn(2, *model.default_cfg["input_size"])))
