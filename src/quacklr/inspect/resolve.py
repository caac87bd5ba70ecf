"""The model that TARGET on the command line names. Models of transformers are on the meta device, without weights."""

from __future__ import annotations

import difflib
import importlib.util
import sys
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from textwrap import shorten
from types import ModuleType
from typing import Any

import torch
from torch import nn

Target = tuple[nn.Module, Any, Any]  # the model; an input that it takes, or None; optimizers, or None


class BadTargetError(Exception):
    """The message states what is wrong with a target and how to fix it."""


def resolve(name: str) -> Target:
    """The model with this name, perhaps on the meta device. BadTargetError if there is none."""
    if ":" in name:
        return _from_factory(name)
    if "/" in name or name.endswith(".json"):
        return _from_config("from_pretrained", name, local_files_only=True, trust_remote_code=False)
    transformers, no_type = _package("transformers", "no model type of transformers")
    types = [] if transformers is None else list(transformers.CONFIG_MAPPING)
    if name in types:
        return _from_config("for_model", name)
    timm, no_model = _package("timm", "no model of timm")
    if timm is not None and timm.is_model(name):
        model = timm.create_model(name, pretrained=False)
        return model, torch.randn(2, *model.default_cfg["input_size"]), None
    close = difflib.get_close_matches(name.lower().replace("-", "_"), types, n=3)
    perhaps = f"did you mean {' or '.join(close)}?" if close else "a folder is ./folder, your model is file.py:factory"
    raise BadTargetError(f"{name}: {no_type}, {no_model}; {perhaps}")


def _package(name: str, without: str) -> tuple[Any, str]:
    """A package and the text `without`; None and another text if the package cannot be imported."""
    try:
        return import_module(name), without
    except ModuleNotFoundError as missing:
        return None, f"{name} cannot be imported (pip install {missing.name})"


def _from_config(method: str, name: str, **options: bool) -> Target:
    """The model of the config that a method of transformers' AutoConfig returns.

    It has the class that the config names; otherwise it is its causal language model, or its base model.
    """
    try:
        import transformers

        config = getattr(transformers.AutoConfig, method)(name, **options)
        classes = (getattr(transformers, each, None) for each in config.architectures or ())
        maker: Any = next(filter(None, classes), None)
        if maker is None:
            causal = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING and not config.is_encoder_decoder
            maker = (transformers.AutoModelForCausalLM if causal else transformers.AutoModel).from_config
        with torch.device("meta"):
            return maker(config), None, None
    except (ImportError, OSError, ValueError) as error:  # transformers raises them for configs that it cannot use
        why = shorten(f"{type(error).__name__}: {error}", 300, placeholder=" ...")
        raise BadTargetError(f"{name}: transformers cannot make it (nothing is downloaded): {why}") from error


def _from_factory(name: str) -> Target:
    """What the factory returns: model, (model, batch), or (model, optimizer or several, batch)."""
    module_name, _, attribute = name.rpartition(":")
    module = _imported(module_name)
    try:
        factory = attrgetter(attribute)(module)
    except AttributeError as missing:
        raise BadTargetError(f"{module_name} has no {attribute!r}; a target is package.module:factory") from missing
    made = factory if isinstance(factory, nn.Module) or not callable(factory) else factory()
    model, *optimizers, batch = made if isinstance(made, tuple) and len(made) in (2, 3) else (made, None)
    if not isinstance(model, nn.Module):
        raise BadTargetError(
            f"{name}: must return a model, (model, batch) or (model, optimizer, batch), not {type(model).__name__}"
        )
    return model, batch, optimizers[0] if optimizers else None


def _imported(module_name: str) -> ModuleType:
    """Import a module with the current directory on sys.path, or a file with its folder on sys.path."""
    file = Path(module_name)
    is_file = file.suffix == ".py"
    if is_file and not file.is_file():
        raise BadTargetError(f"{module_name}: there is no such file")
    sys.path.insert(0, str(file.resolve().parent if is_file else Path.cwd()))
    try:
        if not is_file:
            return import_module(module_name)
        spec: Any = importlib.util.spec_from_file_location(file.stem, file.resolve())
        module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    except ModuleNotFoundError as missing:
        raise BadTargetError(f"{module_name} cannot be imported: there is no module {missing.name}") from missing
