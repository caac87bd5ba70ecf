"""Convert a trained model to the transformers architecture that computes the same function.

    MHA                      Llama
    MHA with QK norm         Qwen3
    MLA with latent norms    DeepSeek-V3, every layer dense

Shapes: C width, H head, L latent, R the rotary part of a head.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import quacklr
from quacklr.lab.config import Config, kind_of
from quacklr.lab.errors import UserError
from quacklr.lab.methods import AbsorbedQKNorm, QKNorm, Quack, SoftCap
from quacklr.lab.model import MHA, MLA, Attention, Decoder
from quacklr.lab.model.mla import Latent

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LATENT_EPS = 1e-6
"""Epsilon of DeepSeek-V3's latent norms, which is not configurable."""


def architecture(config: Config) -> str:
    """Llama, Qwen3 or DeepseekV3; UserError if no architecture of transformers computes the same function."""
    width, eps = config.shape.d_model, config.shape.norm_eps
    match config.attention, config.method:
        case _, SoftCap():
            raise unsupported(
                "Llama and DeepSeek-V3 do not cap their logits, and Gemma 2, which does, has other blocks; train with "
                "another --method"
            )
        case MHA(), QKNorm() | Quack(together="qk-norm"):
            return "Qwen3"
        case MHA(heads), _ if width % heads:
            raise unsupported(
                f"its Llama needs --heads to divide --d-model; train with others than {heads} and {width}"
            )
        case MHA(), _:
            return "Llama"
        case MLA(), QKNorm() | AbsorbedQKNorm() | Quack(together="qk-norm"):
            raise unsupported("none has MLA with a norm on queries and keys; train with another --method")
        case MLA(latent_norm=False), _:
            raise unsupported("DeepSeek-V3 norms the latents of MLA, and this model does not; train with --latent-norm")
        case _ if eps != LATENT_EPS:
            raise unsupported(f"DeepSeek-V3 norms latents with an eps of 1e-6; train with --norm-eps 1e-6, not {eps:g}")
    return "DeepseekV3"


def unsupported(why: str) -> UserError:
    """The error for a run that cannot be exported."""
    return UserError(
        f"no model of transformers computes what this run has trained: {why}; or use it from Python, by "
        "quacklr.lab.train.trained.open_run"
    )


def convert(model: Decoder, config: Config, end: int) -> PreTrainedModel:
    """The model of transformers. It shares tensors with ours where the layout is equal; `end` ends a document."""
    import transformers

    name = architecture(config)
    hf_config = getattr(transformers, f"{name}Config")(**settings(config, end))
    hf_config.quacklr = {"version": quacklr.__version__, "method": kind_of("method", config.method)}
    hf_config.rope_theta = config.shape.rope_theta  # where older versions read it
    with torch.device("meta"):
        converted: PreTrainedModel = getattr(transformers, f"{name}ForCausalLM")(hf_config)
    converted.load_state_dict(weights(model), strict=True, assign=True)
    return converted


def settings(config: Config, end: int) -> dict[str, Any]:
    """The configuration of the transformers model. One token both ends a document and begins the next."""
    shape, spec = config.shape, config.attention
    decoder = {
        "vocab_size": shape.vocab,
        "hidden_size": shape.d_model,
        "intermediate_size": shape.d_ff,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": spec.heads,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": shape.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "tie_word_embeddings": True,
        "bos_token_id": end,
        "eos_token_id": end,
    }
    if isinstance(spec, MHA):
        return decoder | {"num_key_value_heads": spec.kv_heads, "head_dim": spec.head_dim}
    return decoder | {
        "num_key_value_heads": spec.heads,
        "qk_nope_head_dim": spec.nope_dim,
        "qk_rope_head_dim": spec.rope_dim,
        "v_head_dim": spec.v_head_dim,
        "q_lora_rank": spec.d_cq,
        "kv_lora_rank": spec.d_ckv,
        "rope_interleave": True,
        "first_k_dense_replace": shape.layers,
        "num_mtp_layers": 0,
    }


def weights(model: Decoder) -> dict[str, Tensor]:
    """Our weights by their names in transformers; only those of the attention depend on the architecture."""
    embedding = model.embedding.weight
    named: dict[str, Tensor] = {"model.embed_tokens": embedding, "model.norm": model.norm.weight, "lm_head": embedding}
    blocks: Iterable[Any] = model.blocks
    for number, block in enumerate(blocks):
        of_block = {"input_layernorm": block.attention_norm, "post_attention_layernorm": block.feed_forward_norm}
        of_block |= {f"mlp.{role}_proj": getattr(block.feed_forward, role) for role in ("gate", "up", "down")}
        named |= {f"model.layers.{number}.{name}": module.weight for name, module in of_block.items()}
        of_attention = latent(block.attention) if isinstance(block.attention, Latent) else multi_head(block.attention)
        named |= {f"model.layers.{number}.self_attn.{name}": weight for name, weight in of_attention.items()}
    return {f"{name}.weight": weight.detach() for name, weight in named.items()}


def multi_head(attention: Attention) -> dict[str, Tensor]:
    """The weights of MHA by their names in Llama and Qwen3."""
    norms = {"q_norm": attention.q_norm, "k_norm": attention.k_norm}
    modules = {f"{role}_proj": getattr(attention, role) for role in "qkvo"} | norms
    return {name: module.weight for name, module in modules.items() if module is not None}


def latent(attention: Latent) -> dict[str, Tensor]:
    """The weights of MLA by their names in DeepSeek-V3, which packs the parts of a query, and a key with its value."""
    a, heads = attention, attention.heads
    gains = {"q_a_layernorm": a.q_latent_norm, "kv_a_layernorm": a.kv_latent_norm}
    return {name: norm.weight for name, norm in gains.items() if norm is not None} | {
        "q_a_proj": a.dq.weight,
        "q_b_proj": torch.cat([by_head(a.uq, heads), interleaved(by_head(a.qr, heads))], dim=1).flatten(0, 1),
        "kv_a_proj_with_mqa": torch.cat([a.dkv.weight, *interleaved(by_head(a.kr, 1))]),
        "kv_b_proj": torch.cat([by_head(a.uk, heads), by_head(a.uv, heads)], dim=1).flatten(0, 1),
        "o_proj": a.o.weight,
    }


def by_head(linear: nn.Linear, heads: int) -> Tensor:
    """(H, rows of a head, columns)."""
    return linear.weight.unflatten(0, (heads, -1))


def interleaved(rows_HRX: Tensor) -> Tensor:
    """Rows in DeepSeek's order: it rotates rows 2i and 2i + 1 as a pair, where we rotate i and i + R/2."""
    return rows_HRX.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
