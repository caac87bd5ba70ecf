"""A random batch for a model of transformers, from its config and the signature of its forward."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

BATCH, LENGTH = 2, 16

WITH_IMAGE = {"clip", "siglip", "git"}  # take text and images as separate inputs


def sample_for(model: nn.Module) -> dict[str, Tensor]:
    """Random keyword arguments for one forward pass, without special tokens.

    They are enough to run the main attentions: a decoder with cross attention gets encoder states, but images and
    sound that replace tokens of the text are left out. Uses torch's global random generator.
    """
    config: Any = model.config
    main = str(getattr(model, "main_input_name", "input_ids"))
    accepted = inspect.signature(model.forward).parameters
    device = next(model.parameters()).device
    return {
        name: _input(name, config).to(device) for name in [main, *_other_inputs(model)] if name in {main, *accepted}
    }


def _other_inputs(model: nn.Module) -> list[str]:
    """Names of inputs besides the main one, given if forward has a parameter of that name."""
    config: Any = model.config
    images = ["pixel_values"] if config.model_type in WITH_IMAGE else []
    if config.is_encoder_decoder:
        return [*images, "decoder_input_ids"]
    if any(re.search(r"(encoder|cross)_attn$", name) for name, _ in model.named_modules()):
        return [*images, "encoder_hidden_states", "cross_attention_states"]
    return images


def _input(name: str, config: Any) -> Tensor:
    if name == "pixel_values":
        return torch.randn(BATCH, *_image_shape(getattr(config, "vision_config", config)))
    if name == "input_features":
        return torch.randn(BATCH, *_features_shape(config))
    if name == "input_values":  # sound, as long as LENGTH frames after the convolutions
        return torch.randn(BATCH, math.prod(config.conv_stride) * (LENGTH + 1))
    if name in ("inputs", "encoder_hidden_states", "cross_attention_states"):  # vectors; "inputs" is perceiver's
        return torch.randn(BATCH, LENGTH, getattr(config, "d_model", None) or config.hidden_size)
    return _token_ids(config)


def _token_ids(config: Any) -> Tensor:
    """Tokens that are not special, of the smallest vocabulary in the config; musicgen has a row for each codebook."""
    fields = list(_fields(config.to_dict()))
    vocab = min([value for name, value in fields if name == "vocab_size" and value])
    special = {value for name, value in fields if "token" in str(name)}
    ordinary = torch.tensor([token for token in range(vocab) if token not in special])
    rows = BATCH * (config.num_codebooks if config.model_type.startswith("musicgen") else 1)
    return ordinary[torch.randint(len(ordinary), (rows, LENGTH))]


def _image_shape(config: Any) -> tuple[int, ...]:
    """Channels, height and width; for a video, frames come first."""
    size = getattr(config, "image_size", 64)
    height, width = (size, size) if isinstance(size, int) else size
    frames = [config.num_frames] if hasattr(config, "tubelet_size") else []
    return (*frames, config.num_channels, height, width)


def _features_shape(config: Any) -> tuple[int, int]:
    """Whisper reads (mel bins, frames) and as many frames as it has positions; others read (frames, channels)."""
    if hasattr(config, "num_mel_bins"):
        return config.num_mel_bins, 2 * config.max_source_positions
    return 4 * LENGTH, config.input_feat_per_channel


def _fields(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The fields of a config and of its sub-configs; one pair for each entry of a list."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _fields(value)
        else:
            yield from ((name, entry) for entry in (value if isinstance(value, list | tuple) else [value]))
