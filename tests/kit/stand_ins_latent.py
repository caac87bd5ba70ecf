"""Stand-ins for multi-head latent attention, with and without norms on the latents, each in its original's manner.

Four heads with 8 rows without and 4 rows with a rotation, values of size 6, latents of size 12 (query) and 10 (key):

    uq, qr    rows of a head are [8 nope, 4 rope]        dq     rows are the latent
    uk        rows of a head are [8 nope, 6 value]       dkv, kr   rows are [10 latent, 4 rope]
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stand_ins_kit import (
    WIDTH,
    Case,
    Model,
    Rows,
    at,
    called,
    complex_rope,
    latent,
    layers,
    linear,
    one_row,
    rope,
    rope_sequence_first,
    sequence_first,
)
from stand_ins_systems import ColumnParallelLinear, DotProductAttention, ScaledDotProductAttentionWrapper

HEADS, NOPE, ROPE, VALUE, Q_RANK, KV_RANK = 4, 8, 4, 6, 12, 10


@called("Attention")
class TorchtitanMLA(nn.Module):
    """torchtitan's deepseek_v3 until lately: q with a latent and its norm, or, if q_lora_rank is 0, without."""

    def __init__(self, q_lora_rank: int = Q_RANK, norm: bool = True) -> None:
        super().__init__()
        self.dim, self.n_heads, self.q_lora_rank, self.kv_lora_rank = WIDTH, HEADS, q_lora_rank, KV_RANK
        self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim = NOPE, ROPE, VALUE
        self.qk_head_dim = NOPE + ROPE
        if q_lora_rank == 0:
            self.wq = linear(HEADS * self.qk_head_dim)
        else:
            self.wq_a, self.q_norm = linear(q_lora_rank), nn.RMSNorm(q_lora_rank) if norm else nn.Identity()
            self.wq_b = linear(HEADS * self.qk_head_dim, q_lora_rank)
        self.wkv_a, self.kv_norm = linear(KV_RANK + ROPE), nn.RMSNorm(KV_RANK) if norm else nn.Identity()
        self.wkv_b, self.wo = linear(HEADS * (NOPE + VALUE), KV_RANK), linear(WIDTH, HEADS * VALUE)
        self.softmax_scale, self.inner_attention = self.qk_head_dim**-0.5, ScaledDotProductAttentionWrapper()

    def forward(self, x: Tensor) -> Tensor:
        bsz, seqlen, _ = x.size()
        q = self.wq(x) if self.q_lora_rank == 0 else self.wq_b(self.q_norm(self.wq_a(x)))
        q_nope, q_pe = torch.split(q.view(bsz, seqlen, -1, self.qk_head_dim), [NOPE, ROPE], dim=-1)
        q = torch.cat([q_nope, complex_rope(q_pe)], dim=-1)
        kv, k_pe = torch.split(self.wkv_a(x), [self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        k_pe = complex_rope(k_pe.unsqueeze(2))
        kv = self.wkv_b(self.kv_norm(kv)).view(bsz, seqlen, -1, NOPE + VALUE)
        k_nope, v = torch.split(kv, [NOPE, VALUE], dim=-1)
        k = torch.cat([k_nope, k_pe.expand(-1, -1, self.n_heads, -1)], dim=-1)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        output = self.inner_attention(q, k, v, scale=self.softmax_scale)
        return self.wo(output.transpose(1, 2).contiguous().view(bsz, seqlen, -1))


class MLAAttention(nn.Module):
    """torchtitan's today: the keys' second matrix is inside the module that attends; tokens in one row."""

    def __init__(self) -> None:
        super().__init__()
        self.wkv_b = linear(HEADS * (NOPE + VALUE), KV_RANK)

    def forward(self, q_THK: Tensor, kv_c_normed_TL: Tensor, k_shared_TR: Tensor) -> Tensor:
        kv_THP = self.wkv_b(kv_c_normed_TL).view(-1, HEADS, NOPE + VALUE)
        k_nope_THN, v_THV = torch.split(kv_THP, [NOPE, VALUE], dim=-1)
        k_THK = torch.cat((k_nope_THN, k_shared_TR.unsqueeze(1).expand(-1, HEADS, -1)), dim=-1)
        q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q_THK, k_THK, v_THV))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(0).transpose(0, 1)


@called("Attention")
class NestedMLA(nn.Module):
    """torchtitan's deepseek_v3 today."""

    def __init__(self) -> None:
        super().__init__()
        self.wq_a, self.q_norm, self.wq_b = linear(Q_RANK), nn.RMSNorm(Q_RANK), linear(HEADS * (NOPE + ROPE), Q_RANK)
        self.wkv_a, self.kv_norm = linear(KV_RANK + ROPE), nn.RMSNorm(KV_RANK)
        self.mla_attention, self.wo = MLAAttention(), linear(WIDTH, HEADS * VALUE)

    def forward(self, x_TD: Tensor) -> Tensor:
        q_nope, q_pe = self.wq_b(self.q_norm(self.wq_a(x_TD))).view(-1, HEADS, NOPE + ROPE).split([NOPE, ROPE], dim=-1)
        kv_c, k_pe = self.wkv_a(x_TD).split([KV_RANK, ROPE], dim=-1)
        q_pe, k_pe = (complex_rope(t.unsqueeze(0)).squeeze(0) for t in (q_pe, k_pe.unsqueeze(1)))
        q = torch.cat([q_nope, q_pe], dim=-1)
        return self.wo(self.mla_attention(q, self.kv_norm(kv_c), k_pe.squeeze(1)).flatten(1))


class MLASelfAttention(nn.Module):
    """Megatron's: sequence first, linears that return a pair; the two down projections may be one."""

    def __init__(self, fused_down: bool) -> None:
        super().__init__()
        self.num_attention_heads_per_partition, self.q_head_dim, self.fused_down = HEADS, NOPE + ROPE, fused_down
        if fused_down:
            self.linear_qkv_down_proj = ColumnParallelLinear(WIDTH, Q_RANK + KV_RANK + ROPE)
        else:
            self.linear_q_down_proj = ColumnParallelLinear(WIDTH, Q_RANK)
            self.linear_kv_down_proj = ColumnParallelLinear(WIDTH, KV_RANK + ROPE)
        self.linear_q_up_proj = ColumnParallelLinear(Q_RANK, HEADS * (NOPE + ROPE))
        self.linear_kv_up_proj = ColumnParallelLinear(KV_RANK, HEADS * (NOPE + VALUE))
        self.q_layernorm, self.kv_layernorm = nn.LayerNorm(Q_RANK), nn.LayerNorm(KV_RANK)
        self.core_attention = DotProductAttention(1 / math.sqrt(self.q_head_dim))
        self.linear_proj = ColumnParallelLinear(HEADS * VALUE, WIDTH)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor | None]:
        s, b, _ = hidden_states.shape
        if self.fused_down:
            q_compressed, kv_combined = self.linear_qkv_down_proj(hidden_states)[0].split([Q_RANK, KV_RANK + ROPE], -1)
        else:
            (q_compressed, _), (kv_combined, _) = (
                self.linear_q_down_proj(hidden_states),
                self.linear_kv_down_proj(hidden_states),
            )
        kv_compressed, k_pos_emb = torch.split(kv_combined, [KV_RANK, ROPE], dim=-1)
        q, _ = self.linear_q_up_proj(self.q_layernorm(q_compressed))
        kv, _ = self.linear_kv_up_proj(self.kv_layernorm(kv_compressed))
        q_no_pe, q_pos_emb = torch.split(q.view(s, b, HEADS, self.q_head_dim), [NOPE, ROPE], dim=-1)
        k_no_pe, value = torch.split(kv.view(s, b, HEADS, NOPE + VALUE), [NOPE, VALUE], dim=-1)
        k_pos_emb = rope_sequence_first(k_pos_emb.unsqueeze(-2)).expand(-1, -1, HEADS, -1)
        query = torch.cat([q_no_pe, rope_sequence_first(q_pos_emb)], dim=-1).contiguous()
        key = torch.cat([k_no_pe, k_pos_emb], dim=-1).contiguous()
        return self.linear_proj(self.core_attention(query, key, value.contiguous()))


class MLA(nn.Module):
    """DeepSeek's own, absorbed: the query is multiplied by the keys' matrix, and the latent is the key."""

    def __init__(self) -> None:
        super().__init__()
        self.wq_a, self.q_norm, self.wq_b = linear(Q_RANK), nn.RMSNorm(Q_RANK), linear(HEADS * (NOPE + ROPE), Q_RANK)
        self.wkv_a, self.kv_norm = linear(KV_RANK + ROPE), nn.RMSNorm(KV_RANK)
        self.wkv_b, self.wo = linear(HEADS * (NOPE + VALUE), KV_RANK), linear(WIDTH, HEADS * VALUE)
        self.n_local_heads, self.softmax_scale = HEADS, (NOPE + ROPE) ** -0.5

    def forward(self, x: Tensor) -> Tensor:
        bsz, seqlen, _ = x.size()
        q = self.wq_b(self.q_norm(self.wq_a(x))).view(bsz, seqlen, self.n_local_heads, NOPE + ROPE)
        q_nope, q_pe = torch.split(q, [NOPE, ROPE], dim=-1)
        kv, k_pe = torch.split(self.wkv_a(x), [KV_RANK, ROPE], dim=-1)
        q_pe, k_pe = complex_rope(q_pe), complex_rope(k_pe.unsqueeze(2)).squeeze(2)
        wkv_b, kv = self.wkv_b.weight.view(self.n_local_heads, -1, KV_RANK), self.kv_norm(kv)
        q_nope = torch.einsum("bshd,hdc->bshc", q_nope, wkv_b[:, :NOPE])
        scores = torch.einsum("bshc,btc->bsht", q_nope, kv) + torch.einsum("bshr,btr->bsht", q_pe, k_pe)
        mask = torch.full((seqlen, seqlen), float("-inf")).triu_(1)
        scores = (scores * self.softmax_scale + mask.unsqueeze(1)).softmax(dim=-1, dtype=torch.float32).type_as(x)
        x = torch.einsum("bsht,btc->bshc", scores, kv)
        return self.wo(torch.einsum("bshc,hdc->bshd", x, wkv_b[:, -VALUE:]).flatten(2))


class PaperMLA(nn.Module):
    """The paper's equations: separate matrices, no norm on a latent."""

    def __init__(self) -> None:
        super().__init__()
        self.dq, self.dkv, self.kr = linear(Q_RANK), linear(KV_RANK), linear(ROPE)
        self.uq, self.qr = linear(HEADS * NOPE, Q_RANK), linear(HEADS * ROPE, Q_RANK)
        self.uk, self.uv = linear(HEADS * NOPE, KV_RANK), linear(HEADS * VALUE, KV_RANK)
        self.o = linear(WIDTH, HEADS * VALUE)

    def forward(self, x: Tensor) -> Tensor:
        c_q, c_kv = self.dq(x), self.dkv(x)
        q, k, v = (u(c).unflatten(2, (HEADS, -1)) for u, c in ((self.uq, c_q), (self.uk, c_kv), (self.uv, c_kv)))
        q_rope, k_rope = rope(self.qr(c_q).unflatten(2, (HEADS, -1))), rope(self.kr(x).unsqueeze(2))
        q, k = torch.cat([q, q_rope], 3), torch.cat([k, k_rope.expand(-1, -1, HEADS, -1)], 3)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


NOPE_ROWS, ROPE_ROWS, KEY_ROWS = at(8, 0, 12, 24, 36), at(4, 8, 20, 32, 44), at(8, 0, 14, 28, 42)
UP = {
    "uq": Rows("wq_b.weight", NOPE_ROWS),
    "qr": Rows("wq_b.weight", ROPE_ROWS),
    "uk": Rows("wkv_b.weight", KEY_ROWS),
    "kr": Rows("wkv_a.weight", at(4, 10, 10, 10, 10)),
}
NORMED = latent(**UP)
FULL_Q = latent(**UP | {"uq": Rows("wq.weight", NOPE_ROWS), "qr": Rows("wq.weight", ROPE_ROWS)})
NESTED = latent(**UP | {"uk": Rows("mla_attention.wkv_b.weight", KEY_ROWS)})
NO_NORM = latent(**UP, dq=Rows("wq_a.weight", at(12, 0, 0, 0, 0)), dkv=Rows("wkv_a.weight", at(10, 0, 0, 0, 0)))
MEGATRON_UP = {
    "uq": Rows("linear_q_up_proj.weight", NOPE_ROWS),
    "qr": Rows("linear_q_up_proj.weight", ROPE_ROWS),
    "uk": Rows("linear_kv_up_proj.weight", KEY_ROWS),
}
MEGATRON = latent(**MEGATRON_UP, kr=Rows("linear_kv_down_proj.weight", at(4, 10, 10, 10, 10)))
MEGATRON_FUSED = latent(**MEGATRON_UP, kr=Rows("linear_qkv_down_proj.weight", at(4, 22, 22, 22, 22)))
PAPER = latent(
    dq=Rows("dq.weight", at(12, 0, 0, 0, 0)),
    dkv=Rows("dkv.weight", at(10, 0, 0, 0, 0)),
    kr=Rows("kr.weight", at(4, 0, 0, 0, 0)),
    uq=Rows("uq.weight", at(8, 0, 8, 16, 24)),
    uk=Rows("uk.weight", at(8, 0, 8, 16, 24)),
    qr=Rows("qr.weight", at(4, 0, 4, 8, 12)),
)
TITAN, MCORE, DEEPSEEK = "layers.{}.attention", "decoder.layers.{}.self_attention", "layers.{}.attn"

CASES = [
    Case(
        "torchtitan MLA, with and without a query latent",
        lambda: Model(TITAN, TorchtitanMLA(), TorchtitanMLA(q_lora_rank=0)),
        layers(TITAN, NORMED, FULL_Q),
    ),
    Case(
        "torchtitan MLA, nested",
        lambda: Model(TITAN, NestedMLA(), NestedMLA(), arrange=one_row),
        layers(TITAN, NESTED, NESTED),
    ),
    Case(
        "torchtitan MLA, no norm",
        lambda: Model(TITAN, TorchtitanMLA(norm=False), TorchtitanMLA(norm=False)),
        layers(TITAN, NO_NORM, NO_NORM),
    ),
    Case(
        "Megatron MLA, two down projections and one",
        lambda: Model(MCORE, MLASelfAttention(False), MLASelfAttention(True), arrange=sequence_first),
        layers(MCORE, MEGATRON, MEGATRON_FUSED),
    ),
    Case("DeepSeek MLA, absorbed", lambda: Model(DEEPSEEK, MLA(), MLA()), layers(DEEPSEEK, NORMED, NORMED)),
    Case("the paper's MLA", lambda: Model(DEEPSEEK, PaperMLA(), PaperMLA()), layers(DEEPSEEK, PAPER, PAPER)),
]
