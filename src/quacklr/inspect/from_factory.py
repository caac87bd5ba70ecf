"""A model made by a function of somebody's: package.module:factory, or path/to/file.py:factory."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from quacklr.inspect.sample import sample_for
from quacklr.inspect.target import BadTargetError, Target, told


def target(name: str) -> Target:
    """What the factory returns: a model, a model and a batch for it, or its optimizer (or several) between them."""
    place, _, factory = name.rpartition(":")
    made = _made(name, _found(_imported(place), place, factory))
    model, *optimizers, sample = made if isinstance(made, tuple) and len(made) in (2, 3) else (made, None)
    if not isinstance(model, nn.Module):
        raise BadTargetError(
            f"{name}: must return a model, (model, batch) or (model, optimizer, batch), not {type(model).__name__}"
        )
    optimizer = optimizers[0] if optimizers else None
    return Target(model, lambda: (model, _batch(name, model) if sample is None else sample), optimizers=optimizer)


def _imported(place: str) -> ModuleType:
    """The module, with the current directory on sys.path as for `python -m`."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return _from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except ModuleNotFoundError as missing:
        raise BadTargetError(f"{place} cannot be imported: there is no module {missing.name}") from missing
    except FileNotFoundError as missing:
        raise BadTargetError(f"{place}: there is no such file") from missing
    except (Exception, SystemExit) as error:
        raise BadTargetError(f"{place} cannot be imported: {told(error)}") from error


def _from_file(file: Path) -> ModuleType:
    """Run as a module of its own name, its folder on sys.path as for `python file.py`."""
    spec = importlib.util.spec_from_file_location(file.stem, file.resolve(strict=True))
    assert spec is not None
    assert spec.loader is not None
    if str(file.resolve().parent) not in sys.path:
        sys.path.insert(0, str(file.resolve().parent))
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _found(module: ModuleType, place: str, factory: str) -> Any:
    try:
        return attrgetter(factory)(module)
    except AttributeError as missing:
        raise BadTargetError(f"{place} has no {factory!r}; a target is package.module:factory") from missing


def _made(name: str, factory: Callable[[], Any] | Any) -> Any:
    if isinstance(factory, nn.Module):
        return factory
    if not callable(factory):
        raise BadTargetError(f"{name}: is no function that makes a model, but {type(factory).__name__}")
    try:
        return factory()
    except (Exception, SystemExit) as error:
        raise BadTargetError(f"{name}: raised {told(error)}") from error


def _batch(name: str, model: nn.Module) -> Any:
    """A batch for a model that came without: only transformers' models say what they take."""
    if not hasattr(model, "main_input_name"):
        raise BadTargetError(f"{name}: to measure, return a batch with the model: return model, batch")
    try:
        return sample_for(model)
    except Exception as error:
        raise BadTargetError(
            f"{name}: no batch could be made ({told(error)}); return one: return model, batch"
        ) from error
