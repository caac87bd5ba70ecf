"""The models that attention is found in: every type of transformers, tiny; variants of some; torch's own."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from sample import sample_for
from small_config import DEFAULTS, default_config, shrink

os.environ["HF_HUB_OFFLINE"] = "1"

CAUSAL, OTHERS, VARIANTS, TORCH = (
    *("Causal language models", "Encoders, encoder-decoders, vision and sound", "Variants of them"),
    "torch's own",
)
TYPES = """
albert bart beit bert big_bird blenderbot clip clip_text_model clip_vision_model conditional_detr convbert deberta
deberta-v2 deit detr dinov2 dinov3_vit distilbert electra esm flaubert funnel hubert ibert layoutlm led longformer
longt5 m2m_100 marian mbart mobilebert modernbert mpnet mt5 nllb-moe nystromformer pegasus perceiver prophetnet
roberta roformer segformer siglip siglip_vision_model speech_to_text squeezebert swin swinv2 switch_transformers t5
t5gemma umt5 vit vivit wav2vec2 wavlm whisper xlm-roberta xlnet
"""
BASE = TYPES.split()  # as base models, so that an encoder-decoder is whole
CHANGED: list[tuple[str, dict[str, Any]]] = [
    ("cohere", {"use_qk_norm": True}),
    ("deepseek_v2", {"q_lora_rank": None}),
    ("deepseek_v3", {"q_lora_rank": None}),
    ("falcon", {"multi_query": False}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    ("gemma4_text", {"attention_k_eq_v": True, "num_global_key_value_heads": 2}),
    ("gemma4_text", {"num_kv_shared_layers": 20}),
    ("glm4_moe", {"use_qk_norm": True}),
    ("gpt_bigcode", {"multi_query": False}),
    ("llama", {"attention_bias": True}),
    ("persimmon", {"qk_layernorm": False}),
    ("phi", {"qk_layernorm": True}),
    ("stablelm", {"qk_layernorm": True}),
]
MULTIHEAD: dict[str, dict[str, Any]] = {
    "nn.MultiheadAttention": {},
    "nn.MultiheadAttention (kdim, vdim)": {"kdim": 32, "vdim": 32},
    "nn.MultiheadAttention (add_bias_kv)": {"add_bias_kv": True},
}
LANGUAGE_MODEL = {"gemma3n": "Gemma3nForCausalLM"}  # its vision model is one of timm's, which has no small size


class Attends(nn.Module):
    """A layer of torch's on what a tensor of vectors is: itself for queries, a part of it for keys."""

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True, **given)
        self.width = given.get("kdim", 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keys = x[..., : self.width]
        return self.attention(x, keys, keys)[0]


def build(name: str, section: str = CAUSAL) -> tuple[nn.Module, Any]:
    """A tiny model in eval mode without caches, always the same; and a batch for it."""
    torch.manual_seed(0)
    if section == TORCH:
        layer = nn.TransformerEncoderLayer(64, 4, 96, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        return (Attends(**MULTIHEAD[name]) if name in MULTIHEAD else encoder).eval(), torch.randn(2, 16, 64)
    kind: dict[str, Callable[[str], nn.Module]] = {CAUSAL: tiny_model, OTHERS: tiny_base_model, VARIANTS: variant}
    model = kind[section](name).eval()
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "use_cache"):
            module.config.use_cache = False  # type: ignore[union-attr]
    return model, sample_for(model)


def tiny_model(model_type: str) -> nn.Module:
    """The type's causal language model if it has one, else its base model. At most a million weights."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL_LM

    if model_type not in CAUSAL_LM:
        return tiny_base_model(model_type)
    config = tiny_config(model_type)
    model_class: Any = getattr(transformers, LANGUAGE_MODEL.get(model_type, CAUSAL_LM[model_type]))
    if not isinstance(config, model_class.config_class):  # the language model is a part: musicgen's decoder
        config = next(part for part in vars(config).values() if isinstance(part, model_class.config_class))
    return model_class(config)


def tiny_base_model(model_type: str) -> nn.Module:
    """The type's AutoModel: no head, and an encoder-decoder whole where tiny_model has the decoder alone."""
    import transformers

    auto: Any = transformers.AutoModel
    return auto.from_config(tiny_config(model_type))


def tiny_config(model_type: str, **overrides: Any) -> Any:
    """The default config of a model type with small sizes; overrides are fields set afterwards.

    For a variant with other layers, shrink that: `shrink(AutoConfig.for_model(model_type, num_kv_shared_layers=20))`.
    """
    config = shrink(default_config(model_type))
    for name, value in overrides.items():
        setattr(config, name, value)
    return config


def variant(name: str) -> nn.Module:
    import transformers

    model_type, overrides = next((t, o) for t, o in CHANGED if described(t, o) == name)
    auto: Any = transformers.AutoModelForCausalLM
    config = shrink(transformers.AutoConfig.for_model(model_type, **{**DEFAULTS.get(model_type, {}), **overrides}))
    if name == "falcon (multi_query=False)":
        config.num_kv_heads = config.num_attention_heads
    return auto.from_config(config)


def described(model_type: str, overrides: dict[str, Any]) -> str:
    return f"{model_type} ({', '.join(f'{name}={value}' for name, value in overrides.items())})"


def sections() -> dict[str, list[str]]:
    """The names of all models, by section."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL_LM

    torch_own = [*MULTIHEAD, "nn.TransformerEncoder"]
    return {CAUSAL: sorted(CAUSAL_LM), OTHERS: BASE, VARIANTS: [described(*each) for each in CHANGED], TORCH: torch_own}
