"""Which model of transformers computes the same as ours, how it is configured, and our weights under its names.

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
from quacklr.lab.methods import AbsorbedQKNorm, QKNorm, SoftCap
from quacklr.lab.model import MHA, MLA, Attention, Decoder
from quacklr.lab.model.mla import Latent

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LATENT_EPS = 1e-6
"""What DeepSeek-V3's norms of latents add to the mean square, whatever its configuration says."""


def twin_of(config: Config) -> str:
    """Llama, Qwen3 or DeepseekV3; UserError, with the way out, if transformers has no model that computes the same."""
    width, eps = config.shape.d_model, config.shape.norm_eps
    match config.attention, config.method:
        case _, SoftCap():
            raise no_twin(
                "Llama and DeepSeek-V3 do not cap their logits, and Gemma 2, which does, has other blocks; train with "
                "another --method"
            )
        case MHA(), QKNorm():
            return "Qwen3"
        case MHA(heads), _ if width % heads:
            raise no_twin(f"its Llama wants --heads to divide --d-model; train with others than {heads} and {width}")
        case MHA(), _:
            return "Llama"
        case MLA(), QKNorm() | AbsorbedQKNorm():
            raise no_twin("none has MLA with a norm on queries and keys; train with another --method")
        case MLA(latent_norm=False), _:
            raise no_twin("DeepSeek-V3 norms the latents of MLA, and this model does not; train with --latent-norm")
        case _ if eps != LATENT_EPS:
            raise no_twin(f"DeepSeek-V3 norms latents with an eps of 1e-6; train with --norm-eps 1e-6, not {eps:g}")
    return "DeepseekV3"


def no_twin(why: str) -> UserError:
    """The refusal of a run that stays ours."""
    return UserError(
        f"no model of transformers computes what this run has trained: {why}; or use it from Python, by "
        "quacklr.lab.train.trained.open_run"
    )


def made(model: Decoder, config: Config, end: int) -> PreTrainedModel:
    """The twin, with the very tensors of our model wherever it has them in the same order; `end` ends a document."""
    import transformers

    name = twin_of(config)
    configured = getattr(transformers, f"{name}Config")(**settings(config, end))
    configured.quacklr = {"version": quacklr.__version__, "method": kind_of("method", config.method)}
    configured.rope_theta = config.shape.rope_theta  # where older readers look; they would take their default instead
    with torch.device("meta"):
        twin: PreTrainedModel = getattr(transformers, f"{name}ForCausalLM")(configured)
    twin.load_state_dict(weights(model), strict=True, assign=True)
    return twin


def settings(config: Config, end: int) -> dict[str, Any]:
    """The twin's configuration. A document begins where another ends, so both have the same token."""
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
    """Our weights, under the names that all three twins share but for those of the attention."""
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
    """As Llama and Qwen3 name them."""
    norms = {"q_norm": attention.q_norm, "k_norm": attention.k_norm}
    modules = {f"{role}_proj": getattr(attention, role) for role in "qkvo"} | norms
    return {name: module.weight for name, module in modules.items() if module is not None}


def latent(attention: Latent) -> dict[str, Tensor]:
    """As DeepSeek-V3 has them: both parts of a head's queries in one matrix, and so are its key and its value."""
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
    """DeepSeek's order: the two that are turned together, i and i + R/2 with us, are 2i and 2i + 1."""
    return rows_HRX.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
