"""Configs of transformers with small sizes and the same kinds of attention.

    a field of the config                                 becomes
    a size (heads, ranks, experts, ...)                   at most the limit that SIZES has for its name
    a list with an entry per layer, or of layer indices   the same list for the layers that are kept
    a token id                                            the id modulo the small vocabulary
    anything else (flags, names, factors)                 itself

The first layer of each kind is kept, so that a hybrid stack stays hybrid. Nothing is downloaded.
"""

from __future__ import annotations

import copy
import re
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Fields = dict[str, Any]

VOCAB = 256

SIZES: tuple[tuple[str, int], ...] = (  # the limit of the first pattern that a field's name matches
    (r"theta|seed|feat_extract_layers", 2**62),  # not sizes, or tied to the length of another field
    (r"vocab", VOCAB),
    (r"(layers?|blocks|depths?|per_stack|sparse_step)$", 2),
    (r"nope_head_dim", 12),
    (r"rope_head_dim|rotary_dim", 8),
    (r"qk_head_dim", 20),
    (r"q_lora", 24),
    (r"kv_lora", 20),
    (r"rank", 16),
    (r"mamba_(d_head|headdim)", 32),  # 4 heads make twice the hidden size
    (r"head_?dim|dim_head|d_head|head_size|d_kv|kv_channels|pre_attn_scalar", 16),
    (r"(kv|key|key_value)(_n)?_heads|query_groups", 2),
    (r"heads?$", 4),
    (r"index_topk", 8),
    (r"topk_group", 1),
    (r"n_groups?$|expert_group$|per_tok|top_?k|moe_k", 2),
    (r"expert(s|_num)$", 4),
    (r"intermediate|ffn|_ff|dff|inner|mlp|feed_forward", 96),
    (r"window|chunk|block_size|local_", 8),
    (r"kernel", 9),
    (r"position|ctx|length|seq_len", 128),
    (r"patch_size|tubelet", 8),
    (r"(image|crop)_size", 32),
    (r"frames", 4),
    (r"", 64),
)
PREFIXES = {"first_k_dense_replace", "num_dense_layers"}  # the number of first layers that are dense
SUFFIXES = {"num_kv_shared_layers"}  # the number of last layers that read the keys of an earlier one

_ZAMBA: Fields = {  # attention reads [x, x_0]; two layers, because all layers share weights
    "num_hidden_layers": 4,
    "layers_block_type": ["linear_attention", "hybrid"] * 2,
    "attention_hidden_size": 128,
    "attention_head_dim": 32,
}
_SWIN: Fields = {"image_size": 64, "embed_dim": 16, "num_heads": (1, 2, 4, 8), "hidden_size": 128, "window_size": 2}
SMALL: dict[str, Fields] = {  # by type of config or sub-config: sizes that depend on each other
    "big_bird": {"block_size": 2, "num_random_blocks": 1},  # otherwise 16 tokens are too few for sparse attention
    "bigbird_pegasus": {"block_size": 2, "num_random_blocks": 1},
    "blt_global_transformer": {"hidden_size": 128, "head_dim": 32},  # a patch is two concatenated vectors
    "blt_local_decoder": {"hidden_size_global": 128},
    "blt_local_encoder": {"hidden_size_global": 128},
    "deepseek_v4": {"compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4}},
    "falcon_h1": {"mamba_d_head": 16},  # 4 heads make the hidden size
    "funnel": {"block_sizes": (1, 1), "block_repeats": [1, 1]},
    "gemma3": {"mm_tokens_per_image": 4},  # from 16 patches
    "hrm_text": {"num_hidden_layers": 16},  # layer calls: 2 layers in 2 * (3 + 1) cycles of its two stacks
    "jamba": {"num_hidden_layers": 3, "attn_layer_period": 3, "attn_layer_offset": 2},  # mamba, its experts, attention
    "mamba2": {"head_dim": 32},  # 4 heads make twice the hidden size
    "mimo_v2_flash": {"head_dim": 24},  # wider than the 16 of a value
    "recurrent_gemma": {"num_hidden_layers": 3},  # recurrent, recurrent, attention
    "reformer": {
        "axial_pos_shape": (4, 4),
        "axial_pos_embds_dim": (16, 48),
    },  # the product of the first is 16 tokens, the sum of the second is the hidden size
    "segformer": {"num_encoder_blocks": 4},  # its lists have an entry per block
    "swin": _SWIN,
    "swinv2": _SWIN,
    "xlstm": {"hidden_size": 128, "embedding_dim": 128},  # its cache rounds widths up to 64
    "zamba": _ZAMBA,
    "zamba2": _ZAMBA | {"hybrid_layer_ids": [1, 3], "mamba_headdim": 32},
}

NEEDED = {"vocab_size": VOCAB, "head_dim": 16, "num_key_value_heads": 2, "num_experts_per_tok": 2}  # set even if None
_QWEN4 = {  # sizes of its sparse attention; its rope needs 256
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
}
_NO_PLE = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
_RESNET: Fields = {"use_timm_backbone": False, "backbone_config": {"model_type": "resnet", "out_features": ["stage4"]}}
DEFAULTS: dict[str, Fields] = {  # fields to set where the default config fails, needs timm, or has no attention
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "blt": {"use_cache": False},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}}
    },
    "conditional_detr": _RESNET,
    "dbrx": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0}},
    "detr": _RESNET,
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2},
    "esm": {"pad_token_id": 1},
    "funnel": {"architectures": ["FunnelModel"]},
    "gemma4_assistant": {"text_config": {"model_type": "gemma4_text", **_NO_PLE}},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 16},
    "lfm2_moe": {"layer_types": ["conv", "conv", "conv", "full_attention"] * 8},
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "reformer": {"is_decoder": True},
    "xmod": {"default_language": "en_XX"},
}


def shrink(config: PretrainedConfig) -> PretrainedConfig:
    """A copy of a config and of its sub-configs, with the same features and small sizes."""
    small = copy.deepcopy(config)
    small.per_layer_config = None
    kept, layers = _kept_layers(config), _layers(config)
    fields = {name: _shrunk(name, value, kept, layers) for name, value in _fields(config).items()}
    if "kv_lora_rank" in fields:  # MLA: every head has its own key, and head_dim is that of the rope part
        fields |= {name: size for name, size in {"num_key_value_heads": 4, "head_dim": 8}.items() if name in fields}
    for name, value in (fields | SMALL.get(config.model_type, {})).items():
        setattr(small, name, value)
    small.per_layer_config = {
        kept.index(i): {name: value * getattr(small, name) // vars(config)[name] for name, value in overrides.items()}
        for i, overrides in _overrides(config).items()
        if i in kept
    } or None
    return small


def default_config(model_type: str) -> PretrainedConfig:
    """The default config of a model type, with the fields of DEFAULTS."""
    from transformers import AutoConfig

    fields = DEFAULTS.get(model_type, {})
    try:
        return AutoConfig.for_model(model_type, **fields)
    except ModuleNotFoundError:  # timm is installed without torchvision, which transformers does not expect
        with patch("transformers.utils.is_timm_available", return_value=False):
            return AutoConfig.for_model(model_type, **fields)


def _shrunk(name: str, value: Any, kept: list[int], layers: int) -> Any:
    from transformers import PretrainedConfig

    if isinstance(value, PretrainedConfig):
        return shrink(value)
    if isinstance(value, list | tuple):
        if _lists_layers(name, value):
            return type(value)(kept.index(i) for i in value if i in kept)
        entries = [value[i] for i in kept] if len(value) == layers else value
        return type(value)(_shrunk(name, entry, kept, layers) for entry in entries)
    if type(value) is not int:
        return value
    if re.search(r"token", name) and not re.search(r"num|per", name):
        return value % VOCAB
    if name in PREFIXES:
        return sum(i < value for i in kept)
    if name in SUFFIXES:
        return sum(i >= layers - value for i in kept)
    if value == layers and re.search(r"layers?$", name):
        return len(kept)
    return min(value, next(size for pattern, size in SIZES if re.search(pattern, name)))


def _kept_layers(config: PretrainedConfig) -> list[int]:
    """The indices of the first layer of each kind, or of the first two layers if all are of one kind."""
    layers = _layers(config)
    first: dict[str, int] = {}
    for i in range(layers):
        first.setdefault(_kind(config, i, layers), i)
    return list(first.values()) if len(first) > 1 else list(range(min(layers, 2)))


def _kind(config: PretrainedConfig, i: int, layers: int) -> str:
    """Everything in the config that is specific to layer i."""
    kind: list[Any] = [_overrides(config).get(i)]
    for name, value in _fields(config).items():
        if isinstance(value, list | tuple):
            kind += [i in value] if _lists_layers(name, value) else [value[i]] if len(value) == layers else []
        elif name in PREFIXES:
            kind.append(i < value)
        elif name in SUFFIXES:
            kind.append(i >= layers - value)
    return repr(kind)


def _lists_layers(name: str, value: list[Any] | tuple[Any, ...]) -> bool:
    """Whether a list has the indices of some layers, as [3, 7], and not a flag for each layer, as [0, 0, 0, 1]."""
    ascending = all(type(i) is int for i in value) and list(value) == sorted(set(value))
    return ascending and re.search(r"layers|layer_ids|idxs|indices|indexes", name) is not None


def _layers(config: PretrainedConfig) -> int:
    return getattr(config, "num_hidden_layers", None) or 0


def _fields(config: PretrainedConfig) -> Fields:
    fields = {name: NEEDED.get(name) if value is None else value for name, value in vars(config).items()}
    return {name: value for name, value in fields.items() if not name.startswith("_") and value is not None}


def _overrides(config: PretrainedConfig) -> dict[int, Fields]:
    """Fields that differ in some layers, in the form that transformers stores."""
    return config._heterogeneity_spec.per_layer_overrides if config.is_heterogeneous else {}
