"""Stand-ins for the attention of known training systems, each written from scratch in its manner.

Four heads of size 8 on a width of 32; where the original groups heads, two groups. Names, order of rows and functions
called are the original's; what it does for speed or for several devices is left out.
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
    causal,
    complex_rope,
    layers,
    linear,
    one_row,
    qk,
    rope,
    rope_sequence_first,
    sequence_first,
)

HEADS, GROUPS, SIZE = 4, 2, 8


class ScaledDotProductAttentionWrapper(nn.Module):
    """torchtitan's: attention is a module of its own, and has no weights."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)


@called("Attention", "torchtitan.models.llama3")
class TorchtitanAttention(nn.Module):
    """torchtitan's llama3 until lately."""

    def __init__(self) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.n_rep, self.head_dim = HEADS, GROUPS, HEADS // GROUPS, SIZE
        self.wq, self.wk, self.wv = linear(32), linear(16), linear(16)
        self.wo = linear(WIDTH)
        self.inner_attention = ScaledDotProductAttentionWrapper()

    def forward(self, x: Tensor) -> Tensor:
        bs, seqlen, _ = x.shape
        xq, xk, xv = (w(x).view(bs, seqlen, -1, self.head_dim) for w in (self.wq, self.wk, self.wv))
        xq, xk = complex_rope(xq), complex_rope(xk)
        keys, values = (t.repeat_interleave(self.n_rep, dim=2) for t in (xk, xv))
        output = self.inner_attention(xq.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2))
        return self.wo(output.transpose(1, 2).contiguous().view(bs, seqlen, -1))


class QKVLinear(nn.Module):
    """torchtitan's: rows are [q, q, k, v] for each group in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim, self.heads_per_kv, self.r_dim = SIZE, HEADS // GROUPS, HEADS // GROUPS + 2
        self.wqkv = linear(GROUPS * self.r_dim * SIZE)

    def forward(self, x_TD: Tensor) -> tuple[Tensor, ...]:
        qkv = self.wqkv(x_TD).view(x_TD.shape[0], -1, self.r_dim, self.head_dim)
        split = torch.split(qkv, [self.heads_per_kv, 1, 1], dim=-2)
        return tuple(t.reshape(x_TD.shape[0], -1, self.head_dim).contiguous() for t in split)


class FlexInnerAttention(nn.Module):
    """torchtitan's, with another kernel: the tokens of all documents in one row, no batch."""

    def forward(self, q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, *, enable_gqa: bool) -> Tensor:
        q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q_THK, k_THK, v_THK))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=enable_gqa).squeeze(0).transpose(0, 1)


@called("GQAttention", "torchtitan")
class GQAttention(nn.Module):
    """torchtitan's llama3 and qwen3 today."""

    def __init__(self, qk_norm: bool = False) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim, self.enable_gqa = HEADS, GROUPS, SIZE, True
        self.qkv_linear, self.wo, self.inner_attention = QKVLinear(), linear(WIDTH), FlexInnerAttention()
        self.q_norm = nn.RMSNorm(SIZE) if qk_norm else None
        self.k_norm = nn.RMSNorm(SIZE) if qk_norm else None

    def forward(self, x_TD: Tensor) -> Tensor:
        xq, xk, xv = self.qkv_linear(x_TD)
        if self.q_norm is not None and self.k_norm is not None:
            xq, xk = self.q_norm(xq), self.k_norm(xk)
        xq, xk = (complex_rope(t.unsqueeze(0)).squeeze(0) for t in (xq, xk))
        out = self.inner_attention(xq, xk, xv, enable_gqa=self.enable_gqa).contiguous()
        return self.wo(out.view(out.shape[0], -1))


@called("ColumnParallelLinear", "megatron.core")
class ColumnParallelLinear(nn.Module):
    """Megatron's, on one device: returns (output, bias), the bias being None unless the caller is to add it."""

    def __init__(self, input_size: int, output_size: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(output_size, input_size) * input_size**-0.5)
        self.bias = nn.Parameter(torch.randn(output_size) * 0.1) if bias else None

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        output = torch.matmul(input_, self.weight.t())
        return (output if self.bias is None else output + self.bias), None


@called("TELayerNormColumnParallelLinear", "megatron.core")
class TELayerNormColumnParallelLinear(ColumnParallelLinear):
    """Transformer Engine's, as Megatron uses it: the block's norm is inside."""

    def __init__(self, input_size: int, output_size: int, bias: bool = False) -> None:
        super().__init__(input_size, output_size, bias)
        self.layer_norm_weight = nn.Parameter(torch.ones(input_size))

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        return super().forward(F.rms_norm(input_, (input_.shape[-1],), self.layer_norm_weight))


class FusedScaleMaskSoftmax(nn.Module):
    """Megatron's, unfused."""

    def forward(self, scores: Tensor) -> Tensor:
        return nn.Softmax(dim=-1)(causal(scores))


class DotProductAttention(nn.Module):
    """Megatron's: sequence first, heads folded into the batch, one baddbmm."""

    def __init__(self, softmax_scale: float) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale
        self.scale_mask_softmax, self.attention_dropout = FusedScaleMaskSoftmax(), nn.Dropout(0.0)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        repeats = query.shape[2] // key.shape[2]
        key, value = key.repeat_interleave(repeats, dim=2), value.repeat_interleave(repeats, dim=2)
        s, b, n, _ = query.shape
        query, key, value = (t.reshape(s, b * n, -1).transpose(0, 1) for t in (query, key, value))
        buffer = torch.empty(b * n, s, s)
        scores = torch.baddbmm(buffer, query, key.transpose(1, 2), beta=0.0, alpha=self.softmax_scale)
        probs = self.attention_dropout(self.scale_mask_softmax(scores.view(b, n, s, s)))
        context = torch.bmm(probs.view(b * n, s, s), value).view(b, n, s, -1)
        return context.permute(2, 0, 1, 3).contiguous().view(s, b, -1)


class SelfAttention(nn.Module):
    """Megatron's: rows are [q, q, k, v] for each group in turn."""

    def __init__(self, column: type[ColumnParallelLinear], bias: bool) -> None:
        super().__init__()
        self.hidden_size_per_attention_head = SIZE
        self.num_attention_heads_per_partition, self.num_query_groups_per_partition = HEADS, GROUPS
        self.linear_qkv = column(WIDTH, (HEADS + 2 * GROUPS) * SIZE, bias)
        self.core_attention = DotProductAttention(1 / math.sqrt(SIZE))
        self.linear_proj = ColumnParallelLinear(HEADS * SIZE, WIDTH)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor | None]:
        mixed_qkv, _ = self.linear_qkv(hidden_states)
        s, b, _ = mixed_qkv.shape
        mixed_qkv = mixed_qkv.view(s, b, GROUPS, (HEADS // GROUPS + 2) * SIZE)
        query, key, value = torch.split(mixed_qkv, [HEADS // GROUPS * SIZE, SIZE, SIZE], dim=3)
        query, key = rope_sequence_first(query.reshape(s, b, -1, SIZE)), rope_sequence_first(key)
        return self.linear_proj(self.core_attention(query, key, value))


class TorchAttentionBackend(nn.Module):
    """OLMo-core's: takes (q, k, v) as one argument."""

    def forward(self, qkv: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        q, k, v = qkv
        k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], dim=2) for t in (k, v))
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).contiguous()


@called("Attention")
class OLMoAttention(nn.Module):
    """OLMo-core's: clips in place; a norm over the whole width, or over each head."""

    def __init__(self, clip_qkv: float | None = None, q_norm: int | None = None, k_norm: int | None = None) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim, self.clip_qkv = HEADS, GROUPS, SIZE, clip_qkv
        self.w_q, self.w_k, self.w_v, self.w_out = linear(32), linear(16), linear(16), linear(WIDTH)
        self.use_head_qk_norm = q_norm == SIZE
        self.q_norm, self.k_norm = (nn.RMSNorm(size) if size else None for size in (q_norm, k_norm))
        self.backend = TorchAttentionBackend()

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        q, k, v = self.w_q(x), self.w_k(x), self.w_v(x)
        if self.clip_qkv is not None:
            q.clamp_(min=-self.clip_qkv, max=self.clip_qkv)
            k.clamp_(min=-self.clip_qkv, max=self.clip_qkv)
            v.clamp_(min=-self.clip_qkv, max=self.clip_qkv)
        if self.q_norm is not None and self.k_norm is not None and not self.use_head_qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (t.view(B, T, -1, self.head_dim) for t in (q, k, v))
        if self.q_norm is not None and self.k_norm is not None and self.use_head_qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        return self.w_out(self.backend((rope(q), rope(k), v)).view(B, T, -1))


@called("Attention")
class LinguaAttention(nn.Module):
    """lingua's; without a mask given, every token sees every other."""

    def __init__(self) -> None:
        super().__init__()
        self.dim, self.head_dim, self.n_heads, self.n_kv_heads = WIDTH, SIZE, HEADS, GROUPS
        self.heads_per_group = HEADS // GROUPS
        self.wq, self.wk, self.wv, self.wo = linear(32), linear(16), linear(16), linear(WIDTH)

    def forward(self, x: Tensor, mask: Tensor | str | None = None) -> Tensor:
        bsz, seq_len, _ = x.shape
        xq, xk, xv = self.wq(x.view_as(x)), self.wk(x.view_as(x)), self.wv(x.view_as(x))
        output_shape = xq.shape
        xq, xk, xv = (t.view(bsz, seq_len, -1, self.head_dim) for t in (xq, xk, xv))
        xq, xk = complex_rope(xq), complex_rope(xk)
        xk, xv = (
            t[:, :, :, None].expand(-1, -1, -1, self.heads_per_group, -1).reshape(bsz, seq_len, self.n_heads, -1)
            for t in (xk, xv)
        )
        xq, xk, xv = (t.transpose(1, 2) for t in (xq, xk, xv))
        output = F.scaled_dot_product_attention(xq, xk, xv, is_causal=mask == "causal")
        return self.wo(output.transpose(1, 2).contiguous().reshape(output_shape))


GROUPED = qk(Rows("wq.weight", at(8, 0, 8, 16, 24)), Rows("wk.weight", at(8, 0, 0, 8, 8)))
OLMO = qk(Rows("w_q.weight", at(8, 0, 8, 16, 24)), Rows("w_k.weight", at(8, 0, 0, 8, 8)))
Q, K = at(8, 0, 8, 32, 40), at(8, 16, 16, 48, 48)  # [q, q, k, v] of the first two heads, [q, q, k, v] of the others
TITAN_FUSED = qk(Rows("qkv_linear.wqkv.weight", Q), Rows("qkv_linear.wqkv.weight", K))
MEGATRON = qk(Rows("linear_qkv.weight", Q), Rows("linear_qkv.weight", K))
MEGATRON_BIAS = qk(
    Rows("linear_qkv.weight", Q, bias="linear_qkv.bias"), Rows("linear_qkv.weight", K, bias="linear_qkv.bias")
)
TITAN, MCORE, BLOCKS = "layers.{}.attention", "decoder.layers.{}.self_attention", "blocks.{}.attention"

CASES = [
    Case(
        "torchtitan, separate",
        lambda: Model(TITAN, TorchtitanAttention(), TorchtitanAttention()),
        layers(TITAN, GROUPED, GROUPED),
    ),
    Case(
        "torchtitan, fused",
        lambda: Model(TITAN, GQAttention(), GQAttention(), arrange=one_row),
        layers(TITAN, TITAN_FUSED, TITAN_FUSED),
    ),
    Case(
        "torchtitan, one of two layers with a norm",
        lambda: Model(TITAN, GQAttention(), GQAttention(qk_norm=True), arrange=one_row),
        layers(TITAN, TITAN_FUSED),
        {"layers.1.attention": "norm"},
    ),
    Case(
        "Megatron, in the second layer with its norm inside",
        lambda: Model(
            MCORE,
            SelfAttention(ColumnParallelLinear, bias=False),
            SelfAttention(TELayerNormColumnParallelLinear, bias=True),
            arrange=sequence_first,
        ),
        layers(MCORE, MEGATRON, MEGATRON_BIAS),
    ),
    Case(
        "OLMo-core, clipping in the second layer",
        lambda: Model(BLOCKS, OLMoAttention(), OLMoAttention(clip_qkv=0.5)),
        layers(BLOCKS, OLMO, OLMO),
    ),
    Case(
        "OLMo-core, norm over the width and over each head",
        lambda: Model(BLOCKS, OLMoAttention(q_norm=32, k_norm=16), OLMoAttention(q_norm=8, k_norm=8)),
        {},
        {"blocks.0.attention": "norm", "blocks.1.attention": "norm"},
    ),
    Case(
        "lingua",
        lambda: Model(TITAN, LinguaAttention(), LinguaAttention()),
        layers(TITAN, GROUPED, GROUPED),
    ),
]
