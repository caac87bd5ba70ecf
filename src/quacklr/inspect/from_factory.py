"""A model made by a function of the user: package.module:factory, or path/to/file.py:factory."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from quacklr.inspect.sample import sample_for
from quacklr.inspect.target import BadTargetError, Target, one_line


def target(name: str) -> Target:
    """The target that the factory returns: model, (model, batch), or (model, optimizer or several, batch)."""
    module_name, _, attribute = name.rpartition(":")
    try:
        factory = attrgetter(attribute)(_imported(module_name))
    except AttributeError as missing:
        raise BadTargetError(f"{module_name} has no {attribute!r}; a target is package.module:factory") from missing
    made = factory if isinstance(factory, nn.Module) else _call(name, factory)
    model, *optimizers, sample = made if isinstance(made, tuple) and len(made) in (2, 3) else (made, None)
    if not isinstance(model, nn.Module):
        raise BadTargetError(
            f"{name}: must return a model, (model, batch) or (model, optimizer, batch), not {type(model).__name__}"
        )
    optimizer = optimizers[0] if optimizers else None
    return Target(model, lambda: (model, _batch(name, model) if sample is None else sample), optimizers=optimizer)


def _call(name: str, factory: Any) -> Any:
    if not callable(factory):
        raise BadTargetError(f"{name}: is a {type(factory).__name__}, not a function that returns a model")
    try:
        return factory()
    except (Exception, SystemExit) as error:
        raise BadTargetError(f"{name}: raised {one_line(error)}") from error


def _imported(module_name: str) -> ModuleType:
    """Import the module with the current directory on sys.path, as `python -m` does."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return _from_file(Path(module_name)) if module_name.endswith(".py") else importlib.import_module(module_name)
    except ModuleNotFoundError as missing:
        raise BadTargetError(f"{module_name} cannot be imported: there is no module {missing.name}") from missing
    except FileNotFoundError as missing:
        raise BadTargetError(f"{module_name}: there is no such file") from missing
    except (Exception, SystemExit) as error:
        raise BadTargetError(f"{module_name} cannot be imported: {one_line(error)}") from error


def _from_file(file: Path) -> ModuleType:
    """Import a file as a module of its own name, with its folder on sys.path, as `python file.py` does."""
    spec = importlib.util.spec_from_file_location(file.stem, file.resolve(strict=True))
    assert spec is not None
    assert spec.loader is not None
    if str(file.resolve().parent) not in sys.path:
        sys.path.insert(0, str(file.resolve().parent))
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _batch(name: str, model: nn.Module) -> Any:
    """A batch for a model that came without one: possible only for models of transformers."""
    if not hasattr(model, "main_input_name"):
        raise BadTargetError(f"{name}: to measure, return a batch with the model: return model, batch")
    try:
        return sample_for(model)
    except Exception as error:  # code of the model, which can raise any error
        raise BadTargetError(
            f"{name}: no batch could be made ({one_line(error)}); return one: return model, batch"
        ) from error
