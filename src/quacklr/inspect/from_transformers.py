"""A model of transformers from a type or a config: its shapes on the meta device, and a small one that runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quacklr.inspect.sample import sample_for
from quacklr.inspect.small_config import default_config, shrink
from quacklr.inspect.target import SMALL, BadTargetError, NoMeasurementError, Target, one_line


def types() -> list[str]:
    """All model types; none if transformers is not installed."""
    try:
        from transformers.models.auto import configuration_auto
    except ModuleNotFoundError:
        return []
    auto: Any = configuration_auto
    return list(auto.CONFIG_MAPPING_NAMES)


def from_type(name: str) -> Target:
    """The model of a type's default config."""
    return _target(name, lambda: default_config(name))


def from_file(name: str) -> Target:
    """The model of a config.json, or of the one in a folder."""
    file = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    if file.suffix != ".json":
        raise BadTargetError(f"{name}: a file is a config.json, or Python with a factory: file.py:factory")
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadTargetError(f"{file}: is not JSON that can be read: {error}") from error
    if not isinstance(fields, dict) or not fields.get("model_type"):
        raise BadTargetError(f"{file}: has no model_type, so it is no config of transformers")
    auto_config = _auto_config(name)
    if fields["model_type"] not in types():
        raise BadTargetError(f"{file}: this version of transformers has no model_type {fields['model_type']!r}")
    return _target(name, lambda: auto_config.from_pretrained(str(file), trust_remote_code=False))


def from_cache(name: str) -> Target:
    """The model of a hub id, if its config is in the local cache."""
    auto_config = _auto_config(name)
    try:
        config = auto_config.from_pretrained(name, local_files_only=True, trust_remote_code=False)
    except OSError as error:
        raise BadTargetError(
            f"{name}: no such file or folder, and not in the local cache of the hub (nothing is downloaded); "
            f"get it with `hf download {name} config.json`"
        ) from error
    except Exception as error:  # transformers has no common error type for a bad config
        raise BadTargetError(f"{name}: its config cannot be read: {one_line(error)}") from error
    return _target(name, lambda: config)


def _auto_config(name: str) -> Any:
    if not types():
        raise BadTargetError(f"{name}: needs transformers: pip install transformers")
    from transformers import AutoConfig

    return AutoConfig


def _target(name: str, read: Callable[[], Any]) -> Target:
    try:
        config = read()
        with torch.device("meta"):
            model = _model(config)
    except BadTargetError:
        raise
    except ModuleNotFoundError as missing:
        cause: Any = missing
        while isinstance(cause.__cause__, ModuleNotFoundError):
            cause = cause.__cause__
        raise BadTargetError(f"{name}: transformers needs {cause.name}: pip install {cause.name}") from missing
    except Exception as error:  # the constructor of the model can raise any error
        raise BadTargetError(f"{name}: transformers cannot make it: {one_line(error)}") from error
    return Target(model, lambda: _small(config), SMALL)


def _small(config: Any) -> tuple[nn.Module, Any]:
    """The model of the shrunk config, with random weights from a fixed seed, and a batch."""
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = _model(shrink(config))
            return model, sample_for(model)
    except Exception as error:  # the constructor of the model can raise any error
        raise NoMeasurementError(f"{SMALL} cannot be made to run: {one_line(error)}") from error


def _model(config: Any) -> nn.Module:
    """A model of the class that the config names; otherwise its causal language model, base model or another one."""
    import transformers
    from transformers.models.auto import modeling_auto as auto

    named = next(iter(getattr(config, "architectures", None) or [""]))
    causal = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, "")
    for name in (named, "" if config.is_encoder_decoder else causal):
        model_class: Any = getattr(transformers, name, None) if name else None
        if model_class is not None and isinstance(config, model_class.config_class):
            return model_class._from_config(config)
    for mapping, maker in (
        (auto.MODEL_MAPPING_NAMES, transformers.AutoModel),
        (auto.MODEL_FOR_PRETRAINING_MAPPING_NAMES, transformers.AutoModelForPreTraining),
        (auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, transformers.AutoModelForSeq2SeqLM),
    ):
        if config.model_type in mapping:
            from_config: Any = maker.from_config
            return from_config(config)
    raise BadTargetError(f"{config.model_type}: is a part of other models, and has none of its own; name one of those")
