"""The lab's model computes what transformers computes from the same weights, and has the paper's sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    DeepseekV3Config,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from lab_runs import block
from quacklr import QuacK, logit_paths
from quacklr.lab.errors import UserError
from quacklr.lab.model import MHA, MLA, Decoder, Shape, build

SHAPE = Shape(d_model=48, layers=3, d_ff=80, context=24, vocab=101, init_std=0.2)
GQA = MHA(heads=6, kv_heads=2, head_dim=16)
LATENT = MLA(heads=3, nope_dim=16, rope_dim=8, v_head_dim=12, d_cq=20, d_ckv=14)


def tokens() -> Tensor:
    return torch.randint(0, 101, (2, 24), generator=torch.Generator().manual_seed(1))


def twin_config(kind: Any) -> Any:
    return kind(
        vocab_size=101,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
        attn_implementation="eager",
    )


def copied(ours: Decoder, twin: PreTrainedModel) -> None:
    """Our weights, under transformers' names; all of them, and nothing else."""
    names = {"embedding": "model.embed_tokens", "norm": "model.norm", "attention_norm": "input_layernorm"}
    names |= {"feed_forward_norm": "post_attention_layernorm", "feed_forward": "mlp", "attention": "self_attn"}
    names |= {role: f"{role}_proj" for role in ("q", "k", "v", "o", "gate", "up", "down")} | {"blocks": "model.layers"}
    theirs = {".".join(names.get(part, part) for part in name.split(".")): p for name, p in ours.state_dict().items()}
    theirs["lm_head.weight"] = theirs["model.embed_tokens.weight"]
    twin.load_state_dict(theirs, strict=True)


@pytest.mark.parametrize("normed", [False, True], ids=["Llama", "Qwen3 (QK norm)"])
def test_logits_and_gradients_equal_those_of_transformers(normed: bool) -> None:
    ours = build(SHAPE, GQA, seed=0)
    if normed:
        for attention in ours.attentions().values():
            attention.add_qk_norm(1e-6)
    with torch.no_grad():
        for param in ours.parameters():  # gains too must differ from 1 to be seen
            param.add_(torch.randn(param.shape, generator=torch.Generator().manual_seed(param.numel())) * 0.1)
    kind, made_from = (Qwen3ForCausalLM, Qwen3Config) if normed else (LlamaForCausalLM, LlamaConfig)
    twin: Any = kind(twin_config(made_from))
    copied(ours, twin)
    logits, expected = ours(tokens()), twin(tokens()).logits
    assert expected.abs().max() > 1
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    loss = ours(tokens()[:, :-1], tokens()[:, 1:])
    loss.backward()
    twin(tokens(), labels=tokens()).loss.backward()
    for name in ("q", "k", "v", "o"):
        mine = getattr(block(ours, 1).attention, name).weight.grad
        torch.testing.assert_close(
            mine, getattr(twin.model.layers[1].self_attn, f"{name}_proj").weight.grad, rtol=1e-4, atol=1e-5
        )


def deepseek() -> Any:
    config_of: Any = DeepseekV3Config
    config = config_of(
        hidden_size=48,
        num_attention_heads=3,
        num_key_value_heads=3,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
        q_lora_rank=20,
        kv_lora_rank=14,
        rope_interleave=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        attn_implementation="eager",
    )
    return DeepseekV3Attention(config, 0)


def by_head(*parts: nn.Linear) -> Tensor:
    """Rows of several projections, packed head by head."""
    return torch.cat([part.weight.unflatten(0, (3, -1)) for part in parts], dim=1).flatten(0, 1)


def test_mla_with_latent_norms_equals_the_attention_of_deepseek_v3() -> None:
    ours = build(SHAPE, MLA(heads=3, nope_dim=16, rope_dim=8, v_head_dim=12, d_cq=20, d_ckv=14, latent_norm=True), 0)
    a, twin = block(ours).attention, deepseek()
    with torch.no_grad():
        a.q_latent_norm.weight.uniform_(0.5, 2)
        a.kv_latent_norm.weight.uniform_(0.5, 2)
        twin.q_a_proj.weight.copy_(a.dq.weight)
        twin.q_a_layernorm.weight.copy_(a.q_latent_norm.weight)
        twin.q_b_proj.weight.copy_(by_head(a.uq, a.qr))
        twin.kv_a_proj_with_mqa.weight.copy_(torch.cat([a.dkv.weight, a.kr.weight]))
        twin.kv_a_layernorm.weight.copy_(a.kv_latent_norm.weight)
        twin.kv_b_proj.weight.copy_(by_head(a.uk, a.uv))
        twin.o_proj.weight.copy_(a.o.weight)
    x = torch.randn(2, 24, 48, generator=torch.Generator().manual_seed(2))
    place = DeepseekV3RotaryEmbedding(twin.config)(x, torch.arange(24)[None])
    future = torch.full((24, 24), -torch.inf).triu(1)[None, None]
    expected = twin(x, place, future)[0]
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(a(x, ours.rotary), expected, rtol=1e-5, atol=1e-5)


def rms(x: Tensor, gain: Tensor) -> Tensor:
    return gain * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def test_qk_norm_in_mla_is_over_the_whole_query_and_key_before_the_rotation() -> None:
    model = build(SHAPE, LATENT, seed=0)
    a = block(model).attention
    a.add_qk_norm(1e-6)
    with torch.no_grad():
        a.q_norm.weight.uniform_(0.5, 2)
        a.k_norm.weight.uniform_(0.5, 2)
    x = torch.randn(2, 24, 48, generator=torch.Generator().manual_seed(2))
    shared = a.kr(x)[:, :, None].expand(-1, -1, 3, -1)
    heads = [part.unflatten(-1, (3, -1)) for part in (a.uq(a.dq(x)), a.qr(a.dq(x)), a.uk(a.dkv(x)), a.uv(a.dkv(x)))]
    q = rms(torch.cat(heads[:2], dim=-1), a.q_norm.weight)
    k = rms(torch.cat([heads[2], shared], dim=-1), a.k_norm.weight)
    q, k = (torch.cat([part[..., :16], model.rotary(part[..., 16:])], dim=-1) for part in (q, k))
    logit = torch.einsum("bihd,bjhd->bhij", q, k) / 24**0.5 + torch.full((24, 24), -torch.inf).triu(1)
    expected = a.o(torch.einsum("bhij,bjhe->bihe", logit.softmax(-1), heads[3]).flatten(2))
    torch.testing.assert_close(a(x, model.rotary), expected)


def capped_by_hand(model: Decoder, x: Tensor, cap: float) -> Tensor:
    a = block(model).attention
    q, k = (model.rotary(part(x).unflatten(-1, (heads, 16))) for part, heads in ((a.q, 6), (a.k, 2)))
    v = a.v(x).unflatten(-1, (2, 16))
    mixed = torch.zeros(2, 24, 6, 16)
    for head in range(6):
        for t in range(24):
            logit = (q[:, t, head, None] * k[:, : t + 1, head // 3]).sum(-1) / 4
            mixed[:, t, head] = ((cap * (logit / cap).tanh()).softmax(-1)[..., None] * v[:, : t + 1, head // 3]).sum(1)
    return a.o(mixed.flatten(2))


def test_soft_capping_is_gemma_2s() -> None:
    model = build(SHAPE, GQA, seed=0)
    block(model).attention.cap = 1.5
    x = torch.randn(2, 24, 48, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(block(model).attention(x, model.rotary), capped_by_hand(model, x, 1.5))


@pytest.mark.parametrize("spec", [GQA, LATENT], ids=["GQA", "MLA"])
def test_a_later_token_changes_no_earlier_logit(spec: MHA | MLA) -> None:
    model, before = build(SHAPE, spec, seed=0), tokens()
    after = before.clone()
    after[:, 12:] = (after[:, 12:] + 1) % 101
    assert torch.equal(model(before)[:, :12], model(after)[:, :12])
    assert not torch.allclose(model(before)[:, 12:], model(after)[:, 12:])


def test_each_attention_declares_the_paths_of_its_logit() -> None:
    names = {w.name for path in logit_paths(build(SHAPE, GQA, 0)) for w in path.weights}
    assert names == {f"blocks.{i}.attention.{role}" for i in range(3) for role in "qk"}
    paths = logit_paths(build(SHAPE, LATENT, 0))
    assert [w.name.rsplit(".")[-1] for w in paths[0].weights] == ["dq", "uq", "uk", "dkv"]
    assert [w.name.rsplit(".")[-1] for w in paths[1].weights] == ["dq", "qr", "kr"]


def scaled_logit_is_scaled(model: Decoder, role: str) -> bool:
    """Whether a weight that is three times as large makes another attention."""
    a, x = block(model).attention, torch.randn(1, 8, 48, generator=torch.Generator().manual_seed(3))
    before = a(x, model.rotary)
    with torch.no_grad():
        getattr(a, role).weight.mul_(3)
    return not torch.allclose(before, a(x, model.rotary), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("latent_norm", [False, True])
@pytest.mark.parametrize("role", ["dq", "uq", "qr", "uk", "kr"])
def test_exactly_the_weights_on_a_path_change_the_logit_when_scaled(role: str, latent_norm: bool) -> None:
    spec = MLA(heads=3, nope_dim=16, rope_dim=8, v_head_dim=12, d_cq=20, d_ckv=14, latent_norm=latent_norm)
    model = build(Shape(d_model=48, layers=1, d_ff=80, context=24, vocab=101, init_std=0.3), spec, seed=0)
    declared = {w.name.rsplit(".")[-1] for path in logit_paths(model) for w in path.weights}
    assert (role in declared) == scaled_logit_is_scaled(model, role)


def test_under_qk_norm_there_is_nothing_for_quack_to_control() -> None:
    model = build(SHAPE, LATENT, 0)
    for attention in model.attentions().values():
        attention.add_qk_norm(1e-6)
    with pytest.raises(ValueError, match="no attention that QuacK can control"):
        QuacK(model, torch.optim.SGD(model.parameters(), lr=1.0))


def test_the_same_seed_gives_the_same_weights_and_another_gives_others() -> None:
    first, same, other = (build(SHAPE, GQA, seed).embedding.weight for seed in (0, 0, 1))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    assert abs(float(first.detach().std()) - 0.2) < 0.01


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: MHA(heads=4, kv_heads=3), "--kv-heads"),
        (lambda: MHA(head_dim=31), "--head-dim"),
        (lambda: MLA(rope_dim=7), "--rope-dim"),
        (lambda: Shape(d_model=0), "--d-model"),
        (lambda: Shape(norm_eps=float("nan")), "--norm-eps"),
        (lambda: build(Shape(), MHA(), 0), "--vocab"),
    ],
)
def test_sizes_that_make_no_model_are_refused_by_the_name_of_the_option(make: object, word: str) -> None:
    assert callable(make)
    with pytest.raises(UserError, match=word):
        make()
