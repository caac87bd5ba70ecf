"""Walk over a model's modules and collect the paths of each attention, named after its module."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from quacklr.find.rules import RULES
from quacklr.path import Path, as_paths


def logit_paths(model: nn.Module) -> list[Path]:
    """The paths of every attention of the model, their weights named `<module>.<role>`.

    A module with a method `logit_paths()` is believed, and not searched further. Otherwise it must be of a class that
    RULES knows. A model with nothing to control is a ValueError.
    """
    return survey(model)[0]


def survey(model: nn.Module) -> tuple[list[Path], dict[str, str]]:
    """The paths of the model; and, for each attention that has none, why."""
    paths: list[Path] = []
    left_alone: dict[str, str] = {}
    declared: list[str] = []
    for name, module in named_modules(model):
        if any(name.startswith(outer) for outer in declared):
            continue
        found = _paths_of(module, name)
        if found is None:
            continue
        declared.append(f"{name}." if name else "")
        if not found:
            left_alone[name] = "declares no path: its logit does not depend on the scale of its weights"
        paths += _named(found, name)
    if not paths:
        reasons = "".join(f" ({name}: {reason})" for name, reason in left_alone.items())
        raise ValueError(
            f"{type(model).__name__} has no attention that QuacK can control{reasons}; give its attention a method "
            "logit_paths(), or pass the paths themselves: QuacK([Path(...), ...], optimizer)"
        )
    return paths, left_alone


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules, under names that torch.compile has not changed: it puts what it wraps under `_orig_mod`."""
    for name, module in model.named_modules():
        yield ".".join(part for part in name.split(".") if part != "_orig_mod"), module


def _paths_of(module: Any, name: str) -> list[Path] | None:
    if callable(getattr(module, "logit_paths", None)):
        return as_paths(module.logit_paths(), f"logit_paths() of {name or 'the model'} must return")
    for known, rule in RULES.items():
        if isinstance(module, known):
            return rule(module)
    return None


def _named(paths: list[Path], module: str) -> list[Path]:
    """The same paths, each weight's name prefixed with its module's."""
    if not module:
        return paths
    weights = {weight: replace(weight, name=f"{module}.{weight.name}") for path in paths for weight in path.weights}
    return [replace(path, weights=tuple(weights[weight] for weight in path.weights)) for path in paths]
